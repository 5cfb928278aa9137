"""trace_info: what a trace holds and what a HOT pool could serve of it."""

import heapq
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from granikv.traces.hot_pool import PoolRow, greedy_pool
from granikv.traces.prefix_tree import PrefixNode, PrefixTree
from granikv.traces.request import Request

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Length law of prompts or answers, in tokens.

    `quantiles` are those of `QUANTILES`, interpolated linearly between ranks (numpy's default).
    """

    quantiles: tuple[float, ...]
    mean: float
    total: int


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix that two or more prompts have, where a longer one would have fewer.

    Attributes:
        tokens: its length.
        requests: prompts that begin with it.
        first_s: arrival of the first.
        last_s: arrival of the last.
        peak_requests: most of them in one window.
    """

    tokens: int
    requests: int
    first_s: float
    last_s: float
    peak_requests: int

    @property
    def tokens_served(self) -> int:
        """Prompt tokens that it stands for, the first request's included."""
        return self.tokens * self.requests

    @property
    def lifetime_s(self) -> float:
        """Seconds between its first and last request."""
        return self.last_s - self.first_s


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """Statistics of one trace.

    Attributes:
        requests: number of requests.
        duration_s: from the first arrival to the last.
        distinct_times: different arrival times.
        largest_tick: most requests with one arrival time.
        waiting_turns: requests that wait for an answer, whose times are not known before a run.
        prompt: prompt lengths.
        output: output lengths.
        shared_tokens: prompt tokens that an earlier prompt had in the same place, from the first
            token on (an infinite cache's hits).
        covered_requests: requests whose whole prompt was there before.
        prefixes: number of shared prefixes.
        prefixes_10: of those, with at least 10 requests.
        prefixes_100: of those, with at least 100 requests.
        top_by_tokens: shared prefixes that serve the most tokens.
        top_by_requests: shared prefixes with the most requests.
        top_by_peak: shared prefixes of at least `min_prefix_tokens` with the most requests in one
            window.
        pool: what a HOT pool of the best whole prefixes would hold and serve (whole-trace oracle).
        window_s: length of the window.
        min_prefix_tokens: shortest prefix in `top_by_peak`.
    """

    requests: int
    duration_s: float
    distinct_times: int
    largest_tick: int
    waiting_turns: int
    prompt: Lengths
    output: Lengths
    shared_tokens: int
    covered_requests: int
    prefixes: int
    prefixes_10: int
    prefixes_100: int
    top_by_tokens: tuple[SharedPrefix, ...]
    top_by_requests: tuple[SharedPrefix, ...]
    top_by_peak: tuple[SharedPrefix, ...]
    pool: tuple[PoolRow, ...]
    window_s: float
    min_prefix_tokens: int

    @property
    def rate_per_s(self) -> float | None:
        """Mean arrivals per second, None when all arrive at once."""
        return self.requests / self.duration_s if self.duration_s else None

    @property
    def shared_fraction(self) -> float:
        """Share of all prompt tokens that an earlier prompt had."""
        return self.shared_tokens / self.prompt.total


def trace_info(
    requests: Iterable[Request],
    *,
    window_s: float = 60.0,
    min_prefix_tokens: int = 1_024,
    top: int = 20,
) -> TraceInfo:
    """Statistics in one pass, which holds lengths (16 bytes a request) and the prefixes.

    Raises:
        ValueError: there are no requests.
    """
    tally = _Tally(window_s)
    for request in requests:
        tally.add(request)
    if not tally.prompts:
        raise ValueError("requests must not be empty")
    found = tally.tree.shared_prefixes()
    long = [node for node in found if node.depth_tokens >= min_prefix_tokens]
    return TraceInfo(
        requests=len(tally.prompts),
        duration_s=tally.last_s - tally.first_s,
        distinct_times=tally.distinct_times,
        largest_tick=tally.largest_tick,
        waiting_turns=tally.waiting_turns,
        prompt=_lengths(tally.prompts),
        output=_lengths(tally.outputs),
        shared_tokens=tally.shared_tokens,
        covered_requests=tally.covered_requests,
        prefixes=len(found),
        prefixes_10=sum(node.requests >= 10 for node in found),
        prefixes_100=sum(node.requests >= 100 for node in found),
        top_by_tokens=_top(found, top, _served),
        top_by_requests=_top(found, top, lambda node: (node.requests, node.depth_tokens)),
        top_by_peak=_top(long, top, lambda node: (node.peak, node.depth_tokens)),
        pool=greedy_pool(found),
        window_s=window_s,
        min_prefix_tokens=min_prefix_tokens,
    )


class _Tally:
    """What one pass counts."""

    def __init__(self, window_s: float) -> None:
        self.tree = PrefixTree(window_s)
        self.prompts = array("q")
        self.outputs = array("q")
        self.first_s = 0.0
        self.last_s = 0.0
        self.distinct_times = 0
        self.largest_tick = 0
        self.waiting_turns = 0
        self.shared_tokens = 0
        self.covered_requests = 0
        self._tick = 0

    def add(self, request: Request) -> None:
        """Count one request; they come in order of arrival."""
        now_s = request.arrival_s
        if not self.prompts:
            self.first_s = now_s
        if not self.prompts or now_s != self.last_s:
            self.distinct_times += 1
            self._tick = 0
        self.last_s = now_s
        self._tick += 1
        self.largest_tick = max(self.largest_tick, self._tick)
        self.waiting_turns += request.after is not None
        tokens = request.prompt_tokens
        shared = self.tree.add(request.prompt, now_s)
        self.shared_tokens += shared
        self.covered_requests += shared == tokens
        self.prompts.append(tokens)
        self.outputs.append(request.output_tokens)


def _top(
    nodes: Sequence[PrefixNode], count: int, key: Callable[[PrefixNode], tuple[int, int]]
) -> tuple[SharedPrefix, ...]:
    best = heapq.nlargest(count, nodes, key)
    return tuple(
        SharedPrefix(node.depth_tokens, node.requests, node.first_s, node.last_s, node.peak)
        for node in best
    )


def _served(node: PrefixNode) -> tuple[int, int]:
    return node.requests * node.depth_tokens, node.requests


def _lengths(values: "array[int]") -> Lengths:
    lengths = np.frombuffer(values, np.int64)
    quantiles = np.quantile(lengths, QUANTILES).tolist()
    return Lengths(tuple(quantiles), float(lengths.mean()), int(lengths.sum()))
