"""Workloads: the prompts that are sent to a live server, as token ids drawn from a seed.

Token ids are random, no text: dummy weights do not read it. The same seed and cell name give the
same ids on every server, so that variants answer the same requests.
"""

import csv
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from granikv.core.errors import TraceFormatError

# By path: importing granikv.traces loads polars, which a GPU host may lack.
SHAREGPT = Path(__file__).parents[1] / "traces/data/sharegpt-llama-3.1-8b.lengths.csv"
_VOCABULARY = (10, 100_000)  # token ids that every model here has


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request as a server gets it; `arrival_s` counts from the start of the workload."""

    request_id: int
    session: str | None
    arrival_s: float
    input_ids: list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts that are sent at one moment, and the prefixes that they begin with."""

    prefixes: list[list[int]]
    prompts: list[list[int]]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests with arrival times behind one prefix, and what was changed to make them.

    Attributes:
        prefix: what every prompt begins with.
        requests: in order of arrival.
        clamped_outputs: requests whose output was cut to the largest allowed.
    """

    prefix: list[int]
    requests: list[LiveRequest]
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


def poisson(
    prefix_tokens: int,
    requests: int,
    rate_per_s: float,
    largest_output: int,
    rng: np.random.Generator,
) -> Arrivals:
    """Requests with lengths drawn from the ShareGPT file, at the times of a Poisson process.

    The file's prompt length is what a request has behind the common prefix.
    """
    prefix = tokens(rng, prefix_tokens)
    lengths = _sharegpt_lengths()
    drawn = [lengths[row] for row in rng.integers(0, len(lengths), size=requests)]
    times = rng.exponential(1.0 / rate_per_s, size=requests).cumsum()
    return Arrivals(
        prefix,
        [
            LiveRequest(
                number, None, float(time_s), prefix + tokens(rng, own), min(output, largest_output)
            )
            for number, (time_s, (own, output)) in enumerate(zip(times, drawn, strict=True))
        ],
        sum(output > largest_output for _, output in drawn),
    )


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
        try:
            row = json.loads(line)
            yield LiveRequest(
                int(row["id"]),
                row.get("session"),
                float(row["arrival_s"]),
                [
                    token
                    for segment, length in row["prompt"]
                    for token in segment_tokens(int(segment), int(length))
                ],
                int(row["output_tokens"]),
            )
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
