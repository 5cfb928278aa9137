"""Seeded synthetic traces with exact counts and exact lengths, made lazily."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, repeat

import numpy as np

from granikv.traces import draw
from granikv.traces.request import Request, Run
from granikv.traces.segments import Origin, generated_segment, named, private_segment
from granikv.traces.spec import (
    Conversation,
    EvenPopularity,
    Length,
    RequestMix,
    TableLength,
    WorkloadSpec,
)

# Level lengths are drawn once per prefix and kept, so a level's prefixes must fit in memory.
_Path = tuple[tuple[Run, ...], int]
# What numpy's SeedSequence takes: one number, or several that make one seed together.
Seed = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Streams:
    """Independent random streams, one per purpose: one setting cannot change other draws."""

    arrivals: np.random.Generator
    choices: list[np.random.Generator]
    prefixes: list[np.random.Generator]
    private: np.random.Generator
    output: np.random.Generator
    turns: np.random.Generator
    user: np.random.Generator
    think: np.random.Generator

    @classmethod
    def of(cls, seed: Seed, levels: int) -> "_Streams":
        roots = np.random.SeedSequence(seed).spawn(8)
        rng = np.random.default_rng
        return cls(
            arrivals=rng(roots[0]),
            choices=[rng(child) for child in roots[1].spawn(levels)],
            prefixes=[rng(child) for child in roots[2].spawn(levels)],
            private=rng(roots[3]),
            output=rng(roots[4]),
            turns=rng(roots[5]),
            user=rng(roots[6]),
            think=rng(roots[7]),
        )


class _PrefixTree:
    """The shared prefixes of a workload: which runs a choice of one prefix per level stands for."""

    def __init__(self, spec: RequestMix, streams: _Streams, first_set: int) -> None:
        self._levels = spec.prefixes
        self._first_set = first_set
        self._tokens: list[list[int]] = []
        nodes = 1
        for level, rng in zip(spec.prefixes, streams.prefixes, strict=True):
            nodes *= level.count
            self._tokens.append(draw.prefix_lengths(level, nodes, rng))
        self._known: dict[tuple[int, ...], _Path] = {}
        self._epochs: tuple[int, ...] = ()
        self._drifts = any(level.period_s is not None for level in spec.prefixes)

    def path(self, choice: tuple[int, ...], now_s: float) -> _Path:
        """The runs of a prompt's shared part, and their sum in tokens."""
        if self._drifts:
            self._enter_epoch(now_s)
        path = self._known.get(choice)
        if path is None:
            path = self._known[choice] = self._build(choice)
        return path

    def _enter_epoch(self, now_s: float) -> None:
        epochs: list[int] = []
        for level in self._levels:
            if level.period_s is None:
                epochs.append(epochs[-1] if epochs else 0)
            else:
                epochs.append(int(now_s // level.period_s))
        if tuple(epochs) != self._epochs:
            self._epochs = tuple(epochs)
            self._known.clear()

    def _build(self, choice: tuple[int, ...]) -> _Path:
        runs: list[Run] = []
        node = 0
        for depth, index in enumerate(choice):
            node = node * self._levels[depth].count + index
            epoch = self._first_set + (self._epochs[depth] if self._epochs else 0)
            runs.append(Run(generated_segment(depth, epoch, node), self._tokens[depth][node]))
        return tuple(runs), sum(run.length for run in runs)


def generate(spec: WorkloadSpec, seed: int) -> Iterator[Request]:
    """The requests of a workload, in order of arrival; the same seed gives the same trace.

    Turns of a conversation come one after another, with the arrival time of the first (the
    earliest moment at which a reader can need them). Every prompt's tokens behind its shared
    prefixes are its own.

    Raises:
        ConfigError: a length table cannot be read.
    """
    return islice(endless(spec, seed), spec.requests)


def endless(
    spec: RequestMix,
    seed: Seed,
    *,
    prefix_seed: Seed | None = None,
    first_set: int = 0,
    first_id: int = 0,
) -> Iterator[Request]:
    """Requests of a mix without end, as `generate` makes them.

    Args:
        spec: the mix.
        seed: of everything random.
        prefix_seed: of the prefixes' lengths instead.
        first_set: number of the first set of prefixes; `period_s` counts on from there.
        first_id: the first request id, which also names the request's own tokens.

    Raises:
        ConfigError: a length table cannot be read.
    """
    levels = len(spec.prefixes)
    streams = _Streams.of(seed, levels)
    if prefix_seed is not None:
        streams = replace(streams, prefixes=_Streams.of(prefix_seed, levels).prefixes)
    tree = _PrefixTree(spec, streams, first_set)
    times = draw.arrivals(spec.arrivals, streams.arrivals)
    picks = _picks(spec, streams)
    private = draw.lengths(spec.private_tokens, streams.private)
    output = draw.lengths(spec.output_tokens, _output_rng(spec.private_tokens, spec, streams, seed))
    if spec.conversation is None:
        return _single(zip(times, picks, private, output, strict=False), tree, first_id)
    starts = zip(times, picks, private, strict=False)
    return _turns(spec.conversation, streams, tree, starts, output, first_id)


def _picks(spec: RequestMix, streams: _Streams) -> Iterator[tuple[int, ...]]:
    """Which prefix each request takes at each level."""
    if not spec.prefixes:
        return repeat(())
    columns: list[Iterator[int]] = []
    stride = 1
    for level, rng in zip(spec.prefixes, streams.choices, strict=True):
        columns.append(draw.choices(level, stride, rng))
        if isinstance(level.popularity, EvenPopularity):
            # Even levels count like digits, or two of them would take only equal indices.
            stride *= level.count
    return zip(*columns, strict=False)


def _output_rng(
    private: Length, spec: RequestMix, streams: _Streams, seed: Seed
) -> np.random.Generator:
    """The output stream; the private one again when both draw from one table (whole rows)."""
    output = spec.output_tokens
    if (
        spec.conversation is None
        and isinstance(private, TableLength)
        and isinstance(output, TableLength)
        and private.table == output.table
    ):
        return _Streams.of(seed, len(spec.prefixes)).private
    return streams.output


def _single(
    starts: Iterator[tuple[float, tuple[int, ...], int, int]], tree: _PrefixTree, first_id: int
) -> Iterator[Request]:
    path = tree.path
    base = private_segment(0)
    for request_id, (now_s, choice, private, output) in enumerate(starts, first_id):
        shared, shared_tokens = path(choice, now_s)
        yield Request(
            request_id,
            now_s,
            (*shared, Run(base + request_id, private)),
            output,
            prefix_tokens=shared_tokens,
        )


def _turns(
    talk: Conversation,
    streams: _Streams,
    tree: _PrefixTree,
    starts: Iterator[tuple[float, tuple[int, ...], int]],
    output: Iterator[int],
    first_id: int,
) -> Iterator[Request]:
    turns = draw.lengths(talk.turns, streams.turns)
    user = draw.lengths(talk.user_tokens, streams.user)
    think = draw.pauses(talk.think_s, talk.think == "exponential", streams.think)
    request_id = first_id
    for number, (now_s, choice, private) in enumerate(starts, first_id):
        prompt, shared_tokens = tree.path(choice, now_s)
        new_tokens = private
        for turn in range(next(turns)):
            prompt = (*prompt, Run(named(Origin.TURN, request_id), new_tokens))
            written = next(output)
            answer = named(Origin.OUTPUT, request_id)
            yield Request(
                request_id,
                now_s,
                prompt,
                written,
                session=f"s{number}",
                after=request_id - 1 if turn else None,
                think_s=next(think) if turn else 0.0,
                output_segment=answer,
                prefix_tokens=shared_tokens,
            )
            prompt = (*prompt, Run(answer, written))
            new_tokens = next(user)
            request_id += 1
