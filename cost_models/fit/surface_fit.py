"""fit_surface: a robust, smooth and monotone efficiency surface from measured times."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.linalg
import scipy.ndimage
import scipy.sparse as sparse

from granikv.cost_models.surface import FloatArray, Surface

_REWEIGHTS = 4
_HUBER = 0.08  # log error from which a point counts less
_RIDGE = 1e-5  # keeps knots without any row near them solvable
_SLOPE_STEP = 1e-4  # log2 units of the derivative of the ideal time
_MAX_SWEEPS = 200
# Time grows by at least this share per octave of work, and slowdowns keep that distance from none,
# so that values may be written with few digits and stay monotone and at most 1.
_LEAST_GROWTH = 2e-4
_LEAST_SLOWDOWN = 5e-3

# Ideal time in ns of sizes in natural units, one array argument for each axis.
Ideal = Callable[..., FloatArray]


@dataclass(frozen=True, slots=True)
class Samples:
    """Measured points of one term.

    Attributes:
        sizes: `[points, axes]` in natural units.
        time_ns: measured medians.
        shape: name of the whole shape that each point belongs to; the unit of holding out.
        weight: how much each point counts.
    """

    sizes: FloatArray
    time_ns: FloatArray
    shape: np.ndarray
    weight: FloatArray

    def take(self, chosen: np.ndarray) -> "Samples":
        """A subset by mask or index."""
        return Samples(
            self.sizes[chosen], self.time_ns[chosen], self.shape[chosen], self.weight[chosen]
        )


@dataclass(frozen=True, slots=True)
class Grid:
    """Knots of a surface, and how stiff it is along each axis.

    Attributes:
        names: axis names.
        knots: natural units, ascending.
        stiffness: weight of squared second differences of the log efficiency.
        work_axes: the first so many axes measure work, and time never falls along them; the others
            say what kind of work it is.
    """

    names: tuple[str, ...]
    knots: tuple[tuple[float, ...], ...]
    stiffness: tuple[float, ...]
    work_axes: int

    @property
    def log2_knots(self) -> tuple[FloatArray, ...]:
        """Knots as the surface holds them."""
        return tuple(np.log2(np.asarray(knots, np.float64)) for knots in self.knots)

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of knots along each axis."""
        return tuple(len(knots) for knots in self.knots)


def fit_surface(grid: Grid, samples: Samples, ideal: Ideal) -> Surface:
    """Fit `time = ideal / efficiency` by robust least squares of log time.

    The efficiency is at most 1, and along an axis of work it never grows faster than the ideal time
    does, so that more work is never predicted faster.
    """
    target = np.log(samples.time_ns) - np.log(ideal(*samples.sizes.T))
    design = design_matrix(grid, samples.sizes)
    penalty = _penalty(grid)
    weight = samples.weight
    slowdown = np.zeros(design.shape[1])
    for _ in range(_REWEIGHTS):
        normal = (design.T @ sparse.diags(weight) @ design).toarray() + penalty
        factor = scipy.linalg.cho_factor(normal, overwrite_a=True, check_finite=False)
        slowdown = scipy.linalg.cho_solve(factor, design.T @ (weight * target))
        residual = np.abs(target - design @ slowdown)
        weight = samples.weight * np.minimum(1.0, _HUBER / np.maximum(residual, 1e-9))
    values = np.maximum(slowdown.reshape(grid.shape), _LEAST_SLOWDOWN)
    monotone = make_monotone(values, grid.log2_knots, least_slopes(grid, ideal))
    return Surface(grid.log2_knots, -monotone)


def design_matrix(grid: Grid, sizes: FloatArray) -> sparse.csr_matrix:
    """`[points, knots]`: weights of the knots around each point."""
    empty = Surface(grid.log2_knots, np.zeros(grid.shape))
    columns, weights = empty.corners(*sizes.T)
    points = np.tile(np.arange(len(sizes)), len(columns))
    entries = (np.concatenate(weights), (points, np.concatenate(columns)))
    return sparse.csr_matrix(entries, shape=(len(sizes), int(np.prod(grid.shape))))


def least_slopes(grid: Grid, ideal: Ideal) -> list[FloatArray]:
    """For each axis of work, the least slope of the log ideal time around each edge.

    In log coordinates an ideal time is convex, so its slope along an edge is least at the lower
    end; across the neighbouring cells the least of their corners is taken.
    """
    mesh = np.meshgrid(*grid.log2_knots, indexing="ij")
    here = np.log(ideal(*(2.0**x for x in mesh)))
    slopes = []
    for axis in range(grid.work_axes):
        moved = [x + _SLOPE_STEP * (i == axis) for i, x in enumerate(mesh)]
        slope = (np.log(ideal(*(2.0**x for x in moved))) - here) / _SLOPE_STEP
        size = [1 if i == axis else 3 for i in range(len(mesh))]
        least = scipy.ndimage.minimum_filter(slope, size=size, mode="nearest")
        slopes.append(np.moveaxis(least, axis, 0)[:-1] - _LEAST_GROWTH)
    return slopes


def make_monotone(
    slowdown: FloatArray, log2_knots: Sequence[FloatArray], slopes: Sequence[FloatArray]
) -> FloatArray:
    """The nearest feasible slowdown: the middle of the least one above and the greatest one below.

    Feasible means `slowdown[i + 1] - slowdown[i] >= -slope * spacing` along an axis; these are
    linear, so the middle of two feasible surfaces is feasible.

    Args:
        slopes: one array for each axis of work, which come first.
    """
    above, below = slowdown.copy(), slowdown.copy()
    for values, upwards in ((above, True), (below, False)):
        for _ in range(_MAX_SWEEPS):
            before = values.copy()
            for axis, (knots, slope) in enumerate(zip(log2_knots, slopes, strict=False)):
                _sweep(np.moveaxis(values, axis, 0), np.diff(knots), slope, upwards)
            if np.array_equal(before, values):
                break
    return (above + below) / 2


def _sweep(values: FloatArray, spacing: FloatArray, slope: FloatArray, upwards: bool) -> None:
    """Enforce the slopes along the first axis, in place, by raising or by lowering."""
    if upwards:
        for i in range(len(spacing)):
            np.maximum(values[i + 1], values[i] - slope[i] * spacing[i], out=values[i + 1])
        return
    for i in reversed(range(len(spacing))):
        np.minimum(values[i], values[i + 1] + slope[i] * spacing[i], out=values[i])


def _penalty(grid: Grid) -> FloatArray:
    """Squared second differences along each axis, and a ridge."""
    total = _RIDGE * sparse.identity(int(np.prod(grid.shape)), format="csr")
    for axis, (count, stiffness) in enumerate(zip(grid.shape, grid.stiffness, strict=True)):
        if count < 3:
            difference = np.diff(np.eye(count), 1, axis=0)
        else:
            difference = np.diff(np.eye(count), 2, axis=0)
        if not len(difference):
            continue
        matrix = sparse.identity(1, format="csr")
        for other, size in enumerate(grid.shape):
            part = sparse.csr_matrix(difference) if other == axis else sparse.identity(size)
            matrix = sparse.kron(matrix, part, format="csr")
        total = total + stiffness * (matrix.T @ matrix)
    return np.asarray(total.toarray())
