"""Engine: one replica as a SimPy process. It waits, asks the scheduler, charges the cost model and
records.

Time is an integer number of nanoseconds. Between two events that change the batch (an arrival that
can be admitted, an ending row, a pool running out, a plan's bucket, a policy tick) decode steps
differ in their private tokens only, so k of them are one SimPy event. `exact` steps one by one and
leaves the same records.

With an overlapped scheduler (SGLang's default) the batch that starts now was decided when the
previous one started: arrivals are seen one batch later, and a finished row runs once more before it
leaves.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import simpy
from simpy.events import EventPriority

from granikv.core.dispatch import Dispatcher
from granikv.core.step import StepPlan, StepShape
from granikv.cost_models.step import DecodeLine, StepCost
from granikv.sim.config import ServerConfig
from granikv.sim.pools import Pools
from granikv.sim.recorder import StepRecorder
from granikv.sim.repartitioner import Repartitioner
from granikv.sim.requests import RequestState, Status
from granikv.sim.scheduler import PrefillItem, Scheduler

# Ordinary SimPy events have priority 1: at equal times an arrival is in the queue before the engine
# looks.
_AFTER_ARRIVALS = EventPriority(2)
# Upper bound of one jump; a longer segment is simply continued.
_MAX_STEPS = 1 << 14

Process = Generator[simpy.Event, None, None]


class Alarm(simpy.Event):
    """Goes off after a delay and after every arrival of that instant; may be put forward."""

    def __init__(self, env: simpy.Environment, delay_ns: int) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        env.schedule(self, priority=_AFTER_ARRIVALS, delay=delay_ns)

    def put_forward(self, delay_ns: int) -> "Alarm":
        """An earlier alarm that wakes whoever waits for this one, which falls silent."""
        earlier = Alarm(self.env, delay_ns)
        earlier.callbacks, self.callbacks = self.callbacks, []
        return earlier


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


class Engine:
    """One server: owns the batch and the clock of its steps; pools and policies are
    `granikv.core`'s classes.
    """

    def __init__(
        self,
        env: simpy.Environment,
        config: ServerConfig,
        cost: StepCost,
        dispatcher: Dispatcher,
        pools: Pools,
        recorder: StepRecorder,
        on_end: Callable[[RequestState], None],
    ) -> None:
        self.env = env
        self.config = config
        self.pools = pools
        self.totals = EngineTotals()
        self.scheduler = Scheduler(config, pools.index, pools.batch, pools.placement)
        self.repartitioner = Repartitioner(config, pools)
        self._cost = cost
        self._dispatcher = dispatcher
        self._recorder = recorder
        self._on_end = on_end
        self._inbox: deque[RequestState] = deque()
        self._ended: deque[tuple[int, RequestState]] = deque()
        self._batches = 0
        self._lag = 2 if config.overlap_schedule else 1
        self._decided_ns = 0
        self._unseen_rows = 0
        self._idle: simpy.Event | None = None
        self._alarm: Alarm | None = None
        self._jump_ends: Sequence[int] | None = None
        self._jump_start_ns = 0
        self._jump_steps = 0
        self._counted = (0, 0, 0)
        env.process(self._run())
        if self.repartitioner.is_active:
            env.process(self._tick())

    # ------------------------------------------------------------------ outside view

    @property
    def load(self) -> int:
        """Requests inside: what a router compares."""
        return len(self._inbox) + len(self.scheduler.waiting) + len(self.pools.batch)

    def submit(self, state: RequestState) -> None:
        """A request arrives now."""
        if not self.scheduler.fits(state, self.pools.cold_tokens):
            self._end(state, Status.REFUSED)
            return
        self._inbox.append(state)
        self._disturb()

    def unfinished(self) -> list[RequestState]:
        """Requests that have arrived and not ended."""
        chunked = self.scheduler.chunked
        rows = [s for s in self.pools.batch.states if s.finish_ns is None]
        return [*rows, *([chunked] if chunked else []), *self.scheduler.waiting, *self._inbox]

    def _disturb(self, *, is_tick: bool = False) -> None:
        """Something the next decision may have to see: wake up, or cut a jump short."""
        if self._idle is not None:
            if not is_tick:
                self._idle.succeed()
                self._idle = None
            return
        ends = self._jump_ends
        if ends is None or self._alarm is None or (self.scheduler.is_full and not is_tick):
            return
        # The decision after step m sees what had come by the boundary before it (overlap) or by
        # then (no overlap).
        since = int(self.env.now) - self._jump_start_ns
        boundary = bisect_left(ends, since) + 1 if since > 0 else 0
        steps = max(1, boundary + (self.config.overlap_schedule and not is_tick))
        if steps < self._jump_steps:
            self._jump_steps = steps
            self._alarm = self._alarm.put_forward(int(ends[steps - 1]) - since)

    # ------------------------------------------------------------------ the loop

    def _run(self) -> Process:
        batch, scheduler = self.pools.batch, self.scheduler
        while True:
            left = self._release_ended()
            self._take_arrivals()
            moved = self.repartitioner.advance(self._now_s, scheduler, self.totals.retractions)
            if not len(batch):
                scheduler.is_full = False
            items = scheduler.next_prefill(self._now_s, self._unseen_rows)
            copied = scheduler.copied_tokens + moved
            if items:
                yield from self._prefill(items, copied)
                continue
            if len(batch):
                if left:
                    scheduler.is_full = False
                yield from self._decode(copied)
            elif scheduler.waiting:
                # Nothing runs and the first request still does not fit: it never will.
                self._end(scheduler.waiting.popleft(), Status.REFUSED)
            else:
                scheduler.ratio.restart(scheduler.ratio.first)
                yield self._sleep()

    @property
    def _now_s(self) -> float:
        return float(self.env.now) / 1e9

    def _take_arrivals(self) -> None:
        """Move arrivals that this decision may see from the inbox to the waiting queue."""
        inbox = self._inbox
        busy = self.config.overlap_schedule and len(self.pools.batch) > 0
        visible_ns = self._decided_ns if busy or self.scheduler.chunked else self.env.now
        while inbox and inbox[0].arrival_ns <= visible_ns:
            self.scheduler.waiting.append(inbox.popleft())
        self._decided_ns = int(self.env.now)

    def _prefill(self, items: list[PrefillItem], copied_tokens: int) -> Process:
        start = int(self.env.now)
        cost = self._cost.extend(
            [item.extend_tokens for item in items], [item.prefix_tokens for item in items]
        )
        copy_ns = self._cost.copy_ns(copied_tokens) if copied_tokens else 0
        yield self._wait(cost.total_ns + copy_ns)

        self.scheduler.take_slots(items, self._now_s)
        self._batches += 1
        self._unseen_rows = 0
        for item in items:
            if not item.truncated:
                self._join(item.state)
        totals = self.totals
        totals.prefills += 1
        totals.extend_ns += cost.total_ns
        totals.copy_ns += copy_ns
        self._count_busy(start)
        self._recorder.extend(
            start,
            int(self.env.now),
            len(items),
            sum(item.extend_tokens for item in items),
            self._counters(0),
        )

    def _join(self, state: RequestState) -> None:
        now = int(self.env.now)
        hot_tokens = self.pools.join(state)
        if state.first_token_ns is None:
            state.first_token_ns = now
            state.hot_tokens = hot_tokens
        state.status = Status.RUNNING
        self._unseen_rows += 1
        if state.remaining_output == 1:
            self._finish(state)

    def _decode(self, copied_tokens: int) -> Process:
        pools = self.pools
        retracted = self._make_room()
        rows = len(pools.batch)
        if not rows:
            return
        shape = pools.shape(rows, self.config.padded_rows(rows))
        plan = self._dispatcher.plan(shape)
        line = self._cost.decode(shape, plan)
        copy_ns = self._cost.copy_ns(copied_tokens) if copied_tokens else 0
        steps = self._jump_length(shape)
        ends = line.ends_ns(shape.private_tokens, rows, steps)
        start = int(self.env.now)
        if steps > 1:
            self._jump_ends, self._jump_start_ns, self._jump_steps = ends, start + copy_ns, steps
        yield self._wait(copy_ns + int(ends[-1]))
        if steps > 1:
            self._jump_ends = None
            steps = self._jump_steps
            # Stepping, the decision before the coming one would have been at the last step's start.
            self._decided_ns = start + copy_ns + int(ends[steps - 2]) if steps > 1 else start
        end = int(self.env.now)
        pools.decode(steps)
        self.scheduler.ratio.decay(steps)
        self._batches += steps
        self._unseen_rows = rows if self.config.overlap_schedule else 0
        for state in pools.batch.pop_finished():
            self._finish(state)
        self.totals.copy_ns += copy_ns
        self._count_decode(shape, plan, line, end - start - copy_ns, steps)
        self._count_busy(start)
        counters = self._counters(retracted)
        self._recorder.decode(start, end, steps, shape, plan, counters)

    def _jump_length(self, shape: StepShape) -> int:
        """Decode steps until the batch, its plan or an admission decision may change."""
        scheduler = self.scheduler
        may_admit = not scheduler.is_full and (scheduler.waiting or self._inbox)
        if self.config.exact or self._ended or may_admit or self.repartitioner.is_moving:
            return 1
        rows = shape.rows
        limit = self._dispatcher.private_tokens_limit(shape.private_tokens)
        until_new_plan = -(-(limit - shape.private_tokens) // rows)
        return min(
            self.pools.batch.steps_to_next_end(),
            scheduler.slots_for_decode(rows),
            until_new_plan,
            _MAX_STEPS,
        )

    def _make_room(self) -> int:
        """Retract rows when not even one decode step fits; returns how many."""
        pools, scheduler = self.pools, self.scheduler
        if scheduler.slots_for_decode(len(pools.batch)) >= 1:
            return 0
        retracted = scheduler.retract(pools.retract)
        scheduler.waiting.extend(retracted)
        if len(pools.batch) and scheduler.slots_for_decode(len(pools.batch)) < 1:
            for state in pools.batch.states:
                if state.finish_ns is None:
                    pools.retract(state)
                    self._end(state, Status.ABORTED)
        self.totals.retractions += len(retracted)
        return len(retracted)

    # ------------------------------------------------------------------ endings

    def _finish(self, state: RequestState) -> None:
        """The last token is out; slots are held until the scheduler has seen it."""
        self._ended.append((self._batches, state))
        self._end(state, Status.FINISHED)

    def _end(self, state: RequestState, status: Status) -> None:
        state.finish_ns = int(self.env.now)
        state.status = status
        self._on_end(state)

    def _release_ended(self) -> bool:
        """Let rows leave whose end the scheduler has seen by now; True when there were any."""
        left = False
        while self._ended and self._ended[0][0] + self._lag <= self._batches + 1:
            _, state = self._ended.popleft()
            self.pools.release(state, self._now_s)
            left = True
        return left

    # ------------------------------------------------------------------ waiting

    def _wait(self, delay_ns: int) -> simpy.Event:
        self._alarm = Alarm(self.env, delay_ns)
        return self._alarm

    def _sleep(self) -> simpy.Event:
        self._idle = simpy.Event(self.env)
        return self._idle

    def _tick(self) -> Process:
        interval_ns = int(self.config.policy_interval_s * 1e9)
        while True:
            yield self.env.timeout(interval_ns)
            self.repartitioner.tick()
            self._disturb(is_tick=True)

    # ------------------------------------------------------------------ counting

    def _counters(self, retracted: int) -> tuple[int, int, int, int, int, int]:
        pools = self.pools
        misses, evicted = pools.hot_misses, pools.index.evicted_nodes
        moved = self.repartitioner.moved_tokens
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

    def _count_busy(self, start_ns: int) -> None:
        duration = int(self.env.now) - start_ns
        self.totals.busy_ns += duration
        self.totals.fragmentation_ns += duration * self.pools.fragmentation

    def _count_decode(
        self, shape: StepShape, plan: StepPlan, line: DecodeLine, duration_ns: int, steps: int
    ) -> None:
        totals = self.totals
        totals.host_ns += steps * line.host_ns
        totals.gemm_ns += steps * line.gemm_ns
        totals.collective_ns += steps * line.collective_ns
        fixed = line.host_ns + line.gemm_ns + line.collective_ns
        totals.attention_ns += duration_ns - steps * fixed
        totals.decode_steps += steps
        if plan.row_split:
            whole = self._cost.decode(shape, replace(plan, row_split=()))
            saved = whole.ns(shape.private_tokens) - line.ns(shape.private_tokens)
            totals.split_steps += steps
            totals.split_saved_ns += steps * saved
