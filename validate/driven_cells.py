"""Driven cells: requests that are sent one by one, and the names that describe them.

A Poisson cell sends arrivals behind one or more prefixes. Below saturation it sends a fixed number
of requests and measures all of them; past saturation it measures a steady window of a full server.
A closed cell has users that wait for their answers, and a trace is sent as it is.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

LARGEST_BATCH = 256  # of every variant: max_running_requests and its largest decode graph
LARGEST_OUTPUT = 512  # longer outputs of the ShareGPT file are cut to it
SATURATED_PER_S = 32.0  # arrivals of at least this rate are more than any variant serves
LOADS_PER_S = (4.0, 8.0, 12.0, 15.0, SATURATED_PER_S)
MIXED_PREFIXES = (2048, 4096, 8192, 16384)
_LADDER_TOKENS = (1024, 16384)
_REQUESTS = 256
_REQUESTS_PER_USER = 4
_SKIP, _COUNT = 64, 2 * LARGEST_BATCH


@dataclass(frozen=True, slots=True)
class PoissonCell:
    """Arrivals of a Poisson process behind shared prefixes.

    Attributes:
        name: in results and seeds.
        prefixes: tokens of each prefix; requests spread evenly over them, in random order.
        rate_per_s: arrivals.
        requests: how many to send.
        window: (finished requests to skip, finished requests to measure) of a full server, after
            which the others are aborted; None measures all requests. Requests that began together
            end together, and only whole rounds of the batch average that out: the second number
            is twice the largest batch.
        largest_output: longer outputs are cut to it.
        repeats: measurements.
    """

    name: str
    prefixes: tuple[int, ...]
    rate_per_s: float
    requests: int = _REQUESTS
    window: tuple[int, int] | None = None
    largest_output: int = LARGEST_OUTPUT
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class ClosedCell:
    """Users behind one prefix who each send their next request when the last one has ended.

    Attributes:
        name: in results and seeds.
        prefix_tokens: what every prompt begins with.
        users: requests in flight, until the last has been sent.
        requests: how many are sent in all.
        largest_output: longer outputs are cut to it.
        repeats: measurements.
    """

    name: str
    prefix_tokens: int
    users: int
    requests: int
    largest_output: int = LARGEST_OUTPUT
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class TraceCell:
    """A plain trace, sent at its arrival times (lines of `granikv.validate.workloads`)."""

    path: Path
    repeats: int = 1

    @property
    def name(self) -> str:
        """In results and seeds."""
        return f"trace-{self.path.stem}"


DrivenCell = PoissonCell | ClosedCell | TraceCell


def poisson(
    name: str, prefixes: tuple[int, ...], rate_per_s: float = SATURATED_PER_S
) -> PoissonCell:
    """A cell that measures a window from `SATURATED_PER_S` on, and all requests below.

    Past saturation it sends so many that the batch is still full when the window ends.
    """
    if rate_per_s < SATURATED_PER_S:
        return PoissonCell(name, prefixes, rate_per_s)
    requests = _SKIP + _COUNT + LARGEST_BATCH + 32
    return PoissonCell(name, prefixes, rate_per_s, requests, (_SKIP, _COUNT))


def load(prefix_tokens: int, rate_per_s: float) -> PoissonCell:
    """`poisson-<L>@<rate>`: one prefix of L tokens."""
    return poisson(f"poisson-{prefix_tokens}@{rate_per_s:g}", (prefix_tokens,), rate_per_s)


def mixed(rate_per_s: float) -> PoissonCell:
    """`mixed@<rate>`: four prefixes of 2K to 16K tokens."""
    return poisson(f"mixed@{rate_per_s:g}", MIXED_PREFIXES, rate_per_s)


def equal_prefixes(count: int, tokens: int, rate_per_s: float) -> PoissonCell:
    """`prefixes-<k>x<L>@<rate>`: k prefixes of L tokens each."""
    return poisson(f"prefixes-{count}x{tokens}@{rate_per_s:g}", (tokens,) * count, rate_per_s)


def ladder(count: int, rate_per_s: float) -> PoissonCell:
    """`ladder-<k>@<rate>`: k prefixes whose lengths go geometrically from 1K to 16K."""
    first, last = _LADDER_TOKENS
    lengths = (round(first * (last / first) ** (n / (count - 1))) for n in range(count))
    return poisson(f"ladder-{count}@{rate_per_s:g}", tuple(lengths), rate_per_s)


def closed(prefix_tokens: int, users: int) -> ClosedCell:
    """`closed-<L>x<users>`: each user sends four requests on average, all together at least 256."""
    requests = max(_REQUESTS, _REQUESTS_PER_USER * users)
    return ClosedCell(f"closed-{prefix_tokens}x{users}", prefix_tokens, users, requests)


_NUMBERS = {  # in a name: how it is written, and what it becomes
    "k": (r"([2-9]|[1-9]\d{1,2})", int),
    "L": (r"([1-9]\d{0,5})", int),
    "users": (r"([1-9]\d{0,3})", int),
    "rate": (r"((?!0*\.?0*$)\d{1,4}(?:\.\d{1,2})?)", float),  # `:g` writes it without loss
}
_COUNTED = r"(.+@[\d.]+)x([1-9]\d{0,4})"
SHAPES: Mapping[str, Callable[..., PoissonCell | ClosedCell]] = {
    "poisson-<L>@<rate>": load,
    "mixed@<rate>": mixed,
    "prefixes-<k>x<L>@<rate>": equal_prefixes,
    "ladder-<k>@<rate>": ladder,
    "closed-<L>x<users>": closed,
}


def named(name: str) -> PoissonCell | ClosedCell | None:
    """The cell that a name of one of `SHAPES` describes, None where it has none of them.

    Behind a rate, `x<requests>` says how many requests are measured: `mixed@4x128`.
    """
    if counted := re.fullmatch(_COUNTED, name):
        cell = named(counted[1])
        return None if cell is None else _measuring(cell, int(counted[2]))
    for shape, make in SHAPES.items():
        numbers = [_NUMBERS[number] for number in re.findall(r"<(\w+)>", shape)]
        pattern = re.sub(r"<(\w+)>", lambda found: _NUMBERS[found[1]][0], shape)
        if match := re.fullmatch(pattern, name):
            texts = zip(numbers, match.groups(), strict=True)
            return make(*(to_number(text) for (_, to_number), text in texts))
    return None


def _measuring(cell: PoissonCell | ClosedCell, count: int) -> PoissonCell | None:
    """The same arrivals with so many measured requests; None where it is no cell with arrivals."""
    if isinstance(cell, ClosedCell):
        return None
    name = f"{cell.name}x{count}"
    if cell.window is None:
        return replace(cell, name=name, requests=count)
    skip, usual = cell.window
    return replace(cell, name=name, requests=cell.requests - usual + count, window=(skip, count))
