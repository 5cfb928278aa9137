"""TermFit: a fitted term as the parameter file holds it, beside the rows that it rests on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from granikv.cost_models.fit.held_out import ErrorSummary, summarise
from granikv.cost_models.params import FittedSurface, HeldOutError
from granikv.cost_models.surface import FloatArray, Surface

_DIGITS = 5
# A normal distribution with this median or this 90th percentile of absolute errors has sigma 1.
_SIGMA_OF_MEDIAN, _SIGMA_OF_P90 = 1.4826, 1 / 1.645


@dataclass(frozen=True, slots=True)
class TermFit:
    """One fitted term with what its report shows.

    Attributes:
        name: field of the parameter file.
        title: what the figure table calls it.
        fitted: what the parameter file holds.
        sizes: axis to the size of each row.
        measured_ns: median of each row.
        predicted_ns: each row by the final fit.
        held_out_ns: each row by a fit that has not seen its shape.
        error: of `held_out_ns`.
        goal: median and 90th percentile to reach, if there is one.
    """

    name: str
    title: str
    fitted: FittedSurface
    sizes: dict[str, FloatArray]
    measured_ns: FloatArray
    predicted_ns: FloatArray
    held_out_ns: FloatArray
    error: ErrorSummary
    goal: tuple[float, float] | None

    @property
    def meets_goal(self) -> bool | None:
        """Whether both goals are reached; None when there is none."""
        if self.goal is None:
            return None
        return self.error.median <= self.goal[0] and self.error.p90 <= self.goal[1]


@dataclass(frozen=True, slots=True)
class FitParts:
    """What the three ways of fitting hand over to `make_result`.

    Attributes:
        axes: axis to knots.
        shape: name of each row's whole shape.
        shape_kind: what a whole shape is, in the plural.
    """

    name: str
    title: str
    surface: Surface
    axes: dict[str, tuple[float, ...]]
    latency_ns: float
    sizes: dict[str, FloatArray]
    measured_ns: FloatArray
    predicted_ns: FloatArray
    held_out_ns: FloatArray
    shape: np.ndarray
    shape_kind: str
    source: str
    goal: tuple[float, float] | None


def make_result(parts: FitParts) -> TermFit:
    """Judge a fit and put it into the form of the parameter file."""
    error = summarise(parts.held_out_ns, parts.measured_ns, parts.shape)
    residual = float(np.median(np.abs(parts.predicted_ns / parts.measured_ns - 1)))
    sigma = max(error.median * _SIGMA_OF_MEDIAN, error.p90 * _SIGMA_OF_P90)
    fitted = FittedSurface(
        provenance="fitted",
        source=parts.source,
        rows_used=len(parts.measured_ns),
        rel_error=rounded(sigma),
        residual=rounded(residual),
        held_out=held_out_error(error, parts.shape_kind),
        valid_range={
            name: (float(values.min()), float(values.max())) for name, values in parts.sizes.items()
        },
        latency_ns=parts.latency_ns,
        axes=parts.axes,
        efficiency=tuple(
            float(f"{value:.{_DIGITS}g}") for value in np.exp(parts.surface.log_efficiency).ravel()
        ),
    )
    return TermFit(
        parts.name,
        parts.title,
        fitted,
        parts.sizes,
        parts.measured_ns,
        parts.predicted_ns,
        parts.held_out_ns,
        error,
        parts.goal,
    )


def held_out_error(error: ErrorSummary, shape_kind: str) -> HeldOutError:
    """A summary as the parameter file holds it; `shape_kind` names shapes in the plural."""
    return HeldOutError(
        median=rounded(error.median),
        p90=rounded(error.p90),
        median_interval=_pair(error.median_interval),
        p90_interval=_pair(error.p90_interval),
        shapes=f"{error.shapes} {shape_kind}",
    )


def rounded(value: float) -> float:
    """Four decimals: errors are not known better."""
    return round(value, 4)


def _pair(values: Sequence[float]) -> tuple[float, float]:
    return rounded(values[0]), rounded(values[1])
