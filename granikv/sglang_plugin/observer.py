"""What a server with our backends says about itself: run records, metrics and a line beside each
decode log.

One `Observer` a process. Its hooks do nothing where the scheduler's tree is not ours.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from granikv.sglang_plugin.attention import GraniAttnBackend
from granikv.sglang_plugin.config import LiveConfig
from granikv.sglang_plugin.hooks import Hook
from granikv.sglang_plugin.metrics import PoolMetrics, StepCounts
from granikv.sglang_plugin.pools import HotColdPools
from granikv.sglang_plugin.radix_cache import GraniRadixCache
from granikv.sglang_plugin.step_check import StepCheck
from granikv.sglang_plugin.step_plan import PlannedStep
from granikv.sglang_plugin.watch import SCHEDULER, StepHooks, WatchedServer

_PUBLISH_S = 1.0

logger = logging.getLogger(__name__)


class _Server(WatchedServer):
    """What is watched, and who wants to know."""

    pools: HotColdPools

    def __init__(self, scheduler: Any) -> None:
        backend = scheduler.tp_worker.model_runner.attn_backend
        self._decode = backend.decode_backend if isinstance(backend, GraniAttnBackend) else None
        settings = LiveConfig.from_environment()
        pools = HotColdPools(scheduler.tree_cache, self._last_step)
        super().__init__(scheduler, pools, settings, settings.record)
        self._counts = StepCounts()
        context = scheduler.metrics_collector_context
        self._metrics = (
            PoolMetrics(context.collector) if context.current_scheduler_metrics_enabled else None
        )
        self._published_s = time.monotonic()
        self._planned_before = (0, 0)

    def run(self, launch: Callable[[], Any], batch: Any) -> Any:
        """Launch a step; what it returns."""
        result = super().run(launch, batch)
        if self._metrics is not None and batch.forward_mode.is_decode():
            step = self._last_step()
            if step is not None:
                self._counts.add(step)
        return result

    def processed(self, batch: Any) -> None:
        """A step's result is on the host."""
        super().processed(batch)
        self._publish_if_due()

    def idle(self) -> None:
        """No step is under way."""
        super().idle()
        self._publish_if_due()

    def state(self) -> dict[str, Any]:
        """Pools now, and totals since the start, as plain values."""
        core, tree = self.tree.token_to_kv_pool_allocator.core, self.tree
        misses, evictions, retractions, _ = self.pools.totals()
        steps, plan_ns = self._planned()
        check = self._check()
        return {
            "hot_tokens": core.hot_tokens,
            "hot_used_tokens": core.hot_used,
            "cold_free_tokens": core.cold_free,
            "hot_misses": misses,
            "evictions": evictions,
            "retractions": retractions,
            "promotions": tree.promotions,
            "promoted_tokens": tree.promoted_tokens,
            **self._moves(),
            "decode_steps": steps,
            "plan_us": plan_ns / 1e3 / max(steps, 1),
            "checked_steps": 0 if check is None else check.steps,
            "check_failures": 0 if check is None else check.failures,
            "check_largest_error": 0.0 if check is None else check.largest_error,
        }

    def line(self) -> str:
        """The state of the pools, and how the last decode step ran."""
        core = self.tree.token_to_kv_pool_allocator.core
        misses, *_ = self.pools.totals()
        step = self._last_step()
        return (
            f"GraniKV: HOT {core.hot_used}/{core.hot_tokens} "
            f"(largest free run {core.largest_free_run}), COLD free {core.cold_free}, "
            f"HOT misses {misses}, promoted tokens {self.tree.promoted_tokens}, "
            f"last step: {'not planned' if step is None else _words(step)}, "
            f"planning {self._plan_us():.0f} us a step"
        )

    def _plan_us(self) -> float:
        """Host time of planning a decode step, since the line before."""
        steps, ns = self._planned()
        steps_before, ns_before = self._planned_before
        self._planned_before = (steps, ns)
        return (ns - ns_before) / 1e3 / max(steps - steps_before, 1)

    def _planned(self) -> tuple[int, int]:
        decode = self._decode
        return (0, 0) if decode is None else (decode.planned_steps, decode.planned_ns)

    def _last_step(self) -> PlannedStep | None:
        return None if self._decode is None else self._decode.last_step

    def _check(self) -> StepCheck | None:
        return None if self._decode is None else self._decode.check

    def _publish_if_due(self) -> None:
        now_s = time.monotonic()
        if self._metrics is None or now_s - self._published_s < _PUBLISH_S:
            return
        self._published_s = now_s
        check = self._check()
        totals = {
            "evictions": self.tree.evicted_nodes,
            "promotions": self.tree.promotions,
            "promoted_tokens": self.tree.promoted_tokens,
            **self._moves(),
            "plan_seconds": self._planned()[1] / 1e9,
            "check_failures": 0 if check is None else check.failures,
        }
        stats = self.tree.token_to_kv_pool_allocator.core.stats()
        self._metrics.publish(stats, self.pools.misses(), totals, self._counts)

    def _moves(self) -> dict[str, float]:
        ours = self.tree.repartitioner
        if ours is None:
            return {}
        return {
            "moves": ours.moves,
            "moved_bytes": ours.moved_bytes,
            "move_steps": ours.steps,
            "move_seconds": ours.busy_ns / 1e9,
        }


class Observer(StepHooks[_Server]):
    """Hooks that watch the scheduler of this process."""

    def after_init(self, _result: None, scheduler: Any, *_: Any, **__: Any) -> None:
        """After `Scheduler.__init__`: begin to watch.

        Raises:
            ConfigError: the folder of `GRANIKV_RECORD` cannot be used.
        """
        if isinstance(scheduler.tree_cache, GraniRadixCache):
            self._server = _Server(scheduler)

    def after_report_decode_stats(self, _result: None, reporter: Any, *_: Any, **__: Any) -> None:
        """After `SchedulerMetricsReporter.report_decode_stats`: our line beside SGLang's."""
        is_due = reporter.forward_ct_decode % reporter.decode_log_interval == 0
        if is_due and reporter.is_stats_logging_rank:
            server = self._of_tree(reporter.scheduler.tree_cache)
            if server is not None:
                logger.info(server.line())

    def after_get_internal_state(self, result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
        """After `Scheduler.get_internal_state`: what `/server_info` says of us."""
        if server := self._of_tree(scheduler.tree_cache):
            result.internal_state["granikv"] = server.state()

    def hooks(self) -> tuple[Hook, ...]:
        """Those of every recording, and those of what a server says."""
        return (
            *super().hooks(),
            (f"{SCHEDULER}.get_internal_state", self.after_get_internal_state, HookType.AFTER),
            (
                "sglang.srt.managers.scheduler_components.metrics_reporter"
                ".SchedulerMetricsReporter.report_decode_stats",
                self.after_report_decode_stats,
                HookType.AFTER,
            ),
        )


def _words(step: PlannedStep) -> str:
    modes = Counter(mode.name.lower() for mode in step.plan.modes)
    segments = " + ".join(f"{count} {mode}" for mode, count in modes.items())
    return f"{segments or 'nothing shared'}, variant {step.variant}"
