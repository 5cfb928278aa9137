"""The decision rung: would the simulator have chosen the settings that were best on the server?"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

STOCK = "stock"
COUNTS_FROM = 0.15  # best over worst - 1; with less between them there is nothing to decide


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one setting gave on one workload.

    Attributes:
        server: variant of the server.
        workload: what was sent, to which model, GPU and pool.
        setting: what may be chosen, in words.
        live, simulated: output tokens per second.
    """

    workload: str
    server: str
    setting: str
    live: float
    simulated: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Of one workload.

    Attributes:
        question: `server` (stock or ours), or `settings` (which of ours).
        settings: how many there were.
        best, chosen: what was best on the server, and what the simulator would have taken.
        loss: share of the best live rate that is lost with `chosen`.
        range: best live rate over the worst, less 1.
        simulated_range: the same two settings in the simulator.
    """

    question: str
    workload: str
    settings: int
    best: str
    chosen: str
    loss: float
    range: float
    simulated_range: float

    @property
    def points(self) -> float:
        """Simulated less live gain of the best setting over the worst, in percentage points."""
        return 100 * (self.simulated_range - self.range)

    @property
    def counts(self) -> bool:
        """Whether there was something to decide."""
        return self.range >= COUNTS_FROM


def decide(outcomes: Iterable[Outcome]) -> list[Decision]:
    """Of each workload: stock or ours, and which settings of ours; where there is a choice.

    Of several settings of ours the first question takes the best live one.
    """
    by_workload: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_workload[outcome.workload].append(outcome)
    found = []
    for workload, many in by_workload.items():
        ours = [one for one in many if one.server != STOCK]
        stock = [replace(one, setting=STOCK) for one in many if one.server == STOCK]
        if ours and stock:
            best = max(ours, key=lambda one: one.live)
            found.append(
                _decision("server", workload, [*stock, replace(best, setting=best.server)])
            )
        if len({one.setting for one in ours}) > 1:
            found.append(_decision("settings", workload, ours))
    return found


def _decision(question: str, workload: str, outcomes: list[Outcome]) -> Decision:
    settings: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        settings[outcome.setting].append(outcome)
    live = {name: _mean(o.live for o in found) for name, found in settings.items()}
    simulated = {name: _mean(o.simulated for o in found) for name, found in settings.items()}
    best, chosen = max(live, key=live.__getitem__), max(simulated, key=simulated.__getitem__)
    worst = min(live, key=live.__getitem__)
    return Decision(
        question,
        workload,
        len(settings),
        best,
        chosen,
        1 - live[chosen] / live[best],
        live[best] / live[worst] - 1,
        simulated[best] / simulated[worst] - 1,
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
