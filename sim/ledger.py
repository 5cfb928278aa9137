"""Ledger: what a replica's steps add up to - busy time by term, counts, and a row per step."""

from dataclasses import dataclass, replace

from granikv.core.step import ExtendShape, StepPlan, StepShape
from granikv.cost_models.decode_line import DecodeLine
from granikv.cost_models.step import ExtendCost, StepCost
from granikv.sim.pools import Pools
from granikv.sim.recorder import Counters, StepRecorder
from granikv.sim.repartitioner import Repartitioner


@dataclass(slots=True)
class EngineTotals:
    """Busy time by term in ns, and counts, over the engine's life.

    `split_saved_ns` is what running steps as a burst and a follow-on step saved, by the cost model.
    """

    host_ns: float = 0.0
    gemm_ns: float = 0.0
    attention_ns: float = 0.0
    collective_ns: float = 0.0
    extend_ns: int = 0
    copy_ns: int = 0
    busy_ns: int = 0
    decode_steps: int = 0
    split_steps: int = 0
    split_saved_ns: int = 0
    retractions: int = 0
    prefills: int = 0
    fragmentation_ns: float = 0.0


class Ledger:
    """Books every step of one replica; it reads the pools' counters and changes nothing.

    `boundary` is `(start_s, hot_tokens)` of the first step that ran with each HOT size in turn.
    """

    def __init__(
        self, cost: StepCost, pools: Pools, repartitioner: Repartitioner, recorder: StepRecorder
    ) -> None:
        self.totals = EngineTotals()
        self.boundary: list[tuple[float, int]] = [(0.0, pools.allocator.hot_tokens)]
        self._cost = cost
        self._pools = pools
        self._repartitioner = repartitioner
        self._recorder = recorder
        self._counted = (0, 0, 0)

    def prefill(
        self, start_ns: int, end_ns: int, shape: ExtendShape, cost: ExtendCost, copy_ns: int
    ) -> None:
        """An extend step, after copies that took `copy_ns`."""
        self.totals.prefills += 1
        self.totals.extend_ns += cost.total_ns
        self.totals.copy_ns += copy_ns
        self._busy(start_ns, end_ns)
        self._recorder.extend(start_ns, end_ns, shape, self._counters(0))

    def decode(
        self,
        start_ns: int,
        end_ns: int,
        steps: int,
        shape: StepShape,
        plan: StepPlan,
        line: DecodeLine,
        copy_ns: int,
        retracted: int,
    ) -> None:
        """`steps` decode steps of one batch, after copies that took `copy_ns`."""
        totals = self.totals
        fixed_ns = line.host_ns + line.gemm_ns + line.collective_ns
        totals.host_ns += steps * line.host_ns
        totals.gemm_ns += steps * line.gemm_ns
        totals.collective_ns += steps * line.collective_ns
        totals.attention_ns += end_ns - start_ns - copy_ns - steps * fixed_ns
        totals.copy_ns += copy_ns
        totals.decode_steps += steps
        totals.retractions += retracted
        if plan.row_split:
            whole = self._cost.decode(shape, replace(plan, row_split=()))
            saved_ns = whole.ns(shape.private_tokens) - line.ns(shape.private_tokens)
            totals.split_steps += steps
            totals.split_saved_ns += steps * saved_ns
        self._busy(start_ns, end_ns)
        counters = self._counters(retracted)
        self._recorder.decode(start_ns, end_ns, steps, shape, plan, counters)

    def _busy(self, start_ns: int, end_ns: int) -> None:
        duration_ns = end_ns - start_ns
        self.totals.busy_ns += duration_ns
        hot_tokens = self._pools.allocator.hot_tokens
        if hot_tokens != self.boundary[-1][1]:
            self.boundary.append((start_ns / 1e9, hot_tokens))
        self.totals.fragmentation_ns += duration_ns * self._pools.fragmentation

    def _counters(self, retracted: int) -> Counters:
        pools = self._pools
        misses, evicted = pools.hot_misses, pools.index.evicted_nodes
        moved = self._repartitioner.boundary.moved_tokens
        last_misses, last_evicted, last_moved = self._counted
        self._counted = (misses, evicted, moved)
        return (
            pools.allocator.hot_used,
            pools.allocator.cold_free,
            misses - last_misses,
            evicted - last_evicted,
            retracted,
            moved - last_moved,
        )
