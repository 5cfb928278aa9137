"""Folders and files that a command writes, checked before it starts."""

import json
import shutil
from pathlib import Path

from granikv.core.errors import ConfigError


def prepare_plan_folder(folder: Path) -> None:
    """Make the folder ready for a plan: create it, or clear an earlier plan out of it.

    Nothing else in it is touched.

    Raises:
        ConfigError: it holds something that is no plan, or cannot be created.
    """
    make_folder(folder)
    if not any(folder.iterdir()):
        return
    if not _is_plan(folder / "plan.json"):
        raise ConfigError(
            f"{folder} is not empty and holds no plan.json of an earlier plan; "
            "choose another --out."
        )
    shutil.rmtree(folder / "runs", ignore_errors=True)
    for name in ("plan.json", "plan.html"):
        (folder / name).unlink(missing_ok=True)


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


def _is_plan(path: Path) -> bool:
    try:
        body = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(body, dict) and str(body.get("format", "")).startswith("granikv-plan-")


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
