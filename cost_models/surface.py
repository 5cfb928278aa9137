"""Surface: an efficiency that is a fitted function of shape, linear in logarithms between knots."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """An efficiency along one axis; the last step of a surface whose other sizes are known.

    Attributes:
        log2_knots: ascending, at least one.
        log_efficiency: natural logarithm at each knot.
    """

    log2_knots: tuple[float, ...]
    log_efficiency: tuple[float, ...]

    def efficiency(self, size: float) -> float:
        """Efficiency at `size`; that of the nearest knot outside of them."""
        knots, values = self.log2_knots, self.log_efficiency
        x = math.log2(size)
        if x <= knots[0]:
            return math.exp(values[0])
        if x >= knots[-1]:
            return math.exp(values[-1])
        i = bisect_right(knots, x) - 1
        share = (x - knots[i]) / (knots[i + 1] - knots[i])
        return math.exp(values[i] + share * (values[i + 1] - values[i]))


@dataclass(frozen=True, slots=True, eq=False)
class Surface:
    """Efficiency over several sizes: multilinear in its logarithm over log2 of each size.

    Bounded by its knots, continuous, and constant outside of them.

    Attributes:
        log2_knots: one ascending array for each axis.
        log_efficiency: natural logarithm, one dimension for each axis.
    """

    log2_knots: tuple[FloatArray, ...]
    log_efficiency: FloatArray

    def efficiency(self, *sizes: ArrayLike) -> FloatArray:
        """Efficiency at sizes that broadcast against each other, one argument for each axis."""
        columns, weights = self.corners(*sizes)
        flat = self.log_efficiency.ravel()
        total = weights[0] * flat[columns[0]]
        for column, weight in zip(columns[1:], weights[1:], strict=True):
            total += weight * flat[column]
        return np.asarray(np.exp(total))

    def corners(self, *sizes: ArrayLike) -> tuple[list[NDArray[np.intp]], list[FloatArray]]:
        """The knots around each point, as flat indices, and their weights; 2 ** axes of each."""
        places = [
            locate(knots, np.log2(np.asarray(size, np.float64)))
            for knots, size in zip(self.log2_knots, sizes, strict=True)
        ]
        columns, weights = [], []
        for corner in product((0, 1), repeat=len(places)):
            column: NDArray[np.intp] = np.zeros((), np.intp)
            weight: FloatArray = np.ones(())
            for upper, (index, share), knots in zip(corner, places, self.log2_knots, strict=True):
                # An axis with one knot has no upper neighbour; its share is zero.
                step = min(upper, len(knots) - 1)
                column = column * len(knots) + index + step
                weight = weight * (share if upper else 1.0 - share)
            columns.append(column)
            weights.append(weight)
        return columns, weights

    def fix(self, axis: int, size: float) -> "Surface":
        """The surface at one size of one axis; that axis is gone."""
        knots = self.log2_knots[axis]
        index, share = locate(knots, np.asarray(math.log2(size)))
        low = np.take(self.log_efficiency, int(index), axis=axis)
        high = np.take(self.log_efficiency, min(int(index) + 1, len(knots) - 1), axis=axis)
        rest = self.log2_knots[:axis] + self.log2_knots[axis + 1 :]
        return Surface(rest, low + float(share) * (high - low))

    def curve(self) -> Curve:
        """A surface of one axis in the form that is quick for single sizes."""
        (knots,) = self.log2_knots
        return Curve(tuple(knots.tolist()), tuple(self.log_efficiency.tolist()))


def locate(knots: FloatArray, x: FloatArray) -> tuple[NDArray[np.intp], FloatArray]:
    """Index of the knot below each `x` and the share of the way to the next one, in [0, 1]."""
    if len(knots) == 1:
        return np.zeros(x.shape, np.intp), np.zeros(x.shape)
    index = np.clip(np.searchsorted(knots, x, side="right") - 1, 0, len(knots) - 2)
    share = (x - knots[index]) / (knots[index + 1] - knots[index])
    return index, np.clip(share, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Sheet:
    """A surface of two axes in the form that is quick for single sizes."""

    log2_rows: tuple[float, ...]
    log2_columns: tuple[float, ...]
    log_efficiency: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, surface: Surface) -> "Sheet":
        """The same values in tuples; an axis with one knot gets a second one of equal value."""
        values = surface.log_efficiency
        knots = list(surface.log2_knots)
        for axis in (0, 1):
            if len(knots[axis]) == 1:
                knots[axis] = knots[axis] + np.array([0.0, 1.0])
                values = np.repeat(values, 2, axis=axis)
        rows, columns = (tuple(axis_knots.tolist()) for axis_knots in knots)
        return cls(rows, columns, tuple(map(tuple, values.tolist())))

    def efficiency(self, row_size: float, column_size: float) -> float:
        """Efficiency at two sizes; that of the nearest knot outside of them."""
        i, x = _place(self.log2_rows, math.log2(row_size))
        j, y = _place(self.log2_columns, math.log2(column_size))
        values = self.log_efficiency
        low = values[i][j] + y * (values[i][j + 1] - values[i][j])
        high = values[i + 1][j] + y * (values[i + 1][j + 1] - values[i + 1][j])
        return math.exp(low + x * (high - low))


def _place(knots: tuple[float, ...], x: float) -> tuple[int, float]:
    i = min(max(bisect_right(knots, x) - 1, 0), len(knots) - 2)
    share = (x - knots[i]) / (knots[i + 1] - knots[i])
    return i, min(max(share, 0.0), 1.0)
