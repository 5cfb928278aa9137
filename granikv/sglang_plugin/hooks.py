"""Whether hooks have taken hold: SGLang logs one that it cannot apply, and goes on without it."""

from collections.abc import Callable, Sequence
from functools import reduce
from importlib import import_module
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from granikv.core.errors import ConfigError
from granikv.sglang_plugin.config import SGLANG_VERSION

Hook = tuple[str, Callable[..., Any], HookType]


def check_in_place(hooks: Sequence[Hook]) -> None:
    """Stop a server that would run without one of our hooks.

    Raises:
        ConfigError: a hook has not taken hold.
    """
    if missing := [target for target, hook, _ in hooks if not is_in_place(target, hook)]:
        raise ConfigError(
            f"GraniKV could not hook into {', '.join(missing)}; look for the plugin's error "
            f"earlier in the log, and check that SGLang {SGLANG_VERSION} is unmodified"
        )


def is_in_place(target: str, hook: Callable[..., Any]) -> bool:
    """Whether a call of `target` goes through `hook`."""
    module, *names = _split(target)
    call = reduce(getattr, names, import_module(module))
    while call is not None:
        cells = getattr(call, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return True
        call = getattr(call, "__wrapped__", None)
    return False


def _split(target: str) -> list[str]:
    """The module of a dotted name, then the rest of it; classes begin with a capital."""
    parts = target.split(".")
    of_class = [i for i, part in enumerate(parts) if part[0].isupper()]
    cut = of_class[0] if of_class else len(parts) - 1
    return [".".join(parts[:cut]), *parts[cut:]]
