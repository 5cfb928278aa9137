"""Find shipped data files by name, or a user's own by path."""

import difflib
from pathlib import Path

from granikv.core.errors import ConfigError

DATA = Path(__file__).parent / "data"


def shipped_names(kind: str, suffix: str) -> list[str]:
    """Names that `data_file` knows for one kind of data, sorted."""
    return sorted(path.stem for path in (DATA / kind).glob(f"*{suffix}"))


def data_file(kind: str, suffix: str, name_or_path: str) -> Path:
    """The file for a shipped name, or the path itself when it exists.

    Raises:
        ConfigError: neither; the message has the nearest name and the list.
    """
    names = shipped_names(kind, suffix)
    if name_or_path.lower() in names:
        return DATA / kind / f"{name_or_path.lower()}{suffix}"
    path = Path(name_or_path)
    if path.exists():
        return path
    near = difflib.get_close_matches(name_or_path.lower(), names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"{name_or_path} is neither a file nor a known entry of {kind}.{hint} "
        f"Known: {', '.join(names)}."
    )
