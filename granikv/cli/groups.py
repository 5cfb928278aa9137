"""with_groups: option groups, each declared once as a dataclass and shared by several commands."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, get_type_hints


def with_groups(**groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command take every field of the given dataclasses as an option of its own.

    The command receives one instance per group, under the group's keyword. Every field must be
    `Annotated` with its typer option.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for n, p in inspect.signature(command).parameters.items() if n not in groups]
        hints = get_type_hints(command, include_extras=True)
        own = [parameter.replace(annotation=hints[parameter.name]) for parameter in own]
        shared = [parameter for group in groups.values() for parameter in _parameters(group)]

        def expanded(**values: Any) -> None:
            built = {
                name: group(**{field.name: values.pop(field.name) for field in fields(group)})
                for name, group in groups.items()
            }
            command(**values, **built)

        expanded.__doc__ = command.__doc__
        expanded.__name__ = command.__name__
        # typer reads both: defaults and order from the signature, options from the annotations.
        expanded.__annotations__ = {p.name: p.annotation for p in (*own, *shared)}
        expanded.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
        return expanded

    return decorate


def _parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
