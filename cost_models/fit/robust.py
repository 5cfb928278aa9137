"""bounded_fit: linear least squares within bounds, in which far points count less."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import lsq_linear

from granikv.cost_models.surface import FloatArray

_SWEEPS = 50


def bounded_fit(
    columns: Sequence[FloatArray],
    target: FloatArray,
    softness: float,
    upper: Sequence[float],
    weight: FloatArray | None = None,
) -> FloatArray:
    """One factor for each column, 0 or more, so that the columns sum to about `target`.

    Reweighted least squares: an error beyond `softness` counts as Huber's does, in proportion to
    its size instead of the square of it.

    Args:
        columns: `[n]` each; with `target`, in the units in which errors are alike.
        target: `[n]`, what the sum should be.
        softness: error from which a point counts less.
        upper: greatest value of each factor.
        weight: `[n]`, what each point counts; all alike when None.
    """
    design = np.column_stack(columns)
    counts = np.ones(len(target)) if weight is None else weight / weight.mean()
    # In units of their columns, so that the solver sees factors of one size.
    size = np.maximum(np.sqrt((design**2).mean(axis=0)), 1e-30)
    bounds = (np.zeros(len(size)), np.asarray(upper) * size)
    found, trust = np.zeros(len(size)), np.ones(len(target))
    for _ in range(_SWEEPS):
        root = np.sqrt(counts * trust)
        before = found
        found = lsq_linear(design / size * root[:, None], target * root, bounds).x
        if np.allclose(found, before, rtol=1e-7, atol=1e-12):
            break
        error = np.abs(design / size @ found - target)
        trust = np.minimum(1.0, softness / np.maximum(error, 1e-12))
    return np.asarray(found / size)
