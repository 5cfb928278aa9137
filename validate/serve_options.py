"""serve_options: what `granikv bench serve` is told, by either of its two command lines."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from granikv.core.errors import ConfigError

Choices = Mapping[str, str | float]

_HOT_FRACTION = "hot_fraction"


@dataclass(frozen=True, slots=True)
class Option:
    """An option of the command line, `--name-of-field`; a list may be given several times."""

    kind: type
    default: Any
    help: str


OPTIONS: Mapping[str, Option] = {
    "out": Option(Path, Path("serve.jsonl"), "JSON lines of results; appended to."),
    "cells": Option(
        str,
        "headline,poisson,unshared,grid",
        "Groups or names of cells with commas; see --dry-run.",
    ),
    "variants": Option(
        str, "stock,granikv,granikv-fa3", "Servers to compare, with commas, in this order."
    ),
    "sweep": Option(
        list,
        [],
        "NAME=VALUE,... of hot_fraction, admission, dispatch or repartition: our servers measure "
        "each cell under each; repeatable, for the product.",
    ),
    "budget_s": Option(float, 1500.0, "No cell is started later than this, in seconds."),
    "seed": Option(int, 0, "Seed of tokens, lengths and arrivals."),
    "record": Option(bool, False, "Servers write their steps, for run records."),
    "trace": Option(Path, None, "Plain trace to send as one more cell."),
    "url": Option(str, None, "A server that runs already; --variants names it."),
    "engine": Option(str, "{}", "More arguments of sglang.Engine, as JSON."),
    "table": Option(bool, False, "Print the table of such results; measure nothing."),
    "dry_run": Option(bool, False, "List what is left to measure, and guess seconds."),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run of the benchmark is told.

    Attributes:
        model: folder with a config.json; weights are not needed.
        out: file of results.
        cells: groups or names of cells.
        variants: names of variants, in the order in which they are started.
        budget_s: no cell is started later than this.
        seed: of token ids, lengths and arrivals.
        record: whether servers write their steps, for run records.
        trace: file of a plain trace to send as one more cell, before the others.
        url: a server that runs already; the only variant names it.
        engine: more arguments of `sglang.Engine`, for every variant.
        sweep: choices that our servers measure each cell under; none leaves them as they start.
    """

    model: str
    out: Path
    cells: tuple[str, ...]
    variants: tuple[str, ...]
    budget_s: float = 1500.0
    seed: int = 0
    record: bool = False
    trace: Path | None = None
    url: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    sweep: tuple[Choices, ...] = ()

    @property
    def identity(self) -> dict[str, Any]:
        """Columns that must be equal for a result to count as one of this run list."""
        return {
            "model": Path(self.model).name,
            "seed": self.seed,
            "engine": canonical(self.engine),
        }


def settings_of(model: str | None, chosen: Mapping[str, Any]) -> Settings:
    """Settings from the values of `OPTIONS`; those that measure nothing are left out.

    Raises:
        ConfigError: a value cannot be used.
    """
    if model is None:
        raise ConfigError("Name the model's folder: granikv bench serve MODEL.")
    if chosen["seed"] < 0:
        raise ConfigError(f"--seed must be 0 or more, got {chosen['seed']}.")
    trace = chosen["trace"]
    if trace is not None and not trace.is_file():
        raise ConfigError(f"--trace {trace} is no file; check the path.")
    return Settings(
        model=model,
        out=chosen["out"],
        cells=_names(chosen["cells"]),
        variants=_names(chosen["variants"]),
        budget_s=chosen["budget_s"],
        seed=chosen["seed"],
        record=chosen["record"],
        trace=trace,
        url=chosen["url"],
        engine=engine_arguments(chosen["engine"]),
        sweep=sweep_of(chosen["sweep"]),
    )


def canonical(arguments: Mapping[str, Any]) -> str:
    """The JSON text that stands for some arguments in results."""
    return json.dumps(arguments, sort_keys=True)


def engine_arguments(text: str) -> dict[str, Any]:
    """Arguments of an engine from a JSON object.

    Raises:
        ConfigError: it is none.
    """
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--engine {text} is no JSON ({error}).") from None
    if not isinstance(arguments, dict):
        raise ConfigError(f'--engine {text} is no JSON object; write {{"name": value}}.')
    return arguments


def sweep_of(texts: Sequence[str]) -> tuple[Choices, ...]:
    """The product of texts like `hot_fraction=0.1,0.2`, the last one fastest; none of no text.

    Raises:
        ConfigError: an option cannot be swept, comes twice, or has no such value.
    """
    swept: dict[str, list[str | float]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name in swept:
            raise ConfigError(f"--sweep {name} comes twice; give all its values at once.")
        swept[name] = list(dict.fromkeys(_value(name, value) for value in _names(values)))
        if not swept[name]:
            raise ConfigError(f"--sweep {text} has no values; write {name or 'NAME'}=VALUE,...")
    if not swept:
        return ()
    return tuple(dict(zip(swept, values, strict=True)) for values in product(*swept.values()))


def _value(name: str, text: str) -> str | float:
    # Here, because they load numpy, which no command line's help needs.
    from granikv.core.admission import ADMISSIONS
    from granikv.core.dispatch import DISPATCH_CHOICES
    from granikv.core.policies import POLICIES

    swept = {"admission": ADMISSIONS, "dispatch": DISPATCH_CHOICES, "repartition": POLICIES}
    if name in swept:
        if text in swept[name]:
            return text
        raise ConfigError(f"--sweep {name}={text}: choose from {', '.join(swept[name])}.")
    if name != _HOT_FRACTION:
        known = ", ".join((_HOT_FRACTION, *swept))
        raise ConfigError(f"--sweep {name} is not possible without a restart; only {known}.")
    try:
        fraction = float(text)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction < 1:
        raise ConfigError(f"--sweep {name}={text}: a fraction is between 0 and 1.")
    return fraction


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
