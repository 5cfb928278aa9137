"""Scheduler: SGLang 0.5.17's rules for what runs next, on GraniKV's pools.

The rules (managers/scheduler.py and schedule_policy.py of that version): prefill before decode; a
request is admitted while its new tokens and expected output fit into free plus evictable tokens,
less what the running rows are expected to write; a refusal closes admission until a row leaves;
long prompts are prefilled in chunks; when decoding runs out of slots, rows with the shortest output
go back to the queue.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from granikv.core.allocator import Slots
from granikv.core.errors import IntegrityError
from granikv.sim.config import (
    INIT_NEW_TOKEN_RATIO,
    MIN_NEW_TOKEN_RATIO_FACTOR,
    NEW_TOKEN_RATIO_DECAY_STEPS,
    RETRACT_DECODE_STEPS,
    ServerConfig,
)
from granikv.sim.decode_batch import CLIP_OUTPUT_TOKENS, DecodeBatch
from granikv.sim.placement import HotPlacement
from granikv.sim.prefix_index import PrefixIndex
from granikv.sim.queue_order import order_waiting
from granikv.sim.requests import RequestState


@dataclass(slots=True)
class PrefillItem:
    """One request's part of a prefill step: `extend_tokens` new tokens over `prefix_tokens` cached
    ones; the first `hot_tokens` of them are filled into the request's reservation.
    """

    state: RequestState
    prefix_tokens: int
    extend_tokens: int
    truncated: bool
    hot_tokens: int = 0
    cold_slots: Slots | None = None


class NewTokenRatio:
    """Share of the outstanding output that admission reserves; falls with every decode step.

    Kept as a base and a count of steps, so that k steps at once give the bits of k single steps.
    """

    def __init__(self, conservativeness: float) -> None:
        self.first = min(INIT_NEW_TOKEN_RATIO * conservativeness, 1.0)
        self.floor = min(self.first * MIN_NEW_TOKEN_RATIO_FACTOR, 1.0)
        self._decay = (self.first - self.floor) / NEW_TOKEN_RATIO_DECAY_STEPS
        self._base = self.first
        self._steps = 0

    @property
    def value(self) -> float:
        """The ratio now."""
        return max(self._base - self._steps * self._decay, self.floor)

    def decay(self, steps: int) -> None:
        """Account for `steps` decode steps."""
        self._steps += steps

    def restart(self, value: float) -> None:
        """Set after a retraction, or back to the first value when the server is idle."""
        self._base, self._steps = value, 0


class Scheduler:
    """The waiting queue and the decisions; the engine executes them and keeps time."""

    def __init__(
        self,
        config: ServerConfig,
        index: PrefixIndex,
        batch: DecodeBatch,
        placement: HotPlacement | None,
    ) -> None:
        self.waiting: deque[RequestState] = deque()
        self.is_full = False
        self.ratio = NewTokenRatio(config.schedule_conservativeness)
        self.cold_refusals = 0
        self._config = config
        self._index = index
        self._batch = batch
        self._placement = placement
        self._chunked: RequestState | None = None

    @property
    def chunked(self) -> RequestState | None:
        """The request whose prompt is being prefilled in chunks."""
        return self._chunked

    @property
    def promised_tokens(self) -> int:
        """COLD tokens that the request in chunks has still to take."""
        state = self._chunked
        return 0 if state is None else state.fill_tokens - _depth(state)

    def fits(self, state: RequestState, cold_tokens: int) -> bool:
        """Whether the request can ever be admitted: prompt, output and a spare slot within COLD."""
        return state.fill_tokens + state.remaining_output + 1 < cold_tokens

    def all_fit(self, cold_tokens: int) -> bool:
        """Whether every request inside could still run with so much COLD."""
        chunked = [self._chunked] if self._chunked is not None else []
        inside = [*self._batch.states, *chunked, *self.waiting]
        return all(self.fits(state, cold_tokens) for state in inside)

    # ------------------------------------------------------------------ prefill

    def next_prefill(self, now_s: float, unseen_tokens: int) -> list[PrefillItem]:
        """Requests to prefill now, with slots not yet taken; empty when decoding should go on.

        `unseen_tokens` is the output that the running rows have written but an overlapped scheduler
        has not seen.
        """
        if (self.is_full or not self.waiting) and self._chunked is None:
            return []
        if len(self._batch) >= self._config.max_running_requests and self._chunked is None:
            self.is_full = True
            return []
        adder = _Budget(
            self._index,
            (self._batch.remaining_tokens() + unseen_tokens) * self.ratio.value,
            self._config.max_prefill_tokens,
            self._config.chunked_prefill_size,
        )
        items: list[PrefillItem] = []
        if self._chunked is not None:
            item = self._continue_chunk(self._chunked, adder)
            if item is None:
                return []
            items.append(item)
        if self.waiting:
            self._admit_waiting(items, adder, now_s)
        return items

    def _continue_chunk(self, state: RequestState, budget: "_Budget") -> PrefillItem | None:
        """The next chunk; None when COLD has not a slot for it.

        A chunk goes on even when nothing may be promised any more, as in the live scheduler; but
        where that one fails, this one waits for decoding rows to end.
        """
        done = _depth(state)
        wanted = state.fill_tokens - done
        room = min(budget.chunk_tokens, int(budget.total_tokens))
        if room <= 0:
            room = min(budget.chunk_tokens, budget.free_tokens)
        extend = min(wanted, room)
        if extend < 1:
            return None
        truncated = extend < wanted
        budget.charge(extend, 0 if truncated else _charged_output(state))
        if not truncated:
            self._chunked = None
        return PrefillItem(state, done, extend, truncated)

    def _admit_waiting(self, items: list[PrefillItem], budget: "_Budget", now_s: float) -> None:
        order_waiting(self.waiting, self._config.schedule_policy, self._index)
        room = self._config.max_running_requests - len(self._batch)
        while self.waiting:
            if len(items) >= room:
                self.is_full = True
                return
            state = self.waiting[0]
            item = self._admit(state, budget, now_s)
            if item is None:
                return
            self.waiting.popleft()
            items.append(item)
            if item.truncated:
                self._chunked = state
            if budget.is_out_of_tokens:
                self.is_full = True
                return
            if budget.is_spent:
                return

    def _admit(self, state: RequestState, budget: "_Budget", now_s: float) -> PrefillItem | None:
        cursor, path = self._index.match(state.fill, state.fill_tokens - 1)
        extend = state.fill_tokens - cursor.depth
        needed = extend + _expected_output(state) + 1
        if needed >= budget.total_tokens:
            self._refuse()
            return None
        self._index.lock(cursor.node)
        if needed >= budget.total_tokens:  # locking took evictable tokens away
            self._index.unlock(cursor.node)
            self._refuse()
            return None
        truncated = extend > budget.chunk_tokens
        take = budget.chunk_tokens if truncated else extend
        if take <= 0:
            self._index.unlock(cursor.node)
            return None
        state.cursor, state.last_node = cursor, cursor.node
        if state.generated == 0:
            state.cached_tokens = cursor.depth
        if self._placement is not None:
            self._placement.admit(state, path, now_s)
        budget.charge(take, 0 if truncated else _charged_output(state))
        return PrefillItem(state, cursor.depth, take, truncated)

    def _refuse(self) -> None:
        """COLD has no room for the first queued request: close admission."""
        self.is_full = True
        self.cold_refusals += 1

    def take_slots(self, items: list[PrefillItem]) -> None:
        """Allocate the new tokens' slots; nothing else touches the pools while a step runs."""
        index = self._index
        for item in items:
            item.hot_tokens = self._hot_part(item.state, item.extend_tokens)
            cold_tokens = item.extend_tokens - item.hot_tokens
            slots = (
                index.allocator.alloc_cold(cold_tokens) if index.ensure_cold(cold_tokens) else None
            )
            if slots is None:
                raise IntegrityError("admission promised COLD slots that are not there")
            item.cold_slots = slots
            if item.hot_tokens and item.state.reservation is not None:
                index.directory.take(item.state.reservation, item.hot_tokens)

    def cache(self, item: PrefillItem, now_s: float) -> None:
        """Put the new tokens into the prefix index and lock them."""
        state, slots = item.state, item.cold_slots
        if state.cursor is None or state.last_node is None or slots is None:
            raise IntegrityError("a request was cached before it was prefilled")
        before, hot = state.last_node, item.hot_tokens
        self._index.insert(state.cursor, state.fill, slots, state.reservation, hot)
        after = state.cursor.node
        if after is not before:
            self._index.lock(after, before)
            state.last_node = after
        self._index.refresh(after)
        is_complete = not item.truncated
        if is_complete:
            self._index.count_use(after.path(), now_s)
        if self._placement is None:
            return
        if is_complete or state.cursor.depth >= state.request.prefix_tokens:
            self._placement.finish(state)
        if is_complete:
            self._placement.used(state)

    def _hot_part(self, state: RequestState, extend_tokens: int) -> int:
        if state.reservation is None:
            return 0
        return max(0, min(extend_tokens, state.request.prefix_tokens - _depth(state)))

    def drop_chunked(self) -> RequestState | None:
        """Give up the request that is prefilled in chunks; what it has computed stays cached."""
        state = self._chunked
        if state is None or state.last_node is None:
            return None
        self._chunked = None
        self._index.unlock(state.last_node)
        state.last_node = state.cursor = None
        if self._placement is not None:
            self._placement.finish(state)
        return state

    # ------------------------------------------------------------------ decode

    def slots_for_decode(self, rows: int) -> int:
        """Decode steps of `rows` rows that free and evictable slots allow."""
        return (self._index.allocator.cold_free + self._index.evictable_tokens) // rows

    def retract(
        self,
        release: Callable[[RequestState, int], None],
        unseen: Callable[[RequestState], int],
    ) -> list[RequestState]:
        """Send rows back until one decode step fits: shortest output first, then longest prompt.

        `release(row, kept)` frees a row's slots and locks and keeps its first `kept` output tokens;
        `unseen(row)` is how many it has written that the scheduler has not seen: they are lost. The
        last row is never sent back. Returns the rows in that order.
        """
        seen = {s.join_key: self._written(s) - unseen(s) for s in self._batch.states}
        rows = self._batch.states
        rows.sort(key=lambda s: (seen[s.join_key], -s.request.prompt_tokens), reverse=True)
        chosen: list[RequestState] = []
        while len(rows) > 1 and (not chosen or self.slots_for_decode(len(rows)) < 1):
            state = rows.pop()
            release(state, seen[state.join_key])
            self._index.ensure_cold(len(rows) * RETRACT_DECODE_STEPS)
            chosen.append(state)
        written = sum(seen[s.join_key] for s in rows)
        wanted = sum(s.request.output_tokens for s in rows)
        self.ratio.restart(min(1.0, (written + RETRACT_DECODE_STEPS * len(rows)) / (wanted + 1)))
        self.is_full = False
        return chosen

    def _written(self, state: RequestState) -> int:
        """Output tokens that a running row has generated."""
        return state.generated + 1 + self._batch.step - state.join_step


class _Budget:
    """Tokens that one prefill step may still take."""

    def __init__(
        self, index: PrefixIndex, reserved: float, input_tokens: int, chunk_tokens: int
    ) -> None:
        self._index = index
        self._reserved = reserved
        self._taken = 0
        self.input_tokens = input_tokens
        self.chunk_tokens = chunk_tokens

    @property
    def total_tokens(self) -> float:
        """Free and evictable COLD tokens less everything reserved; a part of the output counts by
        its ratio.
        """
        index = self._index
        return index.allocator.cold_free + index.evictable_tokens - self._reserved

    def charge(self, extend_tokens: int, output_tokens: int) -> None:
        """Account for an admitted request; SGLang adds one page (here: one token) for alignment."""
        self._reserved += extend_tokens + output_tokens + 1
        self._taken += extend_tokens + 1
        self.input_tokens -= extend_tokens
        self.chunk_tokens -= extend_tokens

    @property
    def free_tokens(self) -> int:
        """Free and evictable COLD tokens that this step has not taken."""
        index = self._index
        return index.allocator.cold_free + index.evictable_tokens - self._taken

    @property
    def is_out_of_tokens(self) -> bool:
        """Whether COLD has nothing left to promise: closes admission."""
        return self.total_tokens <= 0 or self.free_tokens <= 0

    @property
    def is_spent(self) -> bool:
        """Whether this step may take no more input."""
        return self.input_tokens <= 0 or self.chunk_tokens <= 0


def _depth(state: RequestState) -> int:
    if state.cursor is None:
        raise IntegrityError("a request is not in the prefix index")
    return state.cursor.depth


def _expected_output(state: RequestState) -> int:
    return min(state.remaining_output, CLIP_OUTPUT_TOKENS)


def _charged_output(state: RequestState) -> int:
    """SGLang gates on what is left to write, but charges a retracted request's whole output."""
    return min(state.request.output_tokens, CLIP_OUTPUT_TOKENS)
