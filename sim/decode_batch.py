"""DecodeBatch: the rows that decode together, kept so that k steps cost no more than one.

All rows advance in lockstep, so a row's end is a fixed step number and its private slots are one
slice of a ring that is indexed by step. Nothing is done per row and step but taking slots.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from granikv.sim.requests import RequestState

# SGLang 0.5.17 counts at most this much of a request's remaining output when it admits
# (schedule_policy.py).
CLIP_OUTPUT_TOKENS = 4096

_FIRST_ROWS = 64
_FIRST_COLUMNS = 1024


class SlotRing:
    """Decode slots by row and step, `[rows, columns]` int32; a column is a step number modulo their
    count.
    """

    def __init__(self) -> None:
        self._table = np.zeros((_FIRST_ROWS, _FIRST_COLUMNS), np.int32)
        self._free_rows = list(range(_FIRST_ROWS - 1, -1, -1))

    def take_row(self, steps: int, now_step: int) -> int:
        """A free row that can hold `steps` more steps."""
        if steps >= self._table.shape[1]:
            self._widen(steps, now_step)
        if not self._free_rows:
            self._deepen()
        return self._free_rows.pop()

    def give_row(self, row: int) -> None:
        """Hand a row back."""
        self._free_rows.append(row)

    def write(self, rows: NDArray[np.intp], step: int, slots: NDArray[np.int32]) -> None:
        """Store `slots` `[k, len(rows)]` of the steps `step .. step + k - 1`."""
        columns = self._table.shape[1]
        count = len(slots)
        first = step % columns
        head = min(count, columns - first)
        self._table[rows, first : first + head] = slots[:head].T
        if head < count:
            self._table[rows, : count - head] = slots[head:].T

    def read(self, row: int, start: int, stop: int) -> NDArray[np.int32]:
        """A copy of the row's slots of steps `start .. stop - 1`."""
        columns = self._table.shape[1]
        first, count = start % columns, stop - start
        if first + count <= columns:
            return self._table[row, first : first + count].copy()
        return np.concatenate(
            [self._table[row, first:], self._table[row, : first + count - columns]]
        )

    def remap(self, moved: NDArray[np.int32]) -> None:
        """Rewrite every slot through `moved`; stale entries of free rows do no harm."""
        self._table = moved[self._table]

    def _widen(self, steps: int, now_step: int) -> None:
        old = self._table
        columns = 1 << int(steps + 1).bit_length()
        self._table = np.zeros((old.shape[0], columns), np.int32)
        # The last old.shape[1] steps keep their numbers, so they land where the wider modulus puts
        # them.
        steps_kept = np.arange(max(0, now_step - old.shape[1]), now_step)
        self._table[:, steps_kept % columns] = old[:, steps_kept % old.shape[1]]

    def _deepen(self) -> None:
        rows = self._table.shape[0]
        self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        self._free_rows = list(range(2 * rows - 1, rows - 1, -1))


class DecodeBatch:
    """Running rows with their ends in a heap; `step` counts decode steps since the start."""

    def __init__(self) -> None:
        self.ring = SlotRing()
        self.step = 0
        self.context_tokens = 0
        self._states: dict[int, RequestState] = {}
        self._ends: list[tuple[int, int]] = []
        self._private: list[tuple[int, int]] = []
        self._private_base: dict[int, int] = {}
        self._finish_sum = 0
        self._long_rows = 0
        self._joins = 0
        self._rows: NDArray[np.intp] | None = None

    def __len__(self) -> int:
        return len(self._states)

    @property
    def states(self) -> list[RequestState]:
        """Rows in the order in which they joined."""
        return list(self._states.values())

    def join(self, state: RequestState) -> None:
        """Add a prefilled row; its first token is out, so `remaining_output - 1` steps are left."""
        steps = state.remaining_output - 1
        # One column more than steps: an overlapped scheduler runs a finished row once more.
        state.row = self.ring.take_row(steps + 1, self.step)
        state.join_step = self.step
        state.finish_step = self.step + steps
        # A row that comes back after a retraction gets a new key, so its old heap entries are void.
        self._joins += 1
        key = state.join_key = self._joins
        self._states[key] = state
        if steps:  # a row of one token has ended already
            heapq.heappush(self._ends, (state.finish_step, key))
        self.context_tokens += state.fill_tokens
        self._finish_sum += state.finish_step
        self._long_rows += steps > CLIP_OUTPUT_TOKENS
        self._rows = None

    def set_private(self, state: RequestState, private_tokens: int) -> None:
        """Say how many tokens a row read alone when it joined; again when some become HOT."""
        base = state.join_step - private_tokens
        if self._private_base.get(state.join_key) != base:
            self._private_base[state.join_key] = base
            heapq.heappush(self._private, (base, state.join_key))

    def leave(self, state: RequestState) -> NDArray[np.int32]:
        """Remove a row; returns the slots of all its decode steps in order."""
        del self._states[state.join_key]
        self._private_base.pop(state.join_key, None)
        self.context_tokens -= state.fill_tokens + self.step - state.join_step
        self._finish_sum -= state.finish_step
        self._long_rows -= state.finish_step - state.join_step > CLIP_OUTPUT_TOKENS
        self._rows = None
        slots = self.ring.read(state.row, state.join_step, self.step)
        self.ring.give_row(state.row)
        return slots

    def advance(self, slots: NDArray[np.int32], steps: int) -> None:
        """Decode `steps` steps with `slots` (step-major, `[steps * rows]`)."""
        rows = self._rows
        if rows is None:
            states = self._states.values()
            rows = self._rows = np.fromiter((s.row for s in states), np.intp, len(states))
        self.ring.write(rows, self.step, slots.reshape(steps, len(rows)))
        self.step += steps
        self.context_tokens += steps * len(rows)

    def steps_to_next_end(self) -> int:
        """Decode steps until a row finishes, at least 1."""
        ends = self._ends
        while ends and ends[0][1] not in self._states:
            heapq.heappop(ends)
        return max(1, ends[0][0] - self.step) if ends else 1

    def pop_finished(self) -> list[RequestState]:
        """Rows whose last token is out now; they stay in the batch until `leave`."""
        ends, finished = self._ends, []
        while ends and ends[0][0] <= self.step:
            _, key = heapq.heappop(ends)
            state = self._states.get(key)
            if state is not None:
                finished.append(state)
        return finished

    def remaining_tokens(self) -> int:
        """Tokens that all rows have still to generate, each counted up to `CLIP_OUTPUT_TOKENS`."""
        if self._long_rows:
            step = self.step
            return sum(min(s.finish_step - step, CLIP_OUTPUT_TOKENS) for s in self._states.values())
        return self._finish_sum - self.step * len(self._states)

    def longest_private(self) -> int:
        """Private tokens of the longest row."""
        private = self._private
        while private and self._private_base.get(private[0][1]) != private[0][0]:
            heapq.heappop(private)
        return self.step - private[0][0] if private else 0
