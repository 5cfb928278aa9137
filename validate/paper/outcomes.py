"""Paper outcomes: what a simulated cell found, and what is made of several of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from granikv.validate.paper.settings import Cell


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one cell found.

    Attributes:
        tokens_per_s: output tokens per second; past saturation, of the steady window, otherwise of
            the whole run.
        mean_rows: decode rows of the whole run, weighted by steps.
        dense_share: share of decode steps with a dense pass, in the same window.
        dense_per_s: such steps per second of it.
    """

    tokens_per_s: float
    tpot_p50_s: float
    ttft_p50_s: float
    mean_rows: float
    dense_share: float
    dense_per_s: float


@dataclass(frozen=True, slots=True)
class Question:
    """A claim's id, the setting in words, the cells to simulate and what to make of them.

    Without cells, `value` asks the cost model alone.
    """

    claim: str
    setting: str
    cells: tuple[Cell, ...]
    value: Callable[[Sequence[Outcome]], float]


def gain(outcomes: Sequence[Outcome]) -> float:
    """Throughput of the last over that of the first."""
    return outcomes[-1].tokens_per_s / outcomes[0].tokens_per_s


def gains(outcomes: Sequence[Outcome]) -> list[float]:
    """The gain of each pair."""
    return [gain(outcomes[start : start + 2]) for start in range(0, len(outcomes), 2)]
