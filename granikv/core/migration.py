"""Moving the HOT/COLD boundary: what has to move, and the fence that holds the region meanwhile."""

from dataclasses import dataclass

import numpy as np

from granikv.core.slots import ColdPool, FreeRuns, Slab, Slots


@dataclass(frozen=True, slots=True, eq=False)
class Migration:
    """What it takes to move the boundary from `old_hot_tokens` to `new_hot_tokens`.

    Attributes:
        old_hot_tokens: HOT size now.
        new_hot_tokens: HOT size wanted.
        src: int32 `[n]` ascending, held COLD slots that HOT wants (when HOT grows).
        dst: int32 `[n]` ascending, the lowest free COLD slots above the new boundary; empty when
            not feasible.
        blockers: slabs that overlap what HOT gives up (when HOT shrinks), by address; relocate or
            evict them before the move can finish.
        shortfall_tokens: free COLD slots missing above the new boundary.
    """

    old_hot_tokens: int
    new_hot_tokens: int
    src: Slots
    dst: Slots
    blockers: tuple[Slab, ...]
    shortfall_tokens: int

    @property
    def feasible(self) -> bool:
        """Whether the move can begin now."""
        return self.shortfall_tokens == 0

    @property
    def grows(self) -> bool:
        """Whether HOT gets larger."""
        return self.new_hot_tokens > self.old_hot_tokens

    def same_as(self, other: "Migration") -> bool:
        """Whether both plans are equal, slot by slot."""
        return (
            (self.old_hot_tokens, self.new_hot_tokens, self.blockers, self.shortfall_tokens)
            == (other.old_hot_tokens, other.new_hot_tokens, other.blockers, other.shortfall_tokens)
            and np.array_equal(self.src, other.src)
            and np.array_equal(self.dst, other.dst)
        )


def plan_growth(pool: ColdPool, hot_tokens: int, new_hot_tokens: int) -> Migration:
    """Plan to turn the COLD slots `hot_tokens + 1 .. new_hot_tokens` into HOT."""
    src = pool.held_slots(hot_tokens + 1, new_hot_tokens + 1)
    dst = pool.free_slots(new_hot_tokens + 1, pool.hi)
    shortfall = max(0, len(src) - len(dst))
    return Migration(
        hot_tokens,
        new_hot_tokens,
        src,
        dst[:0] if shortfall else dst[: len(src)],
        (),
        shortfall,
    )


def plan_shrink(slabs: list[Slab], hot_tokens: int, new_hot_tokens: int) -> Migration:
    """Plan to turn the HOT slots `new_hot_tokens + 1 .. hot_tokens` into COLD."""
    none = np.empty(0, np.int32)
    blockers = sorted((s for s in slabs if s.end > new_hot_tokens + 1), key=lambda s: s.base)
    return Migration(hot_tokens, new_hot_tokens, none, none, tuple(blockers), 0)


class GrowFence:
    """HOT grows: free COLD slots of the region and all targets are out of the free stack.

    A held slot of the region waits to be moved to its target by `next_piece`, or is freed by its
    holder, which releases the target.
    """

    def __init__(self, pool: ColdPool, migration: Migration) -> None:
        self._pool = pool
        self._src = migration.src
        self._dst = migration.dst
        self._cursor = 0
        self._lo = migration.old_hot_tokens + 1
        self._hi = migration.new_hot_tokens + 1
        self._reserved = len(self._dst)
        fenced = pool.free_slots(self._lo, self._hi)
        self._empty = len(fenced)
        pool.withdraw(np.concatenate((fenced, self._dst)))

    @property
    def fenced(self) -> int:
        """Slots that are neither free nor used: emptied region slots and targets in waiting."""
        return self._empty + self._reserved

    @property
    def finished(self) -> bool:
        """Whether nobody holds a slot of the region."""
        return self._empty == self._hi - self._lo

    def free(self, slots: Slots) -> None:
        """Take slots whose holder has just released them."""
        inside = slots < self._hi
        if not inside.any():
            self._pool.push(slots)
            return
        emptied = slots[inside]
        self._pool.push(slots[~inside])
        self._pool.push(self._dst[self._src.searchsorted(emptied)])
        self._empty += len(emptied)
        self._reserved -= len(emptied)

    def next_piece(self, max_tokens: int) -> tuple[Slots, Slots]:
        """Hand the next `max_tokens` pairs whose source is still held from source to target."""
        alive = self._cursor + np.flatnonzero(self._pool.is_held(self._src[self._cursor :]))
        piece = alive[:max_tokens]
        if len(piece) == 0:
            return self._src[:0], self._dst[:0]
        self._cursor = int(piece[-1]) + 1
        src, dst = self._src[piece], self._dst[piece]
        self._pool.transfer(src, dst)
        self._empty += len(piece)
        self._reserved -= len(piece)
        return src, dst

    def finish(self, runs: FreeRuns) -> None:
        """Give the emptied region to HOT."""
        self._pool.lo = self._hi
        if self._hi > self._lo:
            runs.give(self._lo, self._hi - self._lo)

    def abort(self) -> None:
        """Put region and targets in waiting back on the free stack, lowest slot on top."""
        waiting = self._cursor + np.flatnonzero(self._pool.is_held(self._src[self._cursor :]))
        region = np.arange(self._lo, self._hi, dtype=np.int32)
        back = np.concatenate((region[~self._pool.is_held(region)], self._dst[waiting]))
        self._pool.push(np.sort(back)[::-1])


class ShrinkFence:
    """HOT shrinks: what is free in the region, and what is freed there, no longer serves slabs."""

    def __init__(self, runs: FreeRuns, migration: Migration) -> None:
        self._runs = runs
        self._lo = migration.new_hot_tokens + 1
        self._hi = migration.old_hot_tokens + 1
        self._fence = FreeRuns(self._lo, self._hi)
        for base, length in runs.take_range(self._lo, self._hi):
            self._fence.give(base, length)

    @property
    def fenced(self) -> int:
        """Slots that are neither free nor used: the emptied part of the region."""
        return self._fence.total

    @property
    def finished(self) -> bool:
        """Whether no slab is left in the region."""
        return self._fence.total == self._hi - self._lo

    def give(self, base: int, length: int) -> None:
        """Take the slots of a freed slab: those in the region stay fenced, the rest is free."""
        below = min(max(self._lo - base, 0), length)
        if below:
            self._runs.give(base, below)
        if below < length:
            self._fence.give(base + below, length - below)

    def finish(self, pool: ColdPool) -> None:
        """Give the emptied region to COLD, lowest slot on top of the stack."""
        pool.lo = self._lo
        pool.push(np.arange(self._hi - 1, self._lo - 1, -1, dtype=np.int32))

    def abort(self) -> None:
        """Make the emptied part free for slabs again."""
        for base, length in self._fence:
            self._runs.give(base, length)
