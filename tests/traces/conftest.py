import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def data() -> Path:
    """Small cuts of public traces; data/SOURCE.md says where they come from."""
    return Path(__file__).parent / "data"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write text, or rows as JSON lines, to a file whose name says nothing about its format."""

    def write_file(content: str | Iterable[Any], name: str = "trace.dat") -> Path:
        text = (
            content
            if isinstance(content, str)
            else "".join(json.dumps(row) + "\n" for row in content)
        )
        path = tmp_path / name
        if name.endswith(".gz"):
            with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
                file.write(text)
        else:
            path.write_bytes(text.encode())
        return path

    return write_file
