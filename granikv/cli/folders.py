"""Folders and files that a command writes, checked before it starts."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from granikv.core.errors import ConfigError


def prepare_folder(folder: Path, name: str) -> None:
    """Make the folder ready for a `name`'s results: create it, or clear earlier ones out of it.

    Nothing else in it is touched.

    Raises:
        ConfigError: it holds something else, or cannot be created.
    """
    make_folder(folder)
    if not any(folder.iterdir()):
        return
    if not _is_earlier(folder, name):
        raise ConfigError(
            f"{folder} is not empty and holds no {name}.json of an earlier run; "
            "choose another --out."
        )
    shutil.rmtree(folder / "runs", ignore_errors=True)
    for suffix in ("json", "html"):
        (folder / f"{name}.{suffix}").unlink(missing_ok=True)


def written(folder: Path, names: Sequence[str]) -> str:
    """Those of the files that are there."""
    return ", ".join(str(folder / name) for name in names if (folder / name).exists())


def kept(folder: Path, names: Sequence[str]) -> str:
    """The same after an interrupt, as a sentence's end."""
    found = written(folder, names)
    return f"kept: {found}." if found else "nothing was kept."


def make_folder(folder: Path) -> None:
    """Create a folder for results, unless it is there.

    Raises:
        ConfigError: it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be created ({error.strerror}); choose another --out."
        ) from None


def _is_earlier(folder: Path, name: str) -> bool:
    try:
        body = json.loads((folder / f"{name}.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(body, dict) and str(body.get("format", "")).startswith(f"granikv-{name}-")


def check_new_file(path: Path, source: Path | None = None) -> None:
    """Check that a file can be written.

    Raises:
        ConfigError: its folder does not exist, it is a folder, or it is the file being read.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} does not exist; create the folder first.")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file in it.")
    if source is not None and path.exists() and path.samefile(source):
        raise ConfigError(f"{path} is the trace being read; name another file.")
