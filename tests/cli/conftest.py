"""A small workload, and the command line run inside the test's own process."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from granikv.cli.main import main

SERVER = ("--model", "llama-3.1-8b", "--gpu", "h200-sxm")
WORKLOAD = """
requests: 40
arrivals: {kind: poisson, rate_per_s: 40}
prefixes: [{count: 2, tokens: 4096}]
private_tokens: 128
output_tokens: 24
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended; `error` is stderr."""

    code: int
    out: str
    error: str


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    """40 requests over about a second, behind two shared prefixes."""
    path = tmp_path / "workload.yaml"
    path.write_text(WORKLOAD)
    return path


@pytest.fixture
def granikv(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run one command line."""

    def run(*arguments: object) -> Ended:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return run
