"""CellGrid: a cost table resampled on geometric cells, with every cell's best modes worked out."""

import math
from functools import cache
from itertools import chain, product

import numpy as np
from numpy.typing import NDArray

from granikv.core.cost_table import CostTable
from granikv.core.step import Segment

# Lagrange weights between prefix (1) and private (0) time of a fused launch. The fused time is the
# greater of two sums, prefix and private, each with the exposed share of the other: its minimiser
# over independent per-segment choices is found by weighting the two sums, and nine weights bracket
# every crossover of three modes closely enough.
_N_WEIGHTS = 9
_WEIGHTS = np.linspace(0.0, 1.0, _N_WEIGHTS)
# Segments and private tokens are looked up on geometric grids: 4 steps per octave is +-9 % in
# length, far inside the cost model's own error, and lets one plan serve many decode steps.
_STEPS_PER_OCTAVE = 4
_LENGTH_CELLS = 20 * _STEPS_PER_OCTAVE
_ROW_CELLS = 13 * _STEPS_PER_OCTAVE
# Two-call plans pay a latency for every mode that they use, so each set of modes is tried.
_SERIAL_MODES = ((1,), (2,), (1, 2))
N_SERIAL = len(_SERIAL_MODES)
# The weights over all modes, over those that share the private pass's launch, and all in one mode.
N_FUSED = 2 * _N_WEIGHTS + 2


def bucket_of(tokens: int) -> int:
    """Geometric bucket, 4 per octave; 0 for up to one token."""
    return int(math.log2(tokens) * _STEPS_PER_OCTAVE + 1e-9) if tokens > 1 else 0


@cache
def bucket_start(bucket: int) -> int:
    """Smallest token count in a bucket: the inverse of `bucket_of`."""
    start = math.ceil(2 ** (bucket / _STEPS_PER_OCTAVE) - 1e-6)
    while bucket_of(start) < bucket:
        start += 1
    while start > 1 and bucket_of(start - 1) >= bucket:
        start -= 1
    return max(1, start)


@cache
def _mixes(segments: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """`[mixes, segments]` modes with one that is not paged, and `[mixes, 3 * segments]` whether a
    segment has a mode.
    """
    modes = np.array(list(product(range(3), repeat=segments))[1:], np.intp)
    return modes, np.eye(3)[modes].reshape(len(modes), -1)


class CellGrid:
    """The cost table resampled on geometric (length, rows) cells, with the best mode of each.

    Cells come twice: the second half is for COLD segments, whose only mode is paged.
    """

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self.pass_latency_ns: list[float] = table.pass_latency_ns.tolist()
        self.has_collectives = bool(table.collective_ns.max() > 0)
        lengths = 2.0 ** ((np.arange(_LENGTH_CELLS) + 0.5) / _STEPS_PER_OCTAVE)
        rows = 2.0 ** ((np.arange(_ROW_CELLS) + 0.5) / _STEPS_PER_OCTAVE)
        hot = [self._resample(part, lengths, rows) for part in (table.prefix_ns, table.private_ns)]
        cold = [np.broadcast_to(part[:1], part.shape) for part in hot]
        self.prefix, self.private = (
            np.concatenate(pair, axis=1) for pair in zip(hot, cold, strict=True)
        )
        self._choose()

    def _resample(
        self, part: NDArray[np.float64], lengths: NDArray[np.float64], rows: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Bilinear from `[3, L, R]` to `[3, cells]`; in proportion beyond the last length."""
        table = self._table
        out = np.empty((3, len(lengths), len(rows)))
        beyond = np.maximum(1.0, lengths / float(table.lengths[-1]))
        for mode in range(3):
            by_rows = np.stack([np.interp(rows, table.rows, line) for line in part[mode]])
            for column in range(len(rows)):
                sampled = np.interp(lengths, table.lengths, by_rows[:, column])
                out[mode, :, column] = sampled * beyond
        return out.reshape(3, -1)

    def _choose(self) -> None:
        count = self.prefix.shape[1]
        cells = np.arange(count)
        mode = np.arange(3)[:, None]
        is_hot = cells[None, :] < count // 2
        alone = self.prefix + self.private  # one of them is zero
        self.serial_modes = [
            np.where((mode == 0) | (is_hot & np.isin(mode, used)), alone, np.inf).argmin(axis=0)
            for used in _SERIAL_MODES
        ]
        weights, exposed = _WEIGHTS[:, None, None], self._table.fused_exposed_share
        scores = (weights + (1 - weights) * exposed) * self.prefix
        scores += (1 - weights + weights * exposed) * self.private
        weighted = np.where((mode == 0) | is_hot, scores, np.inf).argmin(axis=1)
        # A dense pass brings its latency, which the weights do not know: the best mix without one.
        one_launch = np.where((mode == 0) | (is_hot & (mode == 1)), scores, np.inf).argmin(axis=1)
        only = [np.where(is_hot[0], fixed, 0) for fixed in (1, 2)]
        self.fused_modes = [*weighted, *one_launch, *only]
        # One gather and one sum over a step's segments give every term that `_cheapest` compares.
        columns = [self.private[0]]
        for modes in self.serial_modes:
            columns += [alone[modes, cells], modes == 1, modes == 2]
        columns += [self.prefix[modes, cells] for modes in self.fused_modes]
        columns += [self.private[modes, cells] for modes in self.fused_modes]
        columns += [modes == 2 for modes in self.fused_modes]
        self.packed = np.column_stack(columns)

    def best_mix(
        self, cells: NDArray[np.intp], own_private_ns: float
    ) -> tuple[NDArray[np.intp], float]:
        """Modes of a few segments with the least fused time of both sums, of all that there are.

        At least one segment is not paged, if any is HOT: an all-paged step is the stock engine's
        and is never launched fused.
        """
        modes = np.zeros(len(cells), np.intp)
        is_hot = cells < self.prefix.shape[1] // 2
        own_private_ns += float(self.private[0, cells[~is_hot]].sum())
        if not is_hot.any():
            return modes, self.fused_ns(0.0, own_private_ns, 0)
        hot = cells[is_hot]
        mixes, is_chosen = _mixes(len(hot))
        prefix_ns = is_chosen @ self.prefix[:, hot].T.ravel()
        private_ns = own_private_ns + is_chosen @ self.private[:, hot].T.ravel()
        prefix_ns += self.pass_latency_ns[2] * (mixes == 2).any(axis=1)
        exposed = self._table.fused_exposed_share * np.minimum(prefix_ns, private_ns)
        times = np.maximum(prefix_ns, private_ns) + exposed
        best = int(times.argmin())
        modes[is_hot] = mixes[best]
        return modes, float(times[best])

    def fused_ns(self, prefix_ns: float, private_ns: float, n_dense: float) -> float:
        """Time of a fused launch without its latency; a dense pass has one of its own."""
        if n_dense:
            prefix_ns += self.pass_latency_ns[2]
        return self._table.overlapped_ns(prefix_ns, private_ns)

    def own_pass_ns(self, modes: NDArray[np.intp], cells: NDArray[np.intp]) -> NDArray[np.float64]:
        """Of each segment, the work that is for all of its rows at once; none where it is paged."""
        alone = self.prefix[modes, cells] + self.private[modes, cells]
        return np.where(modes == 0, 0.0, alone)

    def cells(self, segments: tuple[Segment, ...]) -> NDArray[np.intp]:
        """Index of the cell that holds each segment's (length, rows)."""
        count = len(segments)
        fields = np.fromiter(chain.from_iterable(segments), np.float64, 3 * count).reshape(count, 3)
        buckets = (np.log2(fields[:, 1:]) * _STEPS_PER_OCTAVE + 1e-9).astype(np.intp)
        cells = np.minimum(buckets[:, 0], _LENGTH_CELLS - 1) * _ROW_CELLS
        cells += np.minimum(buckets[:, 1], _ROW_CELLS - 1)
        cells[fields[:, 0] == 0] += _LENGTH_CELLS * _ROW_CELLS
        return cells

    def at_rows(self, values: NDArray[np.float64], rows: int) -> float:
        """A per-rows quantity at `rows`, linear between grid points."""
        return float(np.interp(rows, self._table.rows, values))
