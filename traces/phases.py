"""Traces whose mix changes: phases one after another, overlapping, or again and again."""

from collections.abc import Iterator
from heapq import merge
from itertools import takewhile

from granikv.traces.generate import endless
from granikv.traces.request import Request
from granikv.traces.spec import MAX_SETS, Phase, PhasedSpec

# Ids of different phases must not meet before they are numbered through: they name private tokens.
_PHASE_SHIFT = 36
# The first number of a seed says what it is for.
_OF_REQUESTS, _OF_PREFIXES = 1, 2


def generate_phases(spec: PhasedSpec, seed: int) -> Iterator[Request]:
    """The requests of all phases, in order of arrival; the same seed gives the same trace.

    Every repetition draws anew. Turns of a conversation come one after another, with the arrival
    time of the first.

    Raises:
        ConfigError: a length table cannot be read.
    """
    sets: dict[str, int] = {}
    streams = []
    for number, (phase, start_s) in enumerate(_timed(spec)):
        # A tenant's set is named by the first phase that has it.
        own = number if phase.tenant is None else sets.setdefault(phase.tenant, number)
        streams.append(_stream(phase, start_s, number, own, seed))
    return _numbered(streams)


def _timed(spec: PhasedSpec) -> Iterator[tuple[Phase, float]]:
    """Every phase of every repetition with its start in seconds."""
    origin_s = end_s = 0.0
    for _ in range(spec.repeat):
        last_s = origin_s
        for phase in spec.phases:
            start_s = last_s if phase.start_s is None else origin_s + phase.start_s
            yield phase, start_s
            last_s = start_s + phase.seconds
            end_s = max(end_s, last_s)
        origin_s = end_s


def _stream(
    phase: Phase, start_s: float, number: int, prefix_set: int, seed: int
) -> Iterator[tuple[float, int, Request]]:
    """Arrival, phase number and request of one phase, as it would be alone but for the names."""
    requests = endless(
        phase,
        (_OF_REQUESTS, number, seed),
        prefix_seed=(_OF_PREFIXES, prefix_set, seed),
        first_set=prefix_set * MAX_SETS,
        first_id=number << _PHASE_SHIFT,
    )
    for request in takewhile(lambda request: request.arrival_s < phase.seconds, requests):
        request.arrival_s += start_s
        yield request.arrival_s, number, request


def _numbered(streams: list[Iterator[tuple[float, int, Request]]]) -> Iterator[Request]:
    """The streams merged by arrival, with ids that count from 0."""
    latest: dict[int, int] = {}
    in_order = merge(*streams, key=lambda timed: timed[0])
    for request_id, (_, number, request) in enumerate(in_order):
        # A turn waits for the request before it in its own phase.
        request.after = latest[number] if request.after is not None else None
        request.request_id = latest[number] = request_id
        yield request
