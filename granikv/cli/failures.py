"""Failures: every way a command can end badly, as an exit code and what the screen says."""

import platform
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib import metadata

import typer

from granikv.core.errors import GraniKVError, IntegrityError

EXIT_USER = 1
EXIT_BUG = 3
EXIT_INTERRUPTED = 130

_VERSIONS = (
    "granikv",
    "numpy",
    "polars",
    "pydantic",
    "scipy",
    "simpy",
    "typer",
    "plotly",
    "joblib",
)


class InterruptError(Exception):
    """Ctrl-C; the message says what was kept and where."""


def exit_code_of(command: Callable[[], object]) -> int:
    """Run a command and answer its exit code: the one place where errors become words.

    1 is an error that the user can act on, 2 a usage error, 130 Ctrl-C, 3 a bug with a log file.
    """
    try:
        code = command()
    except InterruptError as error:
        return _say(f"Interrupted; {error}", EXIT_INTERRUPTED)
    except typer.TyperException as error:
        return _say(error.format_message(), error.exit_code)
    except IntegrityError as error:
        return _report_bug(error)
    except GraniKVError as error:
        return _say(str(error), EXIT_USER)
    except Exception as error:
        return _report_bug(error)
    if code == EXIT_INTERRUPTED:  # typer turns Ctrl-C into this
        return _say("Interrupted; nothing was kept.", EXIT_INTERRUPTED)
    return code if isinstance(code, int) else 0


def _say(message: str, code: int) -> int:
    print(" ".join(line.strip() for line in message.splitlines()), file=sys.stderr)
    return code


def _report_bug(error: Exception) -> int:
    with tempfile.NamedTemporaryFile("w", prefix="granikv-", suffix=".log", delete=False) as log:
        log.write(f"python {platform.python_version()} on {platform.platform()}\n")
        log.writelines(f"{name} {_version(name)}\n" for name in _VERSIONS)
        log.write(f"arguments {sys.argv[1:]}\n\n")
        log.writelines(traceback.format_exception(error))
    what = str(error) or "no message"
    return _say(
        f"A bug in GraniKV ({type(error).__name__}: {what}); "
        f"{log.name} has the details, please report it.",
        EXIT_BUG,
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
