"""What a live server says about itself: run records, metrics and a line beside each decode log.

One `Observer` a process. Its methods are hooks for SGLang's registry, named after the function that
they go around, before or after. They do nothing where the scheduler's tree is not ours.
"""

import atexit
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from granikv.sglang_plugin.attention import GraniAttnBackend
from granikv.sglang_plugin.config import LiveConfig
from granikv.sglang_plugin.metrics import PoolMetrics, StepCounts
from granikv.sglang_plugin.radix_cache import GraniRadixCache
from granikv.sglang_plugin.recorder import Recorder
from granikv.sglang_plugin.request_log import record_of
from granikv.sglang_plugin.server_facts import facts_of
from granikv.sglang_plugin.step_check import StepCheck
from granikv.sglang_plugin.step_log import PoolTotals, StepLog
from granikv.sglang_plugin.step_plan import PlannedStep
from granikv.sglang_plugin.step_timer import CudaTimer, HostTimer

_PUBLISH_S = 1.0

logger = logging.getLogger(__name__)


class Observer:
    """Hooks that watch the scheduler of this process."""

    def __init__(self) -> None:
        self._server: _Server | None = None

    def after_init(self, _result: None, scheduler: Any, *_: Any, **__: Any) -> None:
        """After `Scheduler.__init__`: begin to watch.

        Raises:
            ConfigError: the folder of `GRANIKV_RECORD` cannot be used.
        """
        if isinstance(scheduler.tree_cache, GraniRadixCache):
            self._server = _Server(scheduler, scheduler.tree_cache)

    def around_run_batch(
        self, original: Callable[..., Any], scheduler: Any, batch: Any, *rest: Any, **named: Any
    ) -> Any:
        """Around `Scheduler.run_batch`: time the step and note what ran."""
        server = self._of_tree(scheduler.tree_cache)
        if server is None:
            return original(scheduler, batch, *rest, **named)
        return server.run(lambda: original(scheduler, batch, *rest, **named), batch)

    def after_process_batch_result(
        self, _result: None, scheduler: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        """After `Scheduler.process_batch_result`: record the steps that have ended."""
        if server := self._of_tree(scheduler.tree_cache):
            server.processed(batch)

    def before_on_idle(self, scheduler: Any, *_: Any, **__: Any) -> None:
        """Before `Scheduler.on_idle`: nothing stays behind when no next step comes."""
        if server := self._of_tree(scheduler.tree_cache):
            server.idle()

    def after_retract_decode(
        self, result: tuple[list[Any], float, list[Any]], batch: Any, *_: Any, **__: Any
    ) -> None:
        """After `ScheduleBatch.retract_decode`: count retractions, record who is aborted."""
        if server := self._of_tree(batch.tree_cache):
            retracted, _, aborted = result
            server.totals.retractions += len(retracted)
            for req in aborted:
                server.ended(req, is_aborted=True)

    def after_release_kv_cache(
        self, _result: None, req: Any, tree_cache: Any, *_: Any, **__: Any
    ) -> None:
        """After `release_kv_cache`, once for every request that has run: record it."""
        if req.finished_reason is not None and (server := self._of_tree(tree_cache)):
            server.ended(req, is_aborted=req.finished_reason.to_json()["type"] == "abort")

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

    def close(self) -> None:
        """Write what has been recorded so far."""
        if self._server is not None:
            self._server.close()

    def _of_tree(self, tree: Any) -> "_Server | None":
        server = self._server
        return server if server is not None and server.tree is tree else None


class _Server:
    """What is watched, and who wants to know."""

    def __init__(self, scheduler: Any, tree: GraniRadixCache) -> None:
        self.tree = tree
        self.totals = PoolTotals(tree)
        self._counts = StepCounts()
        backend = scheduler.tp_worker.model_runner.attn_backend
        self._decode = backend.decode_backend if isinstance(backend, GraniAttnBackend) else None
        context = scheduler.metrics_collector_context
        self._metrics = (
            PoolMetrics(context.collector) if context.current_scheduler_metrics_enabled else None
        )
        self._published_s = time.monotonic()
        self._planned_before = (0, 0)
        self._recorder: Recorder | None = None
        self._log: StepLog | None = None
        settings = LiveConfig.from_environment()
        if settings.record is not None and scheduler.ps.tp_rank == 0:
            replica = scheduler.ps.dp_rank or 0
            facts = facts_of(scheduler, tree, settings)
            self._recorder = recorder = Recorder(settings.record, facts, replica)
            self._log = StepLog(
                tree,
                self.totals,
                _timer_of(scheduler),
                self._last_step,
                recorder.step,
                replica,
            )
            _at_exit(self.close)

    def run(self, launch: Callable[[], Any], batch: Any) -> Any:
        """Launch a step; what it returns."""
        result = launch() if self._log is None else self._log.run(launch, batch)
        if self._metrics is not None and batch.forward_mode.is_decode():
            step = self._last_step()
            if step is not None:
                self._counts.add(step)
        return result

    def processed(self, batch: Any) -> None:
        """A step's result is on the host."""
        if self._log is not None:
            self._log.processed(batch)
        self._publish_if_due()

    def idle(self) -> None:
        """No step is under way."""
        if self._log is not None:
            self._log.drain()
        self._publish_if_due()

    def ended(self, req: Any, is_aborted: bool) -> None:
        """A request has left."""
        if self._recorder is not None:
            self._recorder.request(record_of(req, self.tree, is_aborted, time.perf_counter()))

    def state(self) -> dict[str, Any]:
        """Pools now, and totals since the start, as plain values."""
        core, tree = self.tree.token_to_kv_pool_allocator.core, self.tree
        misses, evictions, retractions, promoted_tokens = self.totals.read()
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
            "promoted_tokens": promoted_tokens,
            "decode_steps": steps,
            "plan_us": plan_ns / 1e3 / max(steps, 1),
            "checked_steps": 0 if check is None else check.steps,
            "check_failures": 0 if check is None else check.failures,
            "check_largest_error": 0.0 if check is None else check.largest_error,
        }

    def line(self) -> str:
        """The state of the pools, and how the last decode step ran."""
        core = self.tree.token_to_kv_pool_allocator.core
        misses, _, _, promoted_tokens = self.totals.read()
        step = self._last_step()
        return (
            f"GraniKV: HOT {core.hot_used}/{core.hot_tokens} "
            f"(largest free run {core.largest_free_run}), COLD free {core.cold_free}, "
            f"HOT misses {misses}, promoted tokens {promoted_tokens}, "
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

    def close(self) -> None:
        """Record what has ended, and close the files."""
        if self._log is not None and self._recorder is not None:
            self._log.drain()
            self._recorder.dropped_steps += self._log.lost
            self._log.lost = 0
            self._recorder.close()

    def _last_step(self) -> PlannedStep | None:
        return None if self._decode is None else self._decode.last_step

    def _check(self) -> StepCheck | None:
        return None if self._decode is None else self._decode.check

    def _publish_if_due(self) -> None:
        now_s = time.monotonic()
        if self._metrics is None or now_s - self._published_s < _PUBLISH_S:
            return
        self._published_s = now_s
        _, evictions, _, promoted_tokens = self.totals.read()
        check = self._check()
        self._metrics.publish(
            self.tree.token_to_kv_pool_allocator.core.stats(),
            self.totals.misses(),
            evictions,
            self.tree.promotions,
            promoted_tokens,
            self._planned()[1] / 1e9,
            self._counts,
            0 if check is None else check.failures,
        )


def _timer_of(scheduler: Any) -> HostTimer | CudaTimer:
    if scheduler.device != "cuda":
        return HostTimer()
    # Without overlap scheduling, steps run on the stream that the scheduler itself is on.
    return CudaTimer(scheduler.forward_stream if scheduler.enable_overlap else None)


def _words(step: PlannedStep) -> str:
    modes = Counter(mode.name.lower() for mode in step.plan.modes)
    segments = " + ".join(f"{count} {mode}" for mode, count in modes.items())
    return f"{segments or 'nothing shared'}, variant {step.variant}"


def _at_exit(close: Callable[[], None]) -> None:
    """Also on SIGTERM, whose default ends a process without its exit handlers."""
    atexit.register(close)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return

    def end(number: int, _frame: Any) -> None:
        close()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
