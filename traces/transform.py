"""Transforms of any stream of requests: faster, jittered, cut, behind a common prefix; all lazy."""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from granikv.traces.request import Request, Run
from granikv.traces.segments import Origin, named

_PREPENDED = named(Origin.PREPENDED, 0)
_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class TransformOptions:
    """What to do with a trace, in this order: cut, prepend, jitter, speed up.

    Attributes:
        start_s: leave out requests before this time of the trace; it becomes 0.
        end_s: leave out requests from this time of the trace on; None keeps all.
        max_requests: keep at most so many of those; None keeps all.
        prepend_prefix_tokens: put one shared stream of this length before every prompt.
        tick_jitter_s: move each arrival by a uniform time below this (the trace's tick), in order.
        speedup: 2 plays twice as fast: arrivals and think times are divided by it.
    """

    start_s: float = 0.0
    end_s: float | None = None
    max_requests: int | None = None
    prepend_prefix_tokens: int = 0
    tick_jitter_s: float = 0.0
    speedup: float = 1.0

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: a number is out of its range.
        """
        for name in ("start_s", "prepend_prefix_tokens", "tick_jitter_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(
                    f"{name} must be finite and not negative, got {getattr(self, name)}"
                )
        if not 0 < self.speedup < float("inf"):
            raise ValueError(f"speedup must be positive and finite, got {self.speedup}")
        if self.end_s is not None and not self.end_s > self.start_s:
            raise ValueError(f"end_s must be above start_s ({self.start_s}), got {self.end_s}")
        if self.max_requests is not None and self.max_requests < 1:
            raise ValueError(f"max_requests must be at least 1, got {self.max_requests}")


def apply(
    requests: Iterable[Request], options: TransformOptions, seed: int = 0
) -> Iterator[Request]:
    """The transformed stream; the given requests stay as they are, `seed` is the jitter's."""
    stream = iter(requests)
    if options.start_s or options.end_s is not None or options.max_requests is not None:
        stream = cut(stream, options.start_s, options.end_s, options.max_requests)
    if options.prepend_prefix_tokens:
        stream = prepend_prefix(stream, options.prepend_prefix_tokens)
    if options.tick_jitter_s:
        stream = tick_jitter(stream, options.tick_jitter_s, np.random.default_rng(seed))
    if options.speedup != 1.0:
        stream = speedup(stream, options.speedup)
    return stream


def cut(
    requests: Iterable[Request],
    start_s: float = 0.0,
    end_s: float | None = None,
    max_requests: int | None = None,
) -> Iterator[Request]:
    """At most `max_requests` requests that arrive in [start_s, end_s); `start_s` becomes 0.

    A turn whose awaited request was cut away starts its conversation anew, at its own time.
    """
    first_id: int | None = None
    kept = 0
    for request in requests:
        if request.arrival_s < start_s:
            continue
        if end_s is not None and request.arrival_s >= end_s:
            return
        # Ids ascend and the cut is one stretch, so everything awaited below the first id is gone.
        first_id = request.request_id if first_id is None else first_id
        awaits = request.after is not None and request.after >= first_id
        yield replace(
            request,
            arrival_s=request.arrival_s - start_s,
            after=request.after if awaits else None,
            think_s=request.think_s if awaits else 0.0,
        )
        kept += 1
        if kept == max_requests:
            return


def prepend_prefix(requests: Iterable[Request], tokens: int) -> Iterator[Request]:
    """Every prompt behind the same `tokens` new tokens, which count as declared prefix."""
    prefix = Run(_PREPENDED, tokens)
    for request in requests:
        yield replace(
            request, prompt=(prefix, *request.prompt), prefix_tokens=request.prefix_tokens + tokens
        )


def tick_jitter(
    requests: Iterable[Request], tick_s: float, rng: np.random.Generator
) -> Iterator[Request]:
    """Arrivals moved by a uniform time in [0, tick_s), for traces whose clock ticks coarsely.

    The moved times are sorted and given to the requests in their old order, so ids still ascend.
    Turns that wait for an answer stay with the request before them.
    """
    times: list[float] = []
    waiting: deque[Request] = deque()
    latest_s = 0.0
    draws: list[float] = []

    def release(before_s: float) -> Iterator[Request]:
        nonlocal latest_s
        while waiting and (waiting[0].after is not None or times[0] <= before_s):
            request = waiting.popleft()
            if request.after is None:
                latest_s = heapq.heappop(times)
            yield replace(request, arrival_s=latest_s)

    for request in requests:
        # No later request can move to a time before its own arrival: what lies below is final.
        yield from release(request.arrival_s)
        waiting.append(request)
        if request.after is None:
            if not draws:
                draws = (rng.random(_BLOCK) * tick_s).tolist()
            heapq.heappush(times, request.arrival_s + draws.pop())
    yield from release(float("inf"))


def speedup(requests: Iterable[Request], factor: float) -> Iterator[Request]:
    """The trace `factor` times as fast: arrivals and think times divided by it, order unchanged."""
    for request in requests:
        yield replace(
            request, arrival_s=request.arrival_s / factor, think_s=request.think_s / factor
        )
