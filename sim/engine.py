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
from collections.abc import Callable, Generator

import simpy

from granikv.core.dispatch import Dispatcher
from granikv.core.repartition import RepartitionPolicy
from granikv.core.step import ExtendShape, StepShape
from granikv.cost_models.step import StepCost
from granikv.sim.config import ServerConfig
from granikv.sim.ledger import Ledger
from granikv.sim.pause import Pause
from granikv.sim.pools import Pools
from granikv.sim.recorder import StepRecorder
from granikv.sim.repartitioner import Repartitioner
from granikv.sim.requests import RequestState, Status
from granikv.sim.scheduler import PrefillItem, Scheduler

# Upper bound of one jump; a longer segment is simply continued.
_MAX_STEPS = 1 << 14

Process = Generator[simpy.Event, None, None]


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
        policy: RepartitionPolicy | None = None,
    ) -> None:
        self.env = env
        self.config = config
        self.pools = pools
        self.scheduler = Scheduler(config, pools.index, pools.batch, pools.placement)
        self.repartitioner = Repartitioner(config, pools, policy)
        self.ledger = Ledger(cost, pools, self.repartitioner, recorder)
        self._cost = cost
        self._dispatcher = dispatcher
        self._on_end = on_end
        self._inbox: deque[RequestState] = deque()
        self._ended: deque[tuple[int, RequestState]] = deque()
        self._batches = 0
        self._lag = 2 if config.overlap_schedule else 1
        self._decided_ns = 0
        self._has_left = False
        self._running: list[PrefillItem] = []
        self._prefilled: list[PrefillItem] = []
        self._last_joined: set[int] = set()
        self._last_was_decode = False
        self._pause = Pause(env, config.overlap_schedule)
        env.process(self._run())

    # ------------------------------------------------------------------ outside view

    @property
    def load(self) -> int:
        """Requests inside: what a router compares."""
        inside = len(self._inbox) + len(self.scheduler.waiting) + len(self.pools.batch)
        return inside + len(self._in_prefill())

    def submit(self, state: RequestState) -> None:
        """A request arrives now."""
        if not self.scheduler.fits(state, self.pools.cold_tokens):
            self._end(state, Status.REFUSED)
            return
        self._inbox.append(state)
        self._pause.disturb(may_admit=not self.scheduler.is_full)

    def unfinished(self) -> list[RequestState]:
        """Requests that have arrived and not ended."""
        rows = [s for s in self.pools.batch.states if s.finish_ns is None]
        return [*rows, *self._in_prefill(), *self.scheduler.waiting, *self._inbox]

    def _in_prefill(self) -> list[RequestState]:
        """Requests in the running prefill step, or between two chunks."""
        states = [item.state for item in self._running]
        chunked = self.scheduler.chunked
        if chunked is not None and chunked not in states:
            states.append(chunked)
        return states

    # ------------------------------------------------------------------ the loop

    def _run(self) -> Process:
        batch, scheduler = self.pools.batch, self.scheduler
        overlap = self.config.overlap_schedule
        while True:
            if not overlap:
                self._cache_prefilled()
            self._release_ended()
            self._take_arrivals()
            copied = self.pools.promote_used(self._now_s) + self._move_boundary()
            if not len(batch):
                scheduler.is_full = False
            items = scheduler.next_prefill(self._now_s, self._unseen_rows)
            # An overlapped scheduler sees a prefill's result only now: the prefill that follows it
            # directly has not hit what it computed.
            self._cache_prefilled()
            if items:
                yield from self._prefill(items, copied)
            elif len(batch):
                yield from self._decode(copied)
            elif copied:
                yield self._pause.until(self._cost.copy_ns(copied))
            elif (stuck := scheduler.drop_chunked()) is not None:
                # Nothing runs and COLD has no slot for the next chunk.
                self._end(stuck, Status.ABORTED)
            elif scheduler.waiting:
                # Nothing runs and the first request still does not fit: it never will.
                self._end(scheduler.waiting.popleft(), Status.REFUSED)
            else:
                scheduler.ratio.restart(scheduler.ratio.first)
                yield self._pause.sleep()

    def _move_boundary(self) -> int:
        """This boundary's share of a repartition; returns the tokens that the next step copies.

        Slots of a prefill that is not cached yet are in no table that a move could rewrite.
        """
        if self._prefilled:
            return 0
        now = int(self.env.now)
        return self.repartitioner.advance(now, self.scheduler, self.ledger.totals.retractions)

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
        new = [item.extend_tokens for item in items]
        cached = [item.prefix_tokens for item in items]
        cost = self._cost.extend(new, cached, self.config.padded_tokens(sum(new)))
        copy_ns = self._cost.copy_ns(copied_tokens) if copied_tokens else 0
        self._running = items
        yield self._pause.until(cost.total_ns + copy_ns)

        self._running = []
        self.scheduler.take_slots(items)
        self._batches += 1
        self._last_was_decode = False
        self._last_joined.clear()
        self._end_prefill(items)
        shape = ExtendShape(tuple((item.extend_tokens, item.prefix_tokens) for item in items))
        self.ledger.prefill(start, int(self.env.now), shape, cost, copy_ns)

    def _end_prefill(self, items: list[PrefillItem]) -> None:
        """Chunks are cached at once, whole prompts join the batch and are cached when seen."""
        lost_rows = False
        for item in items:
            if item.truncated:
                self.scheduler.cache(item, self._now_s)
                lost_rows = True
                continue
            self._join(item.state)
            self._prefilled.append(item)
            lost_rows |= item.state.finish_ns is not None and not self.config.overlap_schedule
        if lost_rows:  # a prefill batch that shrinks when it is merged opens admission
            self.scheduler.is_full = False

    def _join(self, state: RequestState) -> None:
        self.pools.batch.join(state)
        self._last_joined.add(state.join_key)
        if state.first_token_ns is None:
            state.first_token_ns = int(self.env.now)
        state.status = Status.RUNNING
        if state.remaining_output == 1:
            self._finish(state)

    def _cache_prefilled(self) -> None:
        for item in self._prefilled:
            self.scheduler.cache(item, self._now_s)
            self.pools.join(item.state)
        self._prefilled.clear()

    @property
    def _unseen_rows(self) -> int:
        """Rows whose newest token an overlapped scheduler has not seen."""
        if not self.config.overlap_schedule:
            return 0
        return len(self.pools.batch) if self._last_was_decode else len(self._last_joined)

    def _unseen(self, state: RequestState) -> int:
        """Tokens of a row that an overlapped scheduler has not seen."""
        is_new = self._last_was_decode or state.join_key in self._last_joined
        return int(self.config.overlap_schedule and is_new)

    def _decode(self, copied_tokens: int) -> Process:
        pools = self.pools
        retracted = self._make_room()
        # Admission opens again once a decode step has dropped the rows that ended.
        self.scheduler.is_full = self.scheduler.is_full and not self._has_left
        self._has_left = False
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
        if self.repartitioner.is_active and steps > 1:
            look = bisect_left(ends, self.repartitioner.next_look_ns - start - copy_ns) + 1
            ends = ends[: min(steps, look)]
        yield self._pause.jump(copy_ns, ends)
        steps = self._pause.jumped_steps()
        if len(ends) > 1:
            # Stepping, the decision before the coming one would have been at the last step's start.
            self._decided_ns = start + copy_ns + int(ends[steps - 2]) if steps > 1 else start
        end = int(self.env.now)
        pools.decode(steps)
        self.scheduler.ratio.decay(steps - (retracted > 0))  # not in the step of a retraction
        self._batches += steps
        self._last_was_decode = True
        for state in pools.batch.pop_finished():
            self._finish(state)
        self.ledger.decode(start, end, steps, shape, plan, line, copy_ns, retracted)

    def _jump_length(self, shape: StepShape) -> int:
        """Decode steps until the batch, its plan or an admission decision may change."""
        scheduler = self.scheduler
        may_admit = not scheduler.is_full and (scheduler.waiting or self._inbox)
        placement = self.pools.placement
        may_copy = placement is not None and placement.has_candidates
        may_copy |= self.repartitioner.boundary.is_moving
        if self.config.exact or self._ended or may_admit or may_copy:
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
        """Retract rows when not even one decode step fits; returns how many.

        Ended rows that the scheduler has not seen leave first. (The live scheduler may retract
        them, and generate their last token again.)
        """
        pools, scheduler = self.pools, self.scheduler
        if scheduler.slots_for_decode(len(pools.batch)) >= 1:
            return 0
        while self._ended:
            self._release(self._ended.popleft()[1])
        if not len(pools.batch) or scheduler.slots_for_decode(len(pools.batch)) >= 1:
            return 0
        retracted = scheduler.retract(pools.retract, self._unseen)
        scheduler.waiting.extend(retracted)
        if scheduler.slots_for_decode(len(pools.batch)) < 1:
            last = pools.batch.states[0]
            pools.retract(last, 0)
            self._end(last, Status.ABORTED)
        return len(retracted)

    # ------------------------------------------------------------------ endings

    def _finish(self, state: RequestState) -> None:
        """The last token is out; slots are held until the scheduler has seen it."""
        self._ended.append((self._batches, state))
        state.hot_tokens = self.pools.hot_tokens_of(state)
        self._end(state, Status.FINISHED)

    def _end(self, state: RequestState, status: Status) -> None:
        state.finish_ns = int(self.env.now)
        state.status = status
        self._on_end(state)

    def _release_ended(self) -> None:
        """Let rows leave whose end the scheduler has seen by now."""
        while self._ended and self._ended[0][0] + self._lag <= self._batches + 1:
            self._release(self._ended.popleft()[1])

    def _release(self, state: RequestState) -> None:
        self.pools.release(state)
        self._has_left = True
