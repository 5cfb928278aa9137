"""Repartition policies by name, and a user's own from a Python file."""

import difflib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from granikv.core.errors import ConfigError
from granikv.core.marginal import MarginalPolicy
from granikv.core.repartition import RepartitionPolicy, StaticPolicy, Window
from granikv.core.watermark import WatermarkPolicy

_POLICIES: dict[str, Callable[[], RepartitionPolicy]] = {
    "static": StaticPolicy,
    "watermark": WatermarkPolicy,
    "marginal": MarginalPolicy,
}
POLICIES: tuple[str, ...] = tuple(_POLICIES)


def make_policy(name: str) -> RepartitionPolicy:
    """Build a policy by name, or from a file by `path/to/file.py:Name`.

    Raises:
        ConfigError: the name is not known, or the file has no such policy.
    """
    if name in _POLICIES:
        return _POLICIES[name]()
    file, colon, class_name = name.rpartition(":")
    if colon and file.endswith(".py"):
        return _from_file(Path(file), class_name)
    if name.endswith(".py"):
        raise ConfigError(f"Repartition policy {name} lacks a class; write {name}:NAME.")
    near = difflib.get_close_matches(name, POLICIES, n=1)
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else f"choose one of {', '.join(POLICIES)}, or path/to/file.py:Name."
    )
    raise ConfigError(f"Repartition policy {name!r} does not exist; {hint}")


def _from_file(path: Path, class_name: str) -> RepartitionPolicy:
    if not path.is_file():
        raise ConfigError(f"Repartition policy file {path} does not exist; check the path.")
    made = getattr(_load(path), class_name, None)
    if not isinstance(made, type):
        raise ConfigError(
            f"Repartition policy file {path} has no class {class_name!r}; define it, or name"
            " another after the colon."
        )
    try:
        policy: Any = made()
    except Exception as error:
        raise ConfigError(
            f"Repartition policy {class_name} of {path} cannot be built without arguments"
            f" ({_in_words(error)}); give each of them a default."
        ) from error
    if not callable(getattr(policy, "observe", None)):
        raise ConfigError(
            f"Repartition policy {class_name} of {path} has no method observe; add"
            " observe(self, window), which returns HOT tokens or None."
        )
    return _OwnPolicy(policy, path.absolute())


@dataclass(frozen=True, slots=True)
class _OwnPolicy:
    """A user's policy; what it raises is the user's to correct, not a bug in GraniKV."""

    policy: RepartitionPolicy
    path: Path

    def observe(self, window: Window) -> int | None:
        """Ask the policy.

        Raises:
            ConfigError: it raised anything; the message says in which line of its file.
        """
        try:
            return self.policy.observe(window)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame.lineno for frame in frames if Path(frame.filename) == self.path]
            raise ConfigError(
                f"Repartition policy {type(self.policy).__name__} of {self.path} failed"
                f"{f' in line {own[-1]}' if own else ''} ({_in_words(error)}); correct it."
            ) from error


def _load(path: Path) -> ModuleType:
    """Run the file as a module of its own, anew each time: it may have been edited."""
    spec = importlib.util.spec_from_file_location(f"granikv_policy:{path.resolve()}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"Repartition policy file {path} cannot be loaded; it must end in .py.")
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its own module up while it is made.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise ConfigError(
            f"Repartition policy file {path} cannot be loaded ({_in_words(error)}); correct it."
        ) from error
    return module


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
