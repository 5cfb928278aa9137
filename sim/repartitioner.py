"""Repartitioner: asks the RepartitionPolicy at intervals and moves the boundary piece by piece.

Growing HOT relocates the COLD tokens in the way, shrinking waits for slabs in the way to become
idle and evicts them; no step copies more than a budget, and no request is dropped.
"""

from collections import Counter

import numpy as np

from granikv.core.errors import ConfigError
from granikv.core.repartition import StaticPolicy, Window, make_policy
from granikv.sim.config import ServerConfig
from granikv.sim.pools import Pools
from granikv.sim.scheduler import Scheduler


class Repartitioner:
    """One replica's boundary: the policy decides, the allocator plans, this carries out."""

    def __init__(self, config: ServerConfig, pools: Pools) -> None:
        self.moved_tokens = 0
        self.moves = 0
        self.next_look_ns = int(config.policy_interval_s * 1e9)
        self._pools = pools
        self._policy = make_policy(config.repartition)
        self._budget_tokens = config.move_tokens_per_step
        self._interval_ns = self.next_look_ns
        self._seen_misses: Counter[str] = Counter()
        self._seen = (0, 0, 0)

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
            return self._move_piece()
        if not self.is_active or now_ns < self.next_look_ns:
            return 0
        # Nothing happens in an idle server, so looks that fell into an idle time are left out.
        self.next_look_ns = (now_ns // self._interval_ns + 1) * self._interval_ns
        target = self._policy.observe(self._window(now_ns / 1e9, scheduler, retractions))
        if target is None or target == self._pools.allocator.hot_tokens:
            return 0
        return self._begin(target, scheduler)

    def _begin(self, hot_tokens: int, scheduler: Scheduler) -> int:
        allocator = self._pools.allocator
        if not 0 <= hot_tokens < allocator.size_tokens:
            raise ConfigError(
                f"The repartition policy asked for {hot_tokens} HOT tokens; it must stay within 0 "
                f"and {allocator.size_tokens - 1}."
            )
        # Requests that were let in under the old boundary must still fit.
        if not scheduler.all_fit(allocator.size_tokens - hot_tokens):
            return 0
        migration = allocator.plan_move(hot_tokens)
        if not migration.feasible:
            return 0
        allocator.begin_move(migration)
        return self._move_piece()

    def _move_piece(self) -> int:
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
        if allocator.can_finish_move():
            allocator.finish_move()
            self.moves += 1
        return len(src)

    def _window(self, now_s: float, scheduler: Scheduler, retractions: int) -> Window:
        pools = self._pools
        allocator, directory = pools.allocator, pools.directory
        misses = Counter(directory.misses)
        now = (directory.hot_miss_tokens, directory.evictions, retractions)
        since = [a - b for a, b in zip(now, self._seen, strict=True)]
        window = Window(
            now_s=now_s,
            size_tokens=allocator.size_tokens,
            hot_tokens=allocator.hot_tokens,
            hot_used=allocator.hot_used,
            hot_free=allocator.hot_free,
            largest_free_run=allocator.largest_free_run,
            cold_used=allocator.cold_used,
            cold_free=allocator.cold_free,
            cold_waiting_tokens=sum(s.fill_tokens for s in scheduler.waiting),
            hot_misses=dict(misses - self._seen_misses),
            hot_miss_tokens=since[0],
            evictions=since[1],
            retractions=since[2],
            rows_per_slab=tuple((s.length, s.rows) for s in pools.groups.segments() if s.base),
        )
        self._seen_misses, self._seen = misses, now
        return window
