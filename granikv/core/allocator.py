"""HotColdAllocator: who owns which KV slot, with a movable boundary between HOT and COLD."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from granikv.core.errors import IntegrityError
from granikv.core.migration import (
    GrowFence,
    Migration,
    ShrinkFence,
    plan_growth,
    plan_shrink,
)
from granikv.core.slots import ColdPool, Fit, FreeRuns, Slab, Slots

__all__ = ["HotColdAllocator", "Migration", "PoolStats", "Slab", "Slots"]


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Where every slot is; the five token counts sum to `size_tokens`."""

    size_tokens: int
    hot_tokens: int
    hot_used: int
    hot_free: int
    cold_used: int
    cold_free: int
    fenced: int
    largest_free_run: int
    free_runs: int
    slabs: int


class HotColdAllocator:
    """Owner of the slots of one KV tensor: HOT = slots `1 .. hot_tokens`, COLD = the rest.

    Slot 0 is the engine's padding slot and belongs to nobody. HOT is given out as slabs (slots in a
    row), COLD as single slots. Running out is a return value: None means "not now".

    While the boundary moves, slots of the region in between that nobody uses are fenced; at every
    moment `hot_free + hot_used + cold_free + cold_used + fenced == size_tokens`. A slab in the
    region counts as `hot_used` and a held slot there as `cold_used`, whichever way it moves.
    """

    def __init__(self, size_tokens: int, hot_tokens: int, fit: Fit = "first") -> None:
        if not 0 <= hot_tokens < size_tokens < np.iinfo(np.int32).max:
            raise ValueError(
                "hot_tokens must be at least 0 and less than size_tokens,"
                f" got hot_tokens {hot_tokens} and size_tokens {size_tokens}"
            )
        if fit not in ("first", "best"):
            raise ValueError(f"fit must be 'first' or 'best', got {fit!r}")
        self.size_tokens = size_tokens
        self.hot_tokens = hot_tokens
        self.hot_used = 0
        self._fit: Fit = fit
        self._runs = FreeRuns(1, size_tokens + 1)
        if hot_tokens:
            self._runs.give(1, hot_tokens)
        self._pool = ColdPool(hot_tokens + 1, size_tokens + 1)
        self._lengths: dict[int, int] = {}
        self._grow: GrowFence | None = None
        self._shrink: ShrinkFence | None = None
        self._move: Migration | None = None

    @property
    def hot_free(self) -> int:
        """Tokens that slabs could still take, if fragmentation allows."""
        return self._runs.total

    @property
    def cold_free(self) -> int:
        """Tokens that `alloc_cold` can give now."""
        return self._pool.available

    @property
    def cold_used(self) -> int:
        """Tokens held one by one."""
        return self._pool.used

    @property
    def fenced(self) -> int:
        """Tokens that a boundary move keeps away from both sides."""
        if self._grow is not None:
            return self._grow.fenced
        return self._shrink.fenced if self._shrink is not None else 0

    @property
    def largest_free_run(self) -> int:
        """Longest slab that `reserve_slab` can give now."""
        return self._runs.largest

    @property
    def move(self) -> Migration | None:
        """The boundary move that is under way."""
        return self._move

    @property
    def slab_limit_tokens(self) -> int:
        """Last slot that a new slab may use: less than `hot_tokens` while HOT shrinks."""
        return min(self.hot_tokens, self._move.new_hot_tokens) if self._move else self.hot_tokens

    def can_reserve(self, n: int) -> bool:
        """Whether `reserve_slab(n)` would succeed."""
        return 0 < n <= self._runs.largest

    def reserve_slab(self, n: int, below: int | None = None) -> Slab | None:
        """Take a free run of `n` HOT slots, entirely below slot `below` if that is given.

        Raises:
            ValueError: `n` is not positive.
        """
        base = self._runs.take(n, self._fit, below)
        if base is None:
            return None
        self.hot_used += n
        self._lengths[base] = n
        return Slab(base, n)

    def free_slab(self, slab: Slab) -> None:
        """Give a slab back.

        Raises:
            ValueError: the slab is not one that this allocator has given out, or is free already.
        """
        self._check_known(slab)
        del self._lengths[slab.base]
        self._give_hot(slab.base, slab.length)

    def split_slab(self, slab: Slab, left: int) -> tuple[Slab, Slab]:
        """Make two adjacent slabs of one: the first `left` slots, and the rest.

        Raises:
            ValueError: the slab is unknown, or `left` is not inside it.
        """
        self._check_known(slab)
        if not 0 < left < slab.length:
            raise ValueError(f"left must be in 1..{slab.length - 1}, got {left}")
        lower = Slab(slab.base, left)
        upper = Slab(slab.base + left, slab.length - left)
        self._lengths[lower.base] = lower.length
        self._lengths[upper.base] = upper.length
        return lower, upper

    def shrink_slab(self, slab: Slab, length: int) -> Slab:
        """Keep the first `length` slots of a slab and free its tail.

        Raises:
            ValueError: the slab is unknown, or `length` is not in 1..slab.length.
        """
        self._check_known(slab)
        if not 0 < length <= slab.length:
            raise ValueError(f"length must be in 1..{slab.length}, got {length}")
        if length == slab.length:
            return slab
        self._lengths[slab.base] = length
        self._give_hot(slab.base + length, slab.length - length)
        return Slab(slab.base, length)

    def owns(self, slab: Slab) -> bool:
        """Whether this exact slab is in use."""
        return self._lengths.get(slab.base) == slab.length

    def gaps_around(self, slabs: list[Slab]) -> tuple[list[int], list[int]]:
        """Free HOT slots directly before and directly after each slab."""
        return self._runs.gaps([slab.base for slab in slabs], [slab.end for slab in slabs])

    def can_alloc_cold(self, n: int) -> bool:
        """Whether `alloc_cold(n)` would succeed."""
        return 0 <= n <= self._pool.available

    def alloc_cold(self, n: int) -> Slots | None:
        """Take `n` COLD slots, int32 `[n]`; `a + b` at once are the same slots as `a`, then `b`.

        Raises:
            ValueError: `n` is negative.
        """
        return self._pool.alloc(n)

    def free_cold(self, slots: ArrayLike) -> None:
        """Give COLD slots back; while HOT grows, a slot in its way is fenced instead of free.

        Raises:
            ValueError: a slot is not held or comes twice; nothing has changed then.
        """
        if self._grow is None:
            self._pool.free(slots)
        else:
            self._grow.free(self._pool.release(slots))

    def plan_move(self, hot_tokens: int) -> Migration:
        """What moving the boundary to `hot_tokens` takes; changes nothing.

        Raises:
            ValueError: `hot_tokens` is not in 0..size_tokens - 1, or a move is under way.
        """
        if not 0 <= hot_tokens < self.size_tokens:
            raise ValueError(f"hot_tokens must be in 0..{self.size_tokens - 1}, got {hot_tokens}")
        if self._move is not None:
            raise ValueError(
                f"only one move at a time: the move to {self._move.new_hot_tokens} is under way"
            )
        if hot_tokens >= self.hot_tokens:
            return plan_growth(self._pool, self.hot_tokens, hot_tokens)
        return plan_shrink(self._slabs(), self.hot_tokens, hot_tokens)

    def begin_move(self, migration: Migration) -> None:
        """Fence the region between the boundaries, so that it only empties from now on.

        Raises:
            ValueError: the plan is not feasible or is stale, or a move is under way.
        """
        now = self.plan_move(migration.new_hot_tokens)
        if not migration.same_as(now):
            raise ValueError("migration must be a plan of the present state, got a stale one")
        if not migration.feasible:
            raise ValueError(
                f"migration must be feasible, got one short of {migration.shortfall_tokens} tokens"
            )
        self._move = migration
        if migration.new_hot_tokens >= self.hot_tokens:
            self._grow = GrowFence(self._pool, migration)
        else:
            self._shrink = ShrinkFence(self._runs, migration)

    def next_piece(self, max_tokens: int) -> tuple[Slots, Slots]:
        """Hand at most `max_tokens` slots over from source to target, two int32 arrays `[n]`.

        The caller copies their KV and remaps every holder before it calls the allocator again.
        Both are empty when nothing is left to move.

        Raises:
            ValueError: no move is under way, or `max_tokens` is not positive.
        """
        migration = self._need_move()
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be positive, got {max_tokens}")
        if self._grow is None:
            return migration.src, migration.dst
        return self._grow.next_piece(max_tokens)

    def can_finish_move(self) -> bool:
        """Whether a move is under way and nothing is left in its region."""
        if self._grow is not None:
            return self._grow.finished
        return self._shrink is not None and self._shrink.finished

    def finish_move(self) -> None:
        """Change the boundary; the region's slots join their new side.

        Raises:
            ValueError: no move is under way, or its region is still in use.
        """
        migration = self._need_move()
        if not self.can_finish_move():
            raise ValueError("finish_move must wait until can_finish_move")
        if self._grow is not None:
            self._grow.finish(self._runs)
        elif self._shrink is not None:
            self._shrink.finish(self._pool)
        self.hot_tokens = migration.new_hot_tokens
        self._grow = self._shrink = self._move = None

    def abort_move(self) -> None:
        """Take the fences down and keep the old boundary; slots moved so far stay where they are.

        Raises:
            ValueError: no move is under way.
        """
        self._need_move()
        if self._grow is not None:
            self._grow.abort()
        elif self._shrink is not None:
            self._shrink.abort()
        self._grow = self._shrink = self._move = None

    def stats(self) -> PoolStats:
        """Count everything."""
        return PoolStats(
            size_tokens=self.size_tokens,
            hot_tokens=self.hot_tokens,
            hot_used=self.hot_used,
            hot_free=self.hot_free,
            cold_used=self.cold_used,
            cold_free=self.cold_free,
            fenced=self.fenced,
            largest_free_run=self.largest_free_run,
            free_runs=self._runs.count,
            slabs=len(self._lengths),
        )

    def check_integrity(self) -> None:
        """Check that every slot has exactly one owner.

        Raises:
            IntegrityError: the invariant that does not hold.
        """
        self._runs.check_integrity()
        self._pool.check_integrity()
        end = 1
        for base, length in sorted([*self._lengths.items(), *self._runs]):
            if base < end:
                raise IntegrityError(f"slabs and free runs must be disjoint, got overlap at {base}")
            end = base + length
        if end > self.hot_tokens + 1:
            raise IntegrityError(f"slabs must end at or before {self.hot_tokens}, got {end - 1}")
        if sum(self._lengths.values()) != self.hot_used:
            raise IntegrityError(f"sum of slabs == hot_used ({self.hot_used}) must hold")
        if self._pool.lo != self.hot_tokens + 1:
            raise IntegrityError(f"COLD must start at {self.hot_tokens + 1}, got {self._pool.lo}")
        total = self.hot_free + self.hot_used + self.cold_free + self.cold_used + self.fenced
        if total != self.size_tokens:
            raise IntegrityError(
                "hot_free + hot_used + cold_free + cold_used + fenced == size_tokens must hold,"
                f" got {total} and {self.size_tokens}: {self.stats()}"
            )

    def _slabs(self) -> list[Slab]:
        return [Slab(base, length) for base, length in self._lengths.items()]

    def _check_known(self, slab: Slab) -> None:
        if self._lengths.get(slab.base) != slab.length:
            raise ValueError(f"slab must be one that is in use, got {slab}")

    def _give_hot(self, base: int, length: int) -> None:
        self.hot_used -= length
        if self._shrink is None:
            self._runs.give(base, length)
        else:
            self._shrink.give(base, length)

    def _need_move(self) -> Migration:
        if self._move is None:
            raise ValueError("a move must be under way, got none")
        return self._move
