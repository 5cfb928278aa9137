"""When a step ran on the GPU, without ever waiting for the GPU."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# CUDA gives the time between two events in float32 ms; up to here that is exact to 8 us.
_MAX_ELAPSED_MS = 60_000.0


@dataclass(slots=True, eq=False)
class Span:
    """One step being timed.

    Attributes:
        host_s: when the host launched it.
        was_idle: whether the GPU had nothing to do then, so that it began at once.
        start: event before it, or None.
        end: event after it; without events, the host's time.
    """

    host_s: float
    was_idle: bool
    start: Any
    end: Any


class StepTimer(Protocol):
    """Times are on the clock of `time.perf_counter`, which SGLang's request times are on too."""

    def begin(self) -> Span:
        """Right before a step is launched."""

    def end(self, span: Span) -> None:
        """Right after it was launched."""

    def read(self, span: Span) -> tuple[float, float] | None:
        """(start in s, duration in us), None while it runs; once a span, in order of launch."""


class HostTimer:
    """For a device whose calls return when they are done: a CPU."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s

    def begin(self) -> Span:
        """Right before a step."""
        return Span(self._now_s(), True, None, None)

    def end(self, span: Span) -> None:
        """Right after it."""
        span.end = self._now_s()

    def read(self, span: Span) -> tuple[float, float]:
        """(start in s, duration in us)."""
        return span.host_s, (span.end - span.host_s) * 1e6


class CudaTimer:
    """Two events a step, on the stream that the step runs on.

    With overlap scheduling a step is launched while the one before it runs. It begins when that one
    ends, which only the GPU knows: its start is counted from that of the last step that met an idle
    stream, so began when the host said so.

    Args:
        stream: that steps run on; None for the one that is current when they are launched.
        make_event: an event with timing.
        now_s: the host's clock.
    """

    def __init__(
        self,
        stream: Any,
        make_event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True),
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._stream = stream
        self._make_event = make_event
        self._now_s = now_s
        self._spare: list[Any] = []
        self._last_end: Any = None
        self._anchor: Any = None
        self._anchor_s = 0.0

    def begin(self) -> Span:
        """Right before a step is launched."""
        was_idle = self._last_end is None or self._last_end.query()
        span = Span(self._now_s(), was_idle, self._event(), self._event())
        span.start.record(self._stream)
        return span

    def end(self, span: Span) -> None:
        """Right after it was launched."""
        span.end.record(self._stream)
        self._last_end = span.end

    def read(self, span: Span) -> tuple[float, float] | None:
        """(start in s, duration in us), None while it runs."""
        if not span.end.query():
            return None
        duration_us = span.start.elapsed_time(span.end) * 1e3
        start_s = self._start_s(span)
        self._spare.append(span.end)
        return start_s, duration_us

    def _start_s(self, span: Span) -> float:
        if self._anchor is None or span.was_idle:
            return self._count_from(span.start, span.host_s)
        elapsed_ms = self._anchor.elapsed_time(span.start)
        start_s = self._anchor_s + float(elapsed_ms) / 1e3
        if elapsed_ms > _MAX_ELAPSED_MS:
            return self._count_from(span.start, start_s)
        self._spare.append(span.start)
        return start_s

    def _count_from(self, start: Any, start_s: float) -> float:
        if self._anchor is not None:
            self._spare.append(self._anchor)
        self._anchor, self._anchor_s = start, start_s
        return start_s

    def _event(self) -> Any:
        return self._spare.pop() if self._spare else self._make_event()
