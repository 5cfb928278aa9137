"""One record for each step of the live server: what ran, how long, and what the pools did."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

from granikv.core.step import ExtendShape, Segment, StepPlan
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
    plan_json: StepPlan | ExtendShape | None
    hot_used: int
    cold_free: int
    hot_misses: int
    evictions: int
    retractions: int
    migrated_tokens: int
    replica: int


STEP_COLUMNS = tuple(field.name for field in fields(StepRecord))


class Reads(NamedTuple):
    """KV that a decode step reads, and how.

    Attributes:
        private_tokens: outside of segments, over all rows, new ones included.
        segments: that rows share.
        plan: None where it is not known.
    """

    private_tokens: int
    segments: tuple[Segment, ...]
    plan: StepPlan | None


class Pools(Protocol):
    """What run records need to know of the KV pools of a server.

    Attributes:
        retractions: requests that lost their row; whoever sees one counts it here.
    """

    retractions: int

    @property
    def hot_tokens(self) -> int:
        """Slots that are HOT."""

    def now(self) -> tuple[int, int]:
        """hot_used and cold_free, in tokens."""

    def totals(self) -> tuple[int, int, int, int]:
        """hot_misses, evictions, retractions and copied tokens so far."""

    def reads(self, batch: Any) -> Reads:
        """Of the decode step that has just been launched."""

    def hot_tokens_of(self, req: Any) -> int:
        """Tokens on the path of one of SGLang's requests that are HOT."""


@dataclass(slots=True, eq=False)
class _Step:
    """A step between its launch and its record."""

    iteration: int
    span: Span
    rows: int
    padded_rows: int
    extend: ExtendShape | None
    reads: Reads | None
    pools: Sequence[int] = ()


class StepLog:
    """Follows steps from launch over result to the end on the GPU, and hands out their records.

    Args:
        pools: of the server.
        timer: of the device.
        padded_rows: rows that a decode step really computes, of its rows and what its launch gave.
        write: takes a finished record.
        replica: data-parallel rank.

    Attributes:
        lost: steps without a record, because their result was never processed or their GPU time
            never came.
    """

    def __init__(
        self,
        pools: Pools,
        timer: StepTimer,
        padded_rows: Callable[[int, Any], int],
        write: Callable[[StepRecord], None],
        replica: int = 0,
    ) -> None:
        self._pools = pools
        self._timer = timer
        self._padded_rows = padded_rows
        self._write = write
        self._replica = replica
        self._launched: deque[_Step] = deque()
        self._processed: deque[_Step] = deque()
        self._counted = pools.totals()
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
            padded, reads = self._padded_rows(rows, result), self._pools.reads(batch)
            step = _Step(batch.forward_iter, span, rows, padded, None, reads)
        else:
            requests = zip(batch.extend_lens, batch.prefix_lens, strict=True)
            extend = ExtendShape(tuple(requests))
            step = _Step(batch.forward_iter, span, rows, rows, extend, None)
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
            step, now = launched.popleft(), self._pools.totals()
            since = [count - before for count, before in zip(now, self._counted, strict=True)]
            self._counted = now
            step.pools = (*self._pools.now(), *since)
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
        extend, reads = step.extend, step.reads or Reads(0, (), None)
        hot_used, cold_free, misses, evictions, retractions, migrated = step.pools
        return StepRecord(
            iter=step.iteration,
            steps=1,
            start_s=start_s,
            gpu_us=gpu_us,
            kind="decode" if extend is None else "extend",
            rows=step.rows,
            padded_rows=step.padded_rows,
            prefill_tokens=0 if extend is None else extend.new_tokens,
            private_tokens=reads.private_tokens,
            segments_json=reads.segments,
            plan_json=reads.plan if extend is None else extend,
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
