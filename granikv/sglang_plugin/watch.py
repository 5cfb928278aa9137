"""Watching the scheduler of this process: hooks around its steps and ends of requests, and where
what they see goes to.

The hooks are named after the function that they go around, before or after. They time and describe;
none changes what SGLang does. They do nothing for a scheduler that is not watched.
"""

import atexit
import os
import signal
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from sglang.srt.plugins.hook_registry import HookType

from granikv.sglang_plugin.config import LiveConfig
from granikv.sglang_plugin.hooks import Hook
from granikv.sglang_plugin.recorder import Recorder
from granikv.sglang_plugin.request_log import record_of
from granikv.sglang_plugin.server_facts import facts_of
from granikv.sglang_plugin.step_log import Pools, StepLog
from granikv.sglang_plugin.step_timer import CudaTimer, HostTimer

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


class WatchedServer:
    """A scheduler that is watched, and the recording of it where one is made.

    Args:
        scheduler: right after its `__init__`.
        pools: of it.
        settings: of this process.
        folder: for run records; None for none.

    Attributes:
        tree: of the scheduler; tells whose a batch or a request is.
        pools: of it.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(
        self, scheduler: Any, pools: Pools, settings: LiveConfig, folder: Path | None
    ) -> None:
        self.tree = scheduler.tree_cache
        self.pools = pools
        self._recorder: Recorder | None = None
        self._log: StepLog | None = None
        if folder is not None and scheduler.ps.tp_rank == 0:
            replica = scheduler.ps.dp_rank or 0
            facts = facts_of(scheduler, pools.hot_tokens, settings)
            self._recorder = recorder = Recorder(folder, facts, replica)
            padded_rows = partial(_padded_rows, scheduler.tp_worker.model_runner)
            timer = _timer_of(scheduler)
            self._log = StepLog(pools, timer, padded_rows, recorder.step, replica)
            _at_exit(self.close)

    def run(self, launch: Callable[[], Any], batch: Any) -> Any:
        """Launch a step; what it returns."""
        return launch() if self._log is None else self._log.run(launch, batch)

    def processed(self, batch: Any) -> None:
        """A step's result is on the host."""
        if self._log is not None:
            self._log.processed(batch)

    def idle(self) -> None:
        """No step is under way."""
        if self._log is not None:
            self._log.drain()

    def retracted(self, count: int) -> None:
        """So many requests have lost their row."""
        self.pools.retractions += count

    def ended(self, req: Any, is_aborted: bool) -> None:
        """A request has left."""
        if self._recorder is not None:
            hot_tokens = self.pools.hot_tokens_of(req)
            self._recorder.request(record_of(req, hot_tokens, is_aborted, time.perf_counter()))

    def close(self) -> None:
        """Record what has ended, and close the files."""
        if self._log is not None and self._recorder is not None:
            self._log.drain()
            self._recorder.dropped_steps += self._log.lost
            self._log.lost = 0
            self._recorder.close()


S = TypeVar("S", bound=WatchedServer)


class StepHooks(Generic[S]):
    """Hooks that any server's steps and requests are recorded through; `after_init` begins it."""

    def __init__(self) -> None:
        self._server: S | None = None

    def after_init(self, _result: None, scheduler: Any, *_: Any, **__: Any) -> None:
        """After `Scheduler.__init__`: begin to watch."""
        raise NotImplementedError

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
            server.retracted(len(retracted))
            for req in aborted:
                server.ended(req, is_aborted=True)

    def after_release_kv_cache(
        self, _result: None, req: Any, tree_cache: Any, *_: Any, **__: Any
    ) -> None:
        """After `release_kv_cache`, once for every request that has run: record it."""
        if req.finished_reason is not None and (server := self._of_tree(tree_cache)):
            server.ended(req, is_aborted=req.finished_reason.to_json()["type"] == "abort")

    def hooks(self) -> tuple[Hook, ...]:
        """Where all of these go."""
        return (
            (f"{SCHEDULER}.__init__", self.after_init, HookType.AFTER),
            (f"{SCHEDULER}.run_batch", self.around_run_batch, HookType.AROUND),
            (
                f"{SCHEDULER}.process_batch_result",
                self.after_process_batch_result,
                HookType.AFTER,
            ),
            (f"{SCHEDULER}.on_idle", self.before_on_idle, HookType.BEFORE),
            (
                "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode",
                self.after_retract_decode,
                HookType.AFTER,
            ),
            (
                "sglang.srt.mem_cache.common.release_kv_cache",
                self.after_release_kv_cache,
                HookType.AFTER,
            ),
        )

    def close(self) -> None:
        """Write what has been recorded so far."""
        if self._server is not None:
            self._server.close()

    def _of_tree(self, tree: Any) -> S | None:
        server = self._server
        return server if server is not None and server.tree is tree else None


def _padded_rows(runner: Any, rows: int, result: Any) -> int:
    """Rows of the CUDA graph that a decode step has replayed; its own where it ran without one."""
    if not getattr(result, "can_run_cuda_graph", False):
        return rows
    sizes = runner.decode_cuda_graph_runner.capture_bs
    return int(sizes[bisect_left(sizes, rows)])


def _timer_of(scheduler: Any) -> HostTimer | CudaTimer:
    if scheduler.device != "cuda":
        return HostTimer()
    # Without overlap scheduling, steps run on the stream that the scheduler itself is on.
    return CudaTimer(scheduler.forward_stream if scheduler.enable_overlap else None)


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
