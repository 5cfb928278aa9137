"""Error measures: how far predictions are from measurements, and repeats from each other."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import ks_2samp


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of predictions, as shares of what was measured.

    Attributes:
        count: pairs.
        median, p90, worst: of absolute errors.
        bias: median of signed errors; positive where the prediction is larger.
    """

    count: int
    median: float
    p90: float
    worst: float
    bias: float

    def to_json(self) -> dict[str, Any]:
        """Plain form."""
        return asdict(self)


def signed(predicted: ArrayLike, measured: ArrayLike) -> NDArray[np.float64]:
    """predicted / measured - 1.

    Raises:
        ValueError: a measured value is not positive.
    """
    truth = np.asarray(measured, np.float64)
    if not (truth > 0).all():
        raise ValueError("a relative error needs positive measurements")
    return np.asarray(predicted, np.float64) / truth - 1.0


def errors(predicted: ArrayLike, measured: ArrayLike) -> Errors:
    """Relative errors of pairs.

    Raises:
        ValueError: there is no pair, or a measured value is not positive.
    """
    relative = signed(predicted, measured)
    if not relative.size:
        raise ValueError("errors need at least one pair")
    absolute = np.abs(relative)
    return Errors(
        relative.size,
        float(np.median(absolute)),
        float(np.quantile(absolute, 0.9)),
        float(absolute.max()),
        float(np.median(relative)),
    )


def ks_distance(one: ArrayLike, other: ArrayLike) -> float:
    """Largest distance of two samples' cumulative distributions (Kolmogorov-Smirnov), 0 to 1."""
    # The method decides about the p-value alone, which nobody asks for.
    return float(ks_2samp(np.asarray(one), np.asarray(other), method="asymp").statistic)


def spread(values: Sequence[float]) -> float | None:
    """(largest - smallest) / median of repeats; None for fewer than two.

    An error below it says nothing: the measurement does not repeat itself any better.
    """
    if len(values) < 2:
        return None
    return float((max(values) - min(values)) / np.median(values))
