"""One record for each step of the live server: what ran, how long, and what the pools did."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from granikv.core.step import Segment, StepPlan, StepShape
from granikv.sglang_plugin.radix_cache import GraniRadixCache
from granikv.sglang_plugin.step_plan import PlannedStep
from granikv.sglang_plugin.step_timer import Span, StepTimer

_MAX_WAITING = 256  # steps in flight; a few, unless the server never processes one


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, with the columns of `granikv.traces.records.STEP_SCHEMA`, which needs polars.

    `start_s` is on the clock of `time.perf_counter`.
    `segments_json` and `plan_json` still hold the core's objects, the same ones while nothing
    changes: whoever writes the record turns them into text, off the scheduler's thread.
    """

    iter: int
    steps: int
    start_s: float
    gpu_us: float
    kind: str
    rows: int
    padded_rows: int
    prefill_tokens: int
    private_tokens: int
    segments_json: tuple[Segment, ...]
    plan_json: StepPlan | None
    hot_used: int
    cold_free: int
    hot_misses: int
    evictions: int
    retractions: int
    migrated_tokens: int
    replica: int


STEP_COLUMNS = tuple(field.name for field in fields(StepRecord))


class PoolTotals:
    """Running totals of one server; SGLang's flush makes a new directory, these go on.

    Args:
        tree: of the server.

    Attributes:
        retractions: requests that lost their row; whoever sees one counts it here.
    """

    def __init__(self, tree: GraniRadixCache) -> None:
        self._tree = tree
        self._directory = tree.directory
        self._earlier_misses: Counter[str] = Counter()
        self.retractions = 0

    def misses(self) -> Counter[str]:
        """Slabs that could not be had, by reason."""
        self._follow_flush()
        return self._earlier_misses + self._directory.misses

    def read(self) -> tuple[int, int, int, int]:
        """hot_misses, evictions, retractions and promoted tokens so far."""
        self._follow_flush()
        misses = sum(self._earlier_misses.values()) + sum(self._directory.misses.values())
        tree = self._tree
        return misses, tree.evicted_nodes, self.retractions, tree.promoted_tokens

    def _follow_flush(self) -> None:
        directory = self._tree.directory
        if directory is not self._directory:
            self._earlier_misses += self._directory.misses
            self._directory = directory


@dataclass(slots=True, eq=False)
class _Step:
    """A step between its launch and its record."""

    iteration: int
    span: Span
    kind: str
    shape: StepShape | None
    plan: StepPlan | None
    rows: int
    prefill_tokens: int
    context_tokens: int
    pools: Sequence[int] = ()


class StepLog:
    """Follows steps from launch over result to the end on the GPU, and hands out their records.

    Args:
        tree: of the server.
        totals: of the server.
        timer: of the device.
        last_step: the decode step that was planned last; None where GraniKV plans none.
        write: takes a finished record.
        replica: data-parallel rank.

    Attributes:
        lost: steps without a record, because their result was never processed or their GPU time
            never came.
    """

    def __init__(
        self,
        tree: GraniRadixCache,
        totals: PoolTotals,
        timer: StepTimer,
        last_step: Callable[[], PlannedStep | None],
        write: Callable[[StepRecord], None],
        replica: int = 0,
    ) -> None:
        self._tree = tree
        self._totals = totals
        self._timer = timer
        self._last_step = last_step
        self._write = write
        self._replica = replica
        self._launched: deque[_Step] = deque()
        self._processed: deque[_Step] = deque()
        self._counted = totals.read()
        self.lost = 0

    def run(self, launch: Callable[[], Any], batch: Any) -> Any:
        """Launch a step and take note of it; returns what `launch` returns."""
        is_decode = batch.forward_mode.is_decode()
        if not is_decode and not batch.forward_mode.is_extend():
            return launch()
        span = self._timer.begin()
        result = launch()
        self._timer.end(span)
        rows = len(batch.reqs)
        if is_decode:
            planned = self._last_step()
            shape, plan = (None, None) if planned is None else (planned.shape, planned.plan)
            context_tokens = _context_tokens(batch) if shape is None else 0
            step = _Step(batch.forward_iter, span, "decode", shape, plan, rows, 0, context_tokens)
        else:
            tokens = batch.extend_num_tokens
            step = _Step(batch.forward_iter, span, "extend", None, None, rows, tokens, 0)
        self._launched.append(step)
        self._bound(self._launched)
        return result

    def processed(self, batch: Any) -> None:
        """The scheduler has processed a step's result; record what the GPU has finished."""
        launched = self._launched
        while launched and launched[0].iteration < batch.forward_iter:
            launched.popleft()
            self.lost += 1
        if launched and launched[0].iteration == batch.forward_iter:
            step = launched.popleft()
            core, now = self._tree.token_to_kv_pool_allocator.core, self._totals.read()
            since = [count - before for count, before in zip(now, self._counted, strict=True)]
            self._counted = now
            step.pools = (core.hot_used, core.cold_free, *since)
            self._processed.append(step)
            self._bound(self._processed)
        self.drain()

    def drain(self) -> None:
        """Record every processed step that has ended on the GPU."""
        while self._processed:
            times = self._timer.read(self._processed[0].span)
            if times is None:
                return
            self._write(self._record(self._processed.popleft(), *times))

    def _record(self, step: _Step, start_s: float, gpu_us: float) -> StepRecord:
        shape = step.shape
        hot_used, cold_free, misses, evictions, retractions, migrated = step.pools
        return StepRecord(
            iter=step.iteration,
            steps=1,
            start_s=start_s,
            gpu_us=gpu_us,
            kind=step.kind,
            rows=step.rows,
            padded_rows=step.rows if shape is None else shape.padded_rows,
            prefill_tokens=step.prefill_tokens,
            private_tokens=step.context_tokens if shape is None else shape.private_tokens,
            segments_json=() if shape is None else shape.segments,
            plan_json=step.plan,
            hot_used=hot_used,
            cold_free=cold_free,
            hot_misses=misses,
            evictions=evictions,
            retractions=retractions,
            migrated_tokens=migrated,
            replica=self._replica,
        )

    def _bound(self, steps: deque[_Step]) -> None:
        if len(steps) > _MAX_WAITING:
            steps.popleft()
            self.lost += 1


def _context_tokens(batch: Any) -> int:
    """KV tokens that a decode step reads, without waiting for the device."""
    if batch.seq_lens_cpu is not None:
        return int(batch.seq_lens_cpu.sum())
    return sum(req.seqlen for req in batch.reqs)
