"""Where a server's queue begins: the rate of arrivals at which TTFT p50 passes a second.

Near saturation TTFT itself says little: a server that is 2 % slower may wait ten times as long. The
rate at which waiting begins is what a planner asks for.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log

LIMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """One run at one rate.

    Attributes:
        workload: everything but the rate, in words.
        rate_per_s: arrivals.
        live_s, simulated_s: TTFT p50.
    """

    workload: str
    rate_per_s: float
    live_s: float
    simulated_s: float


@dataclass(frozen=True, slots=True)
class Saturation:
    """Of one workload; rates in requests per second, None where no two runs are on both sides of
    the limit.
    """

    workload: str
    live_per_s: float | None
    simulated_per_s: float | None

    @property
    def error(self) -> float | None:
        """Signed relative error of the rate."""
        if self.live_per_s is None or self.simulated_per_s is None:
            return None
        return self.simulated_per_s / self.live_per_s - 1


def saturations(loads: Iterable[Load]) -> list[Saturation]:
    """Of each workload that ran at two rates or more."""
    by_workload: dict[str, dict[float, list[Load]]] = defaultdict(lambda: defaultdict(list))
    for load in loads:
        by_workload[load.workload][load.rate_per_s].append(load)
    return [
        Saturation(
            workload,
            _crossing([(rate, _mean(one.live_s for one in many)) for rate, many in rates]),
            _crossing([(rate, _mean(one.simulated_s for one in many)) for rate, many in rates]),
        )
        for workload, found in by_workload.items()
        if len(rates := sorted(found.items())) > 1
    ]


def _crossing(points: Sequence[tuple[float, float]]) -> float | None:
    """The rate at which TTFT passes the limit; between two points its logarithm is a line."""
    for (rate, ttft), (next_rate, next_ttft) in pairwise(points):
        if ttft <= LIMIT_S < next_ttft:
            share = log(LIMIT_S / ttft) / log(next_ttft / ttft)
            return rate + share * (next_rate - rate)
    return None


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
