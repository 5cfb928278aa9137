"""Dispatcher: which attention mode each shared segment runs in this decode step.

Choices: `cost` minimises the predicted time of the whole step, `threshold` is the paper's rule
(arXiv 2608.15584: dense from M_eff = rows x group >= M_sat, else cascade), `paged`, `cascade` and
`dense` are fixed. Two show where a gain comes from: `cascade_global` reads only what the whole
batch shares as one cascade level (what batch-global cascade engines do), `cascade_cold` every
shared prefix as a level, wherever it lies. Under all others a segment in scattered COLD slots runs
paged.
"""

import math
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from granikv.core.cell_grid import N_FUSED, N_SERIAL, CellGrid, bucket_of, bucket_start
from granikv.core.cost_table import CostTable
from granikv.core.step import Launch, Mode, Segment, StepPlan, StepShape

DispatchChoice = Literal[
    "cost", "threshold", "paged", "cascade", "dense", "cascade_global", "cascade_cold"
]
# Those under which a segment may run as a cascade in COLD.
READS_COLD: frozenset[DispatchChoice] = frozenset({"cascade_global", "cascade_cold"})
# When a tensor-parallel step runs as a burst and a follow-on step: when that is predicted to be
# faster, never, or whenever there are rows for both (the paper's rule, to see what it costs).
RowSplit = Literal["auto", "off", "always"]
DISPATCH_CHOICES: tuple[str, ...] = get_args(DispatchChoice)

# With so few segments one of them weighs much, and the grid's weights may miss the best mix: every
# mix is tried. Six segments have 728.
_TRIED_SEGMENTS = 6
# Few segments come back in the same shape again and again; many hardly ever, and hashing them costs
# as much as planning them.
_MEMO_SEGMENTS = 8
_MEMO_LIMIT = 4096


class Dispatcher:
    """Plans decode steps from one `CostTable`; equal shapes give equal plans."""

    def __init__(
        self, table: CostTable, choice: DispatchChoice = "cost", row_split: RowSplit = "auto"
    ) -> None:
        """Precompute the best mode of every (length, rows) cell.

        Raises:
            ValueError: `choice` is not a dispatch choice.
        """
        if choice not in DISPATCH_CHOICES:
            raise ValueError(f"choice must be one of {', '.join(DISPATCH_CHOICES)}, got {choice!r}")
        self.choice = choice
        self.row_split = row_split
        self.table = table
        self._memo: dict[tuple[tuple[Segment, ...], int, int], StepPlan] = {}
        self._last_segments: tuple[Segment, ...] | None = None
        self._last_key = (-1, -1)
        self._last_plan = StepPlan(())
        self._grid = CellGrid(table)

    def plan(self, shape: StepShape) -> StepPlan:
        """The plan; of the private tokens only the bucket matters, see `private_tokens_limit`."""
        key = (shape.rows, bucket_of(shape.private_tokens))
        if shape.segments is self._last_segments and key == self._last_key:
            return self._last_plan
        plan = (
            self._plan(shape) if len(shape.segments) > _MEMO_SEGMENTS else self._recall(shape, key)
        )
        self._last_segments, self._last_key, self._last_plan = shape.segments, key, plan
        return plan

    def _recall(self, shape: StepShape, key: tuple[int, int]) -> StepPlan:
        memo_key = (shape.segments, *key)
        plan = self._memo.get(memo_key)
        if plan is None:
            if len(self._memo) >= _MEMO_LIMIT:
                self._memo.clear()
            plan = self._memo[memo_key] = self._plan(shape)
        return plan

    def private_tokens_limit(self, private_tokens: int) -> int:
        """First count above `private_tokens` at which `plan` may answer differently."""
        return bucket_start(bucket_of(private_tokens) + 1)

    def _plan(self, shape: StepShape) -> StepPlan:
        segments = shape.segments
        if not segments or self.choice == "paged":
            plan = StepPlan((Mode.PAGED,) * len(segments))
        elif self.choice == "cascade_global":
            plan = StepPlan(
                tuple(Mode.CASCADE if s.rows == shape.rows else Mode.PAGED for s in segments)
            )
        elif self.choice == "cascade_cold":
            plan = StepPlan((Mode.CASCADE,) * len(segments))
        elif self.choice == "cost":
            plan = self._cheapest(shape)
        else:
            plan = self._by_rule(shape)
        if not self._grid.has_collectives or self.row_split == "off":
            return plan
        return self._with_row_split(shape, plan)

    def _by_rule(self, shape: StepShape) -> StepPlan:
        fixed = {"cascade": Mode.CASCADE, "dense": Mode.DENSE}.get(self.choice)

        def mode(segment: Segment) -> Mode:
            if segment.base == 0:
                return Mode.PAGED
            if fixed is not None:
                return fixed
            saturated = segment.rows * shape.group >= self.table.m_sat
            return Mode.DENSE if saturated else Mode.CASCADE

        modes = tuple(mode(segment) for segment in shape.segments)
        return StepPlan(modes, self._faster_launch(shape, modes))

    def _faster_launch(self, shape: StepShape, modes: tuple[Mode, ...]) -> Launch:
        """The launch with the smaller predicted time for modes that a rule has chosen."""
        table, fused_ns = self.table, self.table.fused_latency_ns
        if fused_ns is None or all(mode == Mode.PAGED for mode in modes):
            return Launch.TWO_CALL
        chosen = (np.asarray(modes, np.intp), self._grid.cells(shape.segments))
        prefix_ns = float(self._grid.prefix[chosen].sum())
        private_ns = float(self._grid.private[chosen].sum()) + self._private_ns(shape)
        fused_ns += self._grid.fused_ns(prefix_ns, private_ns, modes.count(Mode.DENSE))
        used = (mode for mode in (1, 2) if mode in modes)
        two_call_ns = prefix_ns + private_ns + table.private_latency_ns
        two_call_ns += sum(float(table.pass_latency_ns[mode]) for mode in used)
        two_call_ns += self._grid.at_rows(table.merge_ns, shape.rows)
        return Launch.FUSED if fused_ns <= two_call_ns else Launch.TWO_CALL

    def _cheapest(self, shape: StepShape) -> StepPlan:
        grid, table = self._grid, self.table
        cells = grid.cells(shape.segments)
        sums: list[float] = grid.packed.take(cells, axis=0).sum(axis=0).tolist()
        private_ns = self._private_ns(shape)
        best_ns = table.private_latency_ns + sums[0] + private_ns
        modes, launch = None, Launch.TWO_CALL

        after_ns = private_ns + table.private_latency_ns + grid.at_rows(table.merge_ns, shape.rows)
        for choice in range(N_SERIAL):
            pass_ns, n_cascade, n_dense = sums[1 + 3 * choice : 4 + 3 * choice]
            if not n_cascade and not n_dense:
                continue
            serial_ns = pass_ns + after_ns
            serial_ns += grid.pass_latency_ns[1] if n_cascade else 0.0
            serial_ns += grid.pass_latency_ns[2] if n_dense else 0.0
            if serial_ns < best_ns:
                best_ns, modes = serial_ns, grid.serial_modes[choice].take(cells)

        if table.fused_latency_ns is not None:
            fused_modes, fused_ns = self._fused(cells, sums, private_ns)
            if table.fused_latency_ns + fused_ns < best_ns:
                modes, launch = fused_modes, Launch.FUSED
        if modes is None or not modes.any():
            return StepPlan((Mode.PAGED,) * len(shape.segments))
        return StepPlan(tuple(map(_MODES.__getitem__, modes.tolist())), launch)

    def _fused(
        self, cells: NDArray[np.intp], sums: list[float], private_ns: float
    ) -> tuple[NDArray[np.intp], float]:
        """The best modes of a fused launch and its time without its latency; `sums` are of
        `CellGrid.packed`.
        """
        grid = self._grid
        if len(cells) <= _TRIED_SEGMENTS:
            return grid.best_mix(cells, private_ns)
        first = 1 + 3 * N_SERIAL
        prefix, private, dense = (
            sums[first + N_FUSED * part : first + N_FUSED * (part + 1)] for part in range(3)
        )
        times = [
            grid.fused_ns(own_pass, paged + private_ns, n_dense)
            for own_pass, paged, n_dense in zip(prefix, private, dense, strict=True)
        ]
        chosen = min(range(N_FUSED), key=times.__getitem__)
        return grid.fused_modes[chosen].take(cells), times[chosen]

    def _private_ns(self, shape: StepShape) -> float:
        """Time of the private pass, at the middle of its tokens' bucket."""
        bucket = bucket_of(shape.private_tokens)
        tokens = math.sqrt(bucket_start(bucket) * bucket_start(bucket + 1))
        return tokens * self._grid.at_rows(self.table.private_ns_per_token, shape.rows)

    def _with_row_split(self, shape: StepShape, plan: StepPlan) -> StepPlan:
        """Split a communication-bound step when hiding collectives pays for reading the weights
        twice.

        Rule (the paper's burst and follow-on): the burst is the larger half, raised to the row
        count at which its largest segment saturates the dense pass, if that leaves rows for a
        follow-on step.
        """
        rows, grid, table = shape.rows, self._grid, self.table
        collective = grid.at_rows(table.collective_ns, rows)
        saturated = -(-table.m_sat // table.group)
        burst = max(-(-rows // 2), saturated if saturated < rows else 0)
        follow = rows - burst
        if follow < 1:
            return plan
        whole = grid.at_rows(table.gemm_ns, rows) + collective
        compute = grid.at_rows(table.gemm_ns, burst) + grid.at_rows(table.gemm_ns, follow)
        collectives = grid.at_rows(table.collective_ns, burst) + grid.at_rows(
            table.collective_ns, follow
        )
        # Every segment is read by both halves: each costs its pass over half of the rows.
        rereads = 0.0
        if shape.segments:
            modes = np.asarray(plan.modes, np.intp)
            halves = tuple(s._replace(rows=max(1, s.rows // 2)) for s in shape.segments)
            whole_ns, half_ns = (
                grid.own_pass_ns(modes, grid.cells(part)) for part in (shape.segments, halves)
            )
            rereads = float((2 * half_ns - whole_ns).clip(0.0).sum()) * table.num_layers
        if self.row_split == "always" or max(compute + rereads, collectives) < whole:
            return StepPlan(plan.modes, plan.launch, (burst, follow))
        return plan


_MODES = (Mode.PAGED, Mode.CASCADE, Mode.DENSE)
