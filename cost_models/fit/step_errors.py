"""step_errors: errors of predicted steps by mode, size and run."""

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

_PREDICTIONS = ("before_ns", "after_ns", "left_out_ns")
_FIRST_ROWS = (1, 8, 32, 128)  # where size classes begin


@dataclass(frozen=True, slots=True)
class StepErrors:
    """Absolute relative errors of a group of steps.

    Attributes:
        group: mode or run.
        rows: class of batch sizes, in words.
        errors: median and 90th percentile for each prediction that the steps have.
    """

    group: str
    rows: str
    steps: int
    errors: tuple[tuple[float, float], ...]


def step_errors(steps: pl.DataFrame) -> list[StepErrors]:
    """By mode and class of rows, by mode, and by run.

    Args:
        steps: of a `Calibration`; a column of predictions that it lacks is left out.
    """
    found = []
    for (mode,), frame in steps.sort("mode").group_by("mode", maintain_order=True):
        found += [_errors(str(mode), rows, part) for rows, part in _classes(frame)]
        found.append(_errors(str(mode), "all", frame))
    for (run,), frame in steps.sort("run").group_by("run", maintain_order=True):
        found.append(_errors(str(run), "all", frame))
    return found


def _classes(steps: pl.DataFrame) -> Iterator[tuple[str, pl.DataFrame]]:
    ends = (*_FIRST_ROWS[1:], None)
    for first, end in zip(_FIRST_ROWS, ends, strict=True):
        part = steps.filter(pl.col("rows") >= first)
        if end is not None:
            part = part.filter(pl.col("rows") < end)
        if part.height:
            yield f"{first}-{end - 1}" if end is not None else f"{first} and more", part


def _errors(group: str, rows: str, steps: pl.DataFrame) -> StepErrors:
    pairs = []
    for name in _PREDICTIONS:
        if name in steps.columns:
            error = (steps[name] / steps["measured_ns"] - 1).abs()
            pairs.append((float(error.quantile(0.5)), float(error.quantile(0.9))))  # type: ignore[arg-type]
    return StepErrors(group, rows, steps.height, tuple(pairs))
