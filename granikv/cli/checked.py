"""checked: options that are out of range, as a sentence that names the flag."""

from collections.abc import Callable
from typing import Any, TypeVar

from granikv.core.errors import ConfigError

_T = TypeVar("_T")

# What a field is called on the command line, where that is not its own name.
_FLAGS = {
    "start_s": "--start",
    "end_s": "--end",
    "tick_jitter_s": "--tick-jitter",
    "prepend_prefix_tokens": "--prepend-prefix",
    "max_think_s": "--max-think",
    "start_spread_s": "--start-spread",
    "hot_fraction": "--fp",
}


def checked(build: Callable[..., _T], **values: Any) -> _T:
    """Build options.

    Raises:
        ConfigError: a value is out of range.
    """
    from pydantic import ValidationError

    try:
        return build(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else build.__name__
        problem = first["msg"].replace("Input should", "must")
        raise ConfigError(f"{_flag(name)} {problem}, got {first['input']}.") from None
    except ValueError as error:
        words = (_FLAGS.get(word, word) for word in str(error).split(" "))
        name, *rest = words
        raise ConfigError(f"{_flag(name)} {' '.join(rest)}.") from None


def _flag(name: str) -> str:
    return name if name.startswith("--") else _FLAGS.get(name, f"--{name.replace('_', '-')}")
