"""Device time of calls: one CUDA graph of many calls, replayed behind a flushed L2.

Each call of a graph should own its inputs, so that within a replay nothing is read twice; before a
replay, L2 is filled with other clean data, as the weights of a layer do in a real step.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]

from granikv.kernels.schedule import MAX_REPLAYS, MIN_REPLAYS, WARM_UPS, plan_replays

Call = Callable[[], Any]

_FLUSH_BYTES = 256 << 20  # four times the L2 of an H200


class GraphTimer:
    """Times calls by CUDA events around graph replays; owns the flush buffer and the graph pool.

    Args:
        during_work: called while replays are running, to read the clocks under load.
    """

    def __init__(self, during_work: Callable[[], object]) -> None:
        self._during_work = during_work
        self._flush = torch.ones(_FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
        self._flushed = torch.zeros((), dtype=torch.float32, device="cuda")
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        # A live graph keeps the memory pool, so that later captures need no cudaMalloc.
        self._keeper = self.capture([self.flush])

    def flush(self) -> None:
        """Read more than L2 holds; reads leave no dirty lines whose write-back would be timed."""
        torch.sum(self._flush, dim=0, out=self._flushed)

    def capture(self, calls: Sequence[Call]) -> Any:
        """A CUDA graph of the calls, in order, each run once beforehand."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            calls[0]()  # loads modules and chooses algorithms outside the capture
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                for call in calls:
                    call()
            finally:
                graph.capture_end()
        torch.cuda.synchronize()
        return graph

    def times_us(
        self, calls: Sequence[Call], cold: bool = True, min_replays: int = MIN_REPLAYS
    ) -> list[float]:
        """Device time of one call, once for each timed replay: replay time over calls."""
        graph = self.capture(calls)
        for _ in range(WARM_UPS - 1):
            self._replay(graph, cold)
        start, end = self._replay(graph, cold)
        end.synchronize()
        replays = max(min_replays, plan_replays(start.elapsed_time(end) * 1e3))
        events = [self._replay(graph, cold) for _ in range(replays)]
        self._during_work()
        torch.cuda.synchronize()
        graph.reset()
        return [start.elapsed_time(end) * 1e3 / len(calls) for start, end in events]

    def graph_host_us(self, calls: Sequence[Call]) -> list[float]:
        """Host time of one replay call: what a step costs the CPU once its graph exists."""
        graph = self.capture(calls)
        times = []
        for _ in range(WARM_UPS + MAX_REPLAYS):
            torch.cuda.synchronize()
            begin_s = time.perf_counter()
            graph.replay()
            times.append((time.perf_counter() - begin_s) * 1e6)
        torch.cuda.synchronize()
        graph.reset()
        return times[WARM_UPS:]

    def _replay(self, graph: Any, cold: bool) -> tuple[Any, Any]:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        # The flush also keeps the device busy while the host enqueues the replay behind it.
        self.flush()
        if not cold:
            graph.replay()
        start.record()
        graph.replay()
        end.record()
        return start, end
