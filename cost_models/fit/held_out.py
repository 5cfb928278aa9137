"""held_out: the error on whole shapes that the fit has not seen, with an interval over shapes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from granikv.cost_models.fit.surface_fit import Grid, Ideal, Samples, fit_surface
from granikv.cost_models.surface import FloatArray

_FOLDS = 5
_SEED = 20261130
_RESAMPLES = 400
_INTERVAL = (0.05, 0.95)


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Absolute relative errors over points, and intervals from resampling whole shapes.

    Attributes:
        median, p90: of the points.
        median_interval, p90_interval: 5 % and 95 % of the resampled values.
        points, shapes: how many.
    """

    median: float
    p90: float
    median_interval: tuple[float, float]
    p90_interval: tuple[float, float]
    points: int
    shapes: int


def folds_of(shape: np.ndarray, folds: int = _FOLDS) -> np.ndarray:
    """Fold of each point: whole shapes are dealt out at random, the same in every run."""
    names = np.unique(shape)
    order = np.random.default_rng(_SEED).permutation(len(names))
    fold_of_name = np.empty(len(names), np.intp)
    fold_of_name[order] = np.arange(len(names)) % folds
    return np.asarray(fold_of_name[np.searchsorted(names, shape)])


def predict_unseen(
    shape: np.ndarray, predict: Callable[[NDArray[np.bool_]], FloatArray], folds: int = _FOLDS
) -> FloatArray:
    """Every point by a fit that has not seen its shape.

    `predict` fits to the points outside of a mask and predicts those inside.
    """
    fold = folds_of(shape, folds)
    predicted = np.empty(len(shape))
    for held in np.unique(fold):
        hidden = fold == held
        predicted[hidden] = predict(hidden)
    return predicted


def predict_held_out(grid: Grid, samples: Samples, ideal: Ideal, folds: int = _FOLDS) -> FloatArray:
    """Predicted time of every point in ns, each by a fit that has not seen its shape."""

    def predict(hidden: NDArray[np.bool_]) -> FloatArray:
        surface = fit_surface(grid, samples.take(~hidden), ideal)
        sizes = samples.sizes[hidden].T
        return np.asarray(ideal(*sizes) / surface.efficiency(*sizes))

    return predict_unseen(samples.shape, predict, folds)


def summarise(predicted: FloatArray, measured: FloatArray, shape: np.ndarray) -> ErrorSummary:
    """Median and 90th percentile of the absolute relative error, with intervals over shapes."""
    error = np.abs(predicted / measured - 1)
    names, index = np.unique(shape, return_inverse=True)
    by_shape = [error[index == i] for i in range(len(names))]
    rng = np.random.default_rng(_SEED)
    draws = np.array(
        [
            np.quantile(np.concatenate([by_shape[i] for i in drawn]), (0.5, 0.9))
            for drawn in rng.integers(0, len(names), (_RESAMPLES, len(names)))
        ]
    )
    low, high = np.quantile(draws, _INTERVAL, axis=0)
    return ErrorSummary(
        float(np.median(error)),
        float(np.quantile(error, 0.9)),
        (float(low[0]), float(high[0])),
        (float(low[1]), float(high[1])),
        len(error),
        len(names),
    )
