"""fit_shared_pages: what reading the same physical pages costs, from rows that share a prefix."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl
import scipy.optimize

from granikv.cost_models.fit.held_out import predict_unseen
from granikv.cost_models.ideal import Peaks
from granikv.cost_models.params import FittedSurface
from granikv.cost_models.passes import PagedTime
from granikv.cost_models.piecewise import Pieces
from granikv.cost_models.roofline import Heads
from granikv.cost_models.surface import FloatArray, Surface

IN_FLIGHT = (1.0, 2.0, 4.0, 8.0, 16.0, 64.0)
WAVES = (1.0, 8.0, 32.0)
TOKENS = (512.0, 2048.0, 8192.0, 32768.0)
_SOFTNESS = 0.05  # log error from which a row counts less
_STIFFNESS = 0.01  # pulls neighbouring knots together where rows are few
_LEAST = 0.05
_STEEPEST = 0.98 * np.log(2.0)


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows that share a prefix, each with the private-page line of its batch.

    Attributes:
        lines: time over tokens of a private batch of the same rows and heads.
        floor_ns: time of one row alone over the shared tokens.
        private, reads: private tokens, and shared tokens times their readers.
        in_flight, waves, length: coordinates of the cost.
        time_ns: measured.
        shape: name of the set of heads.
    """

    lines: list[Pieces]
    floor_ns: FloatArray
    private: FloatArray
    reads: FloatArray
    in_flight: FloatArray
    waves: FloatArray
    length: FloatArray
    time_ns: FloatArray
    shape: np.ndarray

    def take(self, chosen: np.ndarray) -> "SharedRows":
        """A subset by mask."""
        lines = [line for line, keep in zip(self.lines, chosen, strict=True) if keep]
        arrays = (
            self.floor_ns,
            self.private,
            self.reads,
            self.in_flight,
            self.waves,
            self.length,
            self.time_ns,
            self.shape,
        )
        return SharedRows(lines, *(array[chosen] for array in arrays))

    def predict(self, surface: Surface) -> FloatArray:
        """Time of each row in ns."""
        cost = surface.efficiency(self.in_flight, self.waves, self.length)
        tokens = self.private + self.reads * cost
        times = [_value(line, place) for line, place in zip(self.lines, tokens, strict=True)]
        return np.maximum(times, self.floor_ns)


def shared_samples(
    frame: pl.DataFrame, paged: FittedSurface, peaks: Peaks, sm_count: int
) -> SharedRows:
    """Rows of `own_rows.shared_rows` beside the fitted private time of the same batch."""
    times: dict[tuple[int, int, int], PagedTime] = {}
    lines, floors, shapes = [], [], []
    columns = ("num_q_heads", "num_kv_heads", "head_dim", "rows", "length")
    for q, kv, head_dim, rows, length in frame.select(*columns).iter_rows():
        heads = Heads(q, kv, head_dim, 4 * kv * head_dim)
        time = times.setdefault(heads[:3], PagedTime(paged, peaks, heads))
        lines.append(time.line(rows))
        floors.append(_value(time.line(1), length))
        shapes.append(f"{q}x{kv}x{head_dim}")
    rows, sharers, length, kv_heads = (
        frame[name].cast(pl.Float64).to_numpy()
        for name in ("rows", "sharers", "length", "num_kv_heads")
    )
    waves = rows * kv_heads / sm_count
    return SharedRows(
        lines,
        np.array(floors),
        rows * frame["tokens"].to_numpy(),
        rows * length,
        sharers / np.maximum(1.0, waves),
        waves,
        length,
        frame["time_us"].to_numpy() * 1e3,
        np.array(shapes),
    )


def fit_shared_pages(rows: SharedRows) -> Surface:
    """Robust least squares of log time over the cost at the knots; more readers never cost more.

    Where no two rows read at once, a shared token costs what a private one does.
    """
    shape = (len(IN_FLIGHT), len(WAVES), len(TOKENS))
    knots = (np.log2(IN_FLIGHT), np.log2(WAVES), np.log2(TOKENS))
    measured = np.log(rows.time_ns)
    alone = np.zeros((1, *shape[1:]))

    def residuals(log_cost: FloatArray) -> FloatArray:
        values = np.concatenate([alone, log_cost.reshape(-1, *shape[1:])])
        error = np.log(rows.predict(Surface(knots, values))) - measured
        roughness = [_STIFFNESS * np.diff(values, axis=axis).ravel() for axis in range(3)]
        return np.concatenate([error, *roughness])

    start = np.full((shape[0] - 1) * shape[1] * shape[2], np.log(0.6))
    found = scipy.optimize.least_squares(
        residuals, start, bounds=(np.log(_LEAST), 0.0), loss="soft_l1", f_scale=_SOFTNESS
    )
    values = np.concatenate([alone, found.x.reshape(-1, *shape[1:])])
    values = np.maximum.accumulate(np.minimum.accumulate(values, axis=0), axis=1)
    for i, spacing in enumerate(np.diff(knots[0])):
        # Twice the readers never cost less in total.
        values[i + 1] = np.maximum(values[i + 1], values[i] - _STEEPEST * spacing)
    return Surface(knots, values)


def hold_out_shared_pages(rows: SharedRows, fit: Callable[[SharedRows], Surface]) -> FloatArray:
    """Predicted time of every row, by a fit that has not seen its set of heads."""
    return predict_unseen(
        rows.shape, lambda hidden: rows.take(hidden).predict(fit(rows.take(~hidden)))
    )


def _value(line: Pieces, tokens: float) -> float:
    # Lines are short; the last piece that starts at or below holds.
    value = line[0][1] + line[0][2] * tokens
    for start, a, b in line:
        if start > tokens:
            break
        value = a + b * tokens
    return value
