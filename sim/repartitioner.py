"""Repartitioner: asks the RepartitionPolicy at intervals and moves the boundary piece by piece.

Growing HOT evicts cached COLD tokens until the rest fits behind the new boundary, and relocates
what is in the way; shrinking evicts the idle slabs in the way and ends above the highest one that
is in use. No step copies more than a budget, and no request is dropped.
"""

from collections import Counter

import numpy as np

from granikv.core.errors import ConfigError
from granikv.core.migration import Migration
from granikv.core.policies import make_policy
from granikv.core.repartition import RepartitionPolicy, StaticPolicy, Window
from granikv.sim.config import RETRACT_DECODE_STEPS, ServerConfig
from granikv.sim.pools import Pools
from granikv.sim.scheduler import Scheduler

# Copying less than this at a time is not worth a move.
_SMALLEST_GROWTH = 1024


class Repartitioner:
    """One replica's boundary: the policy decides, the allocator plans, this carries out."""

    def __init__(self, config: ServerConfig, pools: Pools) -> None:
        self.moved_tokens = 0
        self.moves = 0
        self.next_look_ns = int(config.policy_interval_s * 1e9)
        self._pools = pools
        # A stock engine has no HOT to move.
        self._policy: RepartitionPolicy = (
            StaticPolicy() if config.is_stock else make_policy(config.repartition)
        )
        self._budget_tokens = config.move_tokens_per_step
        self._interval_ns = self.next_look_ns
        self._seen_misses: Counter[str] = Counter()
        self._seen = (0, 0, 0, 0)
        self._goal: int | None = None

    @property
    def is_active(self) -> bool:
        """Whether the policy ever moves: a static one need not be asked."""
        return not isinstance(self._policy, StaticPolicy)

    @property
    def is_moving(self) -> bool:
        """Whether a move is under way."""
        return self._pools.allocator.move is not None

    def advance(self, now_ns: int, scheduler: Scheduler, retractions: int) -> int:
        """Do this boundary's share of a move, or ask the policy; returns the tokens copied."""
        if self.is_moving:
            return self._move_piece(scheduler, now_ns / 1e9)
        if not self.is_active:
            return 0
        if now_ns >= self.next_look_ns:
            # Nothing happens in an idle server, so looks that fell into an idle time are left out.
            self.next_look_ns = (now_ns // self._interval_ns + 1) * self._interval_ns
            self._goal = self._policy.observe(self._window(now_ns / 1e9, scheduler, retractions))
        if self._goal is None or self._goal == self._pools.allocator.hot_tokens:
            return 0
        return self._begin(self._goal, scheduler, now_ns / 1e9)

    def _begin(self, hot_tokens: int, scheduler: Scheduler, now_s: float) -> int:
        allocator = self._pools.allocator
        if not isinstance(hot_tokens, int) or not 0 <= hot_tokens < allocator.size_tokens:
            raise ConfigError(
                f"The repartition policy asked for {hot_tokens} HOT tokens; it must ask for a whole"
                f" number from 0 to {allocator.size_tokens - 1}, or return None."
            )
        # Requests that were let in under the old boundary must still fit.
        if not scheduler.all_fit(allocator.size_tokens - hot_tokens):
            return 0
        migration = self._plan(hot_tokens)
        if migration is None:
            return 0
        allocator.begin_move(migration)
        return self._move_piece(scheduler, now_s)

    def _plan(self, hot_tokens: int) -> Migration | None:
        """The move to `hot_tokens`, or as near as it can end; None when it cannot begin."""
        allocator = self._pools.allocator
        growth = hot_tokens - allocator.hot_tokens
        if growth > 0:
            # As many free slots as the region is long: then what is held there fits behind it.
            room = allocator.cold_free + self._pools.index.evictable_tokens
            room -= len(self._pools.batch) * RETRACT_DECODE_STEPS
            if room < min(growth, _SMALLEST_GROWTH):
                return None
            growth = min(growth, room)
            self._pools.index.ensure_cold(growth)
            return allocator.plan_move(allocator.hot_tokens + growth)
        self._goal = None
        # A fence around a slab that is in use would withhold its surroundings for as long as that.
        lowest = self._pools.directory.highest_slot_in_use()
        if lowest >= allocator.hot_tokens:
            return None
        return allocator.plan_move(max(hot_tokens, lowest))

    def _move_piece(self, scheduler: Scheduler, now_s: float) -> int:
        pools, allocator = self._pools, self._pools.allocator
        src, dst = allocator.next_piece(self._budget_tokens)
        if len(src):
            moved = np.arange(allocator.size_tokens + 1, dtype=np.int32)
            moved[src] = dst
            pools.remap(moved)
            self.moved_tokens += len(src)
        migration = allocator.move
        if migration is not None:
            for node, is_locked in pools.directory.blocked_by(migration):
                if not is_locked and pools.index.is_hot_cached(node):
                    pools.index.evict_hot(node)
        copied = len(src)
        if migration is not None and allocator.can_finish_move():
            allocator.finish_move()
            self.moves += 1
            # COLD has tokens that nobody left behind: neither a shrink nor a copy into HOT is a row
            # that ends, which alone opens admission.
            scheduler.is_full = False
            if migration.grows and pools.placement is not None:
                copied += pools.placement.promote_read(pools.batch.states, now_s)
        return copied

    def _window(self, now_s: float, scheduler: Scheduler, retractions: int) -> Window:
        pools = self._pools
        allocator, directory = pools.allocator, pools.directory
        misses = Counter(directory.misses)
        now = (
            directory.hot_miss_tokens,
            directory.evictions,
            scheduler.cold_refusals,
            retractions,
        )
        since = [a - b for a, b in zip(now, self._seen, strict=True)]
        segments = pools.groups.segments()
        window = Window(
            now_s=now_s,
            size_tokens=allocator.size_tokens,
            hot_tokens=allocator.hot_tokens,
            hot_used=allocator.hot_used,
            hot_free=allocator.hot_free,
            hot_idle=directory.idle_tokens,
            largest_free_run=allocator.largest_free_run,
            cold_used=allocator.cold_used,
            cold_free=allocator.cold_free,
            cold_evictable=pools.index.evictable_tokens,
            cold_waiting_tokens=sum(s.fill_tokens for s in scheduler.waiting),
            hot_misses=dict(misses - self._seen_misses),
            hot_miss_tokens=since[0],
            evictions=since[1],
            cold_refusals=since[2],
            retractions=since[3],
            private_tokens=pools.batch.context_tokens - pools.groups.shared_tokens,
            rows_per_slab=tuple((s.length, s.rows) for s in segments if s.base),
            rows_per_cold_run=tuple((s.length, s.rows) for s in segments if not s.base),
        )
        self._seen_misses, self._seen = misses, now
        return window
