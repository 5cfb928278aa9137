"""Workloads: the prompts that are sent to a live server, as token ids drawn from a seed.

Token ids are random, no text: dummy weights do not read it. The same seed and cell name give the
same ids on every server, so that variants answer the same requests.
"""

import csv
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from granikv.core.errors import TraceFormatError

# By path: importing granikv.traces loads polars, which a GPU host may lack.
SHAREGPT = Path(__file__).parents[1] / "traces/data/sharegpt-llama-3.1-8b.lengths.csv"
_PRIVATE = 3 << 60  # where `granikv.traces.segments` has the names of what one request alone has
_VOCABULARY = (10, 100_000)  # token ids that every model here has


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request as a server gets it; `arrival_s` counts from the start of the workload.

    Attributes:
        prompt: `input_ids` as runs of (segment, length) for a replay: prompts share the leading
            tokens of equal segments. Empty where nobody replays it.
    """

    request_id: int
    session: str | None
    arrival_s: float
    input_ids: list[int]
    output_tokens: int
    prompt: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts that are sent at one moment, and the prefixes that they begin with."""

    prefixes: list[list[int]]
    prompts: list[list[int]]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests behind shared prefixes, and what was changed to make them.

    Attributes:
        requests: in order of arrival.
        rows: how many requests each prefix has.
        clamped_outputs: requests whose output was cut to the largest allowed.
    """

    requests: list[LiveRequest]
    rows: list[int]
    clamped_outputs: int


def rng_of(seed: int, name: str) -> np.random.Generator:
    """The generator of one cell: other cells, and their order, do not change what it draws."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def tokens(rng: np.random.Generator, count: int) -> list[int]:
    """Random token ids."""
    drawn: list[int] = rng.integers(*_VOCABULARY, size=count).tolist()
    return drawn


def batch(shared: Sequence[tuple[int, int]], own_tokens: int, rng: np.random.Generator) -> Batch:
    """For each (prefix tokens, rows) of `shared`, so many prompts with tokens of their own.

    A prefix of 0 tokens is none. Prompts of several prefixes are sent in random order.
    """
    prefixes = [tokens(rng, length) for length, _ in shared]
    prompts = [
        prefix + tokens(rng, own_tokens)
        for prefix, (_, rows) in zip(prefixes, shared, strict=True)
        for _ in range(rows)
    ]
    if len(prefixes) > 1:
        prompts = [prompts[place] for place in rng.permutation(len(prompts))]
    return Batch([prefix for prefix in prefixes if prefix], prompts)


def arrivals(
    prefixes: Sequence[int],
    requests: int,
    rate_per_s: float | None,
    largest_output: int,
    rng: np.random.Generator,
) -> Arrivals:
    """Requests with lengths drawn from the ShareGPT file, at the times of a Poisson process.

    `prefixes` are lengths in tokens. Each prefix has equally many requests (give or take one), in
    random order; the file's prompt length is what a request has behind it. Without a rate all
    arrive at 0 s.
    """
    shared = [tokens(rng, length) for length in prefixes]
    lengths = _sharegpt_lengths()
    drawn = [lengths[row] for row in rng.integers(0, len(lengths), size=requests)]
    times = np.zeros(requests)
    if rate_per_s is not None:
        times = rng.exponential(1.0 / rate_per_s, size=requests).cumsum()
    places = np.arange(requests) % len(shared)
    if len(shared) > 1:
        places = rng.permutation(places)
    made = []
    for number, (place, time_s, (own, output)) in enumerate(zip(places, times, drawn, strict=True)):
        runs = ((int(place), len(shared[place])), (_PRIVATE | number, own))
        made.append(
            LiveRequest(
                number,
                None,
                float(time_s),
                shared[place] + tokens(rng, own),
                min(output, largest_output),
                tuple(run for run in runs if run[1]),
            )
        )
    clamped = sum(output > largest_output for _, output in drawn)
    return Arrivals(made, np.bincount(places, minlength=len(shared)).tolist(), clamped)


def burst(sent: Batch, output_tokens: int, arrival_s: float = 0.0) -> Iterator[LiveRequest]:
    """All prompts of a batch as requests that arrive at the same moment."""
    for number, prompt in enumerate(sent.prompts):
        yield LiveRequest(number, None, arrival_s, prompt, output_tokens)


def from_lines(lines: Iterable[str], seed: int, name: str = "trace") -> Iterator[LiveRequest]:
    """Requests of a plain trace: a JSON object a line, so that no reader of traces is needed.

    Keys: `id`, `arrival_s`, `output_tokens`, `session` (may be missing) and `prompt`, a list of
    [segment, length]: the leading tokens of the endless stream that the number `segment` names.

    Raises:
        TraceFormatError: a line cannot be read.
    """
    segment_tokens = _segments(seed)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        with _naming(name, number):
            row = json.loads(line)
            runs = tuple((int(segment), int(length)) for segment, length in row["prompt"])
            request = LiveRequest(
                int(row["id"]),
                row.get("session"),
                float(row["arrival_s"]),
                [token for run in runs for token in segment_tokens(*run)],
                int(row["output_tokens"]),
                runs,
            )
        yield request


def last_arrival_s(lines: Iterable[str], name: str = "trace") -> float:
    """When the last request of a plain trace arrives, 0 where there is none.

    Raises:
        TraceFormatError: a line cannot be read.
    """
    last_s = 0.0
    for number, line in enumerate(lines, 1):
        if line.strip():
            with _naming(name, number):
                last_s = max(last_s, float(json.loads(line)["arrival_s"]))
    return last_s


@contextmanager
def _naming(name: str, number: int) -> Iterator[None]:
    """Say in which line of a plain trace an error is."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise TraceFormatError(
            f"{name}, line {number}: {error!r}; a line has id, arrival_s, prompt "
            "([[segment, length], ...]) and output_tokens"
        ) from None


def _segments(seed: int) -> Callable[[int, int], list[int]]:
    """Leading tokens of a named stream; a generator draws the same ids however many are asked."""
    longest: dict[int, list[int]] = {}

    def leading(segment: int, length: int) -> list[int]:
        known = longest.get(segment, [])
        if len(known) < length:
            rng = np.random.default_rng([seed, segment & (2**64 - 1)])
            known = longest[segment] = tokens(rng, length)
        return known[:length]

    return leading


@cache
def _sharegpt_lengths() -> list[tuple[int, int]]:
    with SHAREGPT.open(newline="") as file:
        return [
            (int(row["num_prefill_tokens"]), int(row["num_decode_tokens"]))
            for row in csv.DictReader(file)
        ]
