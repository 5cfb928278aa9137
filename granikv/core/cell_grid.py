"""CellGrid: a cost table resampled on geometric cells, with every cell's best modes worked out."""

import math
from functools import cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from granikv.core.cost_table import CostTable
from granikv.core.step import Segment

# Lagrange weights between compute (1) and memory (0) of a fused launch. The fused time is the
# greater of two sums, compute and memory, each with the exposed share of the other: its minimiser
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
# The weights, and all segments in one mode.
N_FUSED = _N_WEIGHTS + 2


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
        hot = [self._resample(part, lengths, rows) for part in (table.compute_ns, table.memory_ns)]
        cold = [np.broadcast_to(part[:1], part.shape) for part in hot]
        self.compute, self.memory = (
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
        count = self.compute.shape[1]
        cells = np.arange(count)
        mode = np.arange(3)[:, None]
        is_hot = cells[None, :] < count // 2
        alone = np.maximum(self.compute, self.memory)
        self.serial_modes = [
            np.where((mode == 0) | (is_hot & np.isin(mode, used)), alone, np.inf).argmin(axis=0)
            for used in _SERIAL_MODES
        ]
        weights, exposed = _WEIGHTS[:, None, None], self._table.fused_exposed_share
        scores = (weights + (1 - weights) * exposed) * self.compute
        scores += (1 - weights + weights * exposed) * self.memory
        weighted = np.where((mode == 0) | is_hot, scores, np.inf).argmin(axis=1)
        only = [np.where(is_hot[0], fixed, 0) for fixed in (1, 2)]
        self.fused_modes = [*weighted, *only]
        # One gather and one sum over a step's segments give every term that `_cheapest` compares.
        columns = [self.compute[0], self.memory[0]]
        for modes in self.serial_modes:
            columns += [alone[modes, cells], modes == 1, modes == 2]
        columns += [self.compute[modes, cells] for modes in self.fused_modes]
        columns += [self.memory[modes, cells] for modes in self.fused_modes]
        self.packed = np.column_stack(columns)

    def refine(
        self, cells: NDArray[np.intp], modes: NDArray[np.intp], private_c: float, private_m: float
    ) -> tuple[NDArray[np.intp], float]:
        """Change one segment's mode at a time while that lowers the fused time of both sums.

        Ends with at least one segment that is not paged, if any is HOT: an all-paged step is the
        stock engine's and is never launched fused.
        """
        overlapped_ns = self._table.overlapped_ns
        hot = [place for place, cell in enumerate(cells) if cell < self.compute.shape[1] // 2]
        compute: list[list[float]] = self.compute[:, cells].tolist()
        memory: list[list[float]] = self.memory[:, cells].tolist()
        chosen: list[int] = modes.tolist()
        total_c = private_c + sum([compute[mode][i] for i, mode in enumerate(chosen)])
        total_m = private_m + sum([memory[mode][i] for i, mode in enumerate(chosen)])
        while hot:
            is_paged = not any(chosen)
            best_ns = math.inf if is_paged else overlapped_ns(total_c, total_m)
            flip = None
            for i in hot:
                rest_c = total_c - compute[chosen[i]][i]
                rest_m = total_m - memory[chosen[i]][i]
                for mode in range(1, 3) if is_paged else range(3):
                    time_ns = overlapped_ns(rest_c + compute[mode][i], rest_m + memory[mode][i])
                    if time_ns < best_ns * (1 - 1e-9):
                        best_ns, flip = time_ns, (i, mode)
            if flip is None or (flip[1] == 0 and sum(map(bool, chosen)) == 1):
                break
            i, mode = flip
            total_c += compute[mode][i] - compute[chosen[i]][i]
            total_m += memory[mode][i] - memory[chosen[i]][i]
            chosen[i] = mode
        return np.array(chosen, np.intp), overlapped_ns(total_c, total_m)

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
