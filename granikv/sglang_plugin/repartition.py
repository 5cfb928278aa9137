"""Repartitioning of a live server: a policy looks at intervals, moves happen between two steps.

Nothing here is done for a static split. Under tensor parallelism every rank must ask at the same
step: rank 0's clock is the one that counts.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.plugins.hook_registry import HookType

from granikv.core.boundary import Boundary
from granikv.core.lookout import Load, Lookout
from granikv.core.policies import make_policy
from granikv.core.repartition import RepartitionPolicy, StaticPolicy, Window
from granikv.sglang_plugin.admin import limit_requests
from granikv.sglang_plugin.config import LiveConfig
from granikv.sglang_plugin.holders import ServerHolders
from granikv.sglang_plugin.hooks import Hook
from granikv.sglang_plugin.pools import context_tokens
from granikv.sglang_plugin.promotion import (
    bytes_per_slot,
    live_requests,
    promote_read,
    promote_ready,
    with_rows,
)
from granikv.sglang_plugin.radix_cache import GraniRadixCache
from granikv.sglang_plugin.step_plan import shared_tables

logger = logging.getLogger(__name__)

_CALLS_PER_BROADCAST = 16  # of the clock, which all ranks of a tensor-parallel server wait for


class LiveRepartitioner:
    """One scheduler's boundary.

    Args:
        scheduler: right after its `__init__`, its tree a `GraniRadixCache`.
        settings: of this process.

    Attributes:
        moves: times that the boundary has moved.
        moved_tokens: tokens copied by moves and compaction.
        steps: steps that had to wait for a piece of a move.
        busy_ns: host time between steps that moves took.
        cold_refusals: times that the first queued request found no room in COLD; whoever sees one
            counts it here.
        retractions: requests that lost their row; likewise.

    Raises:
        ConfigError: there is no such policy.
    """

    def __init__(self, scheduler: Any, settings: LiveConfig) -> None:
        self.moves = 0
        self.moved_tokens = 0
        self.steps = 0
        self.busy_ns = 0
        self.cold_refusals = 0
        self.retractions = 0
        self._scheduler = scheduler
        self._tree: GraniRadixCache = scheduler.tree_cache
        self._allocator = self._tree.token_to_kv_pool_allocator
        self._settings = settings
        self._now_s = _make_clock(scheduler)
        self._next_look_s = 0.0
        self.choose(settings.repartition)

    @property
    def moved_bytes(self) -> int:
        """KV of the tokens copied."""
        return self.moved_tokens * bytes_per_slot(self._allocator.get_kvcache())

    def choose(self, repartition: str) -> None:
        """Follow another policy from now on.

        Raises:
            ConfigError: there is no such policy.
        """
        self._repartition = repartition
        self._renew()

    def _renew(self) -> None:
        """Begin anew, as after SGLang's flush, which makes new pools."""
        self._core = self._allocator.core
        self._boundary = Boundary(
            self._core,
            self._allocator.directory,
            ServerHolders(self._scheduler),
            self._settings.move_tokens_per_step,
        )
        self._lookout = Lookout(self._core, self._allocator.directory)
        self._policy: RepartitionPolicy = make_policy(self._repartition)
        self.cold_refusals = self.retractions = 0

    def between_steps(self) -> None:
        """Do this step's share of a move, or ask the policy when it is time."""
        if isinstance(self._policy, StaticPolicy):
            return
        if self._core is not self._allocator.core:
            self._renew()
            limit_requests(self._scheduler)
        if self._boundary.is_moving or self._is_set_out():
            begin_ns = time.perf_counter_ns()
            self._advance()
            self.steps += 1
            self.busy_ns += time.perf_counter_ns() - begin_ns

    def _advance(self) -> None:
        boundary = self._boundary
        moves = boundary.moves
        self.moved_tokens += boundary.advance()
        if boundary.moves > moves:
            self.moves += 1
            logger.info("GraniKV: HOT has %d tokens now", self._core.hot_tokens)
        if not boundary.is_moving:
            self._tree.end_region()
            limit_requests(self._scheduler)
        if boundary.moves > moves:
            promote_read(self._scheduler)

    def _is_set_out(self) -> bool:
        """Whether it was time to look, and a move begins."""
        scheduler, now_s = self._scheduler, self._now_s()
        is_idle = not scheduler.running_batch.reqs and not scheduler.waiting_queue
        if now_s is None or now_s < self._next_look_s or is_idle:
            return False
        self._next_look_s = now_s + self._settings.policy_interval_s
        self._boundary.steer(self._policy, self._window(now_s), self._all_fit)
        if self._boundary.is_moving:
            limit_requests(scheduler)  # what comes during the move must fit behind it
        return self._boundary.is_moving

    def _all_fit(self, cold_tokens: int) -> bool:
        """Whether every request inside could still run with so much COLD."""
        inside = [*live_requests(self._scheduler), *self._scheduler.waiting_queue]
        ends = (
            len(req.origin_input_ids) + (req.sampling_params.max_new_tokens or 0) for req in inside
        )
        return max(ends, default=0) <= cold_tokens - 2

    def _promised_tokens(self) -> int:
        """What a prompt in chunks has still to take: SGLang ends the server that has not got it."""
        req = self._scheduler.chunked_req
        return 0 if req is None else len(req.full_untruncated_fill_ids) - req.extend_range.end

    def _window(self, now_s: float) -> Window:
        batch = self._scheduler.running_batch
        segments = shared_tables(self._tree, with_rows(batch.reqs), least_rows=2).segments
        private = (context_tokens(batch) if batch.reqs else 0) - sum(
            segment.rows * segment.length for segment in segments
        )
        waiting = self._scheduler.waiting_queue
        load = Load(
            cold_evictable=int(self._tree.evictable_size()),
            cold_promised=self._promised_tokens(),
            cold_waiting_tokens=sum(len(req.origin_input_ids) for req in waiting),
            private_tokens=private,
            cold_refusals=self.cold_refusals,
            retractions=self.retractions,
            segments=segments,
        )
        return self._lookout.look(now_s, load)


def between_steps(scheduler: Any, *_: Any, **__: Any) -> None:
    """Before `Scheduler.get_next_batch_to_run`: everything that moves KV.

    Args:
        scheduler: SGLang's, whose tree is a `GraniRadixCache` or not ours to touch.
    """
    tree = scheduler.tree_cache
    if not isinstance(tree, GraniRadixCache):
        return
    promote_ready(scheduler)
    if tree.repartitioner is not None:
        tree.repartitioner.between_steps()


def _after_init(_result: None, scheduler: Any, *_: Any, **__: Any) -> None:
    """After `Scheduler.__init__`.

    Raises:
        ConfigError: there is no such policy.
    """
    if isinstance(scheduler.tree_cache, GraniRadixCache):
        settings = LiveConfig.from_environment()
        scheduler.tree_cache.repartitioner = LiveRepartitioner(scheduler, settings)


def _after_add_one_req(result: AddReqResult, adder: Any, *_: Any, **__: Any) -> None:
    """After `PrefillAdder.add_one_req`: the first queued request may have found no room."""
    if result == AddReqResult.NO_TOKEN and (ours := _repartitioner_of(adder.tree_cache)):
        ours.cold_refusals += 1


def _after_retract_decode(
    result: tuple[list[Any], float, list[Any]], batch: Any, *_: Any, **__: Any
) -> None:
    """After `ScheduleBatch.retract_decode`."""
    if ours := _repartitioner_of(batch.tree_cache):
        ours.retractions += len(result[0])


def _repartitioner_of(tree: Any) -> LiveRepartitioner | None:
    return tree.repartitioner if isinstance(tree, GraniRadixCache) else None


def _make_clock(scheduler: Any) -> Callable[[], float | None]:
    """Seconds; under tensor parallelism rank 0's, and None between the steps that ask for them."""
    if scheduler.ps.tp_size == 1:
        return time.monotonic
    group, calls = scheduler.tp_cpu_group, 0

    def now_s() -> float | None:
        nonlocal calls
        calls += 1
        if calls % _CALLS_PER_BROADCAST:
            return None
        seconds = torch.tensor([time.monotonic()], dtype=torch.float64)
        first = torch.distributed.get_global_rank(group, 0)
        torch.distributed.broadcast(seconds, src=first, group=group)
        return float(seconds)

    return now_s


_MANAGERS = "sglang.srt.managers"
HOOKS: tuple[Hook, ...] = (
    (f"{_MANAGERS}.scheduler.Scheduler.__init__", _after_init, HookType.AFTER),
    (
        f"{_MANAGERS}.schedule_policy.PrefillAdder.add_one_req",
        _after_add_one_req,
        HookType.AFTER,
    ),
    (
        f"{_MANAGERS}.schedule_batch.ScheduleBatch.retract_decode",
        _after_retract_decode,
        HookType.AFTER,
    ),
    (f"{_MANAGERS}.scheduler.Scheduler.get_next_batch_to_run", between_steps, HookType.BEFORE),
)
