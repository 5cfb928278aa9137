"""Gain: how much better one row of runs is than another, paired by seed, and how sure that is."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from granikv.planner.cells import CellResult
from granikv.planner.objective import Objective, score

# Two-sided. The interval is for one more draw, since the real machine is one draw of the cost
# model's errors.
CONFIDENCE = 0.9
# A gain below this is not worth a changed server, whatever its interval says.
WORTHWHILE = 1.01


@dataclass(frozen=True, slots=True)
class Gain:
    """A ratio of scores (above 1 is better) with its interval; equal bounds when there is one seed
    only.
    """

    mean: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """As in `1.42x (1.31-1.55)`."""
        if self.low == self.high:
            return f"{self.mean:.2f}x"
        return f"{self.mean:.2f}x ({self.low:.2f}-{self.high:.2f})"


def log_ratios(
    runs: Iterable[CellResult], base: Iterable[CellResult], objective: Objective
) -> list[float]:
    """Logarithms of the ratios of scores, of the seeds that both sides have."""
    by_seed = {result.cell.seed: result for result in base}
    ratios = []
    for result in runs:
        if result.cell.seed in by_seed:
            mine = score(result.summary, objective)
            theirs = score(by_seed[result.cell.seed].summary, objective)
            # A score of zero (nothing met the SLO) has no logarithm; a tiny one keeps the order.
            ratios.append(math.log(max(mine, 1e-9) / max(theirs, 1e-9)))
    return ratios


def gain(
    runs: Iterable[CellResult],
    base: Iterable[CellResult],
    objective: Objective,
    comparisons: int = 1,
) -> Gain:
    """Paired by seed: both sides saw the same trace and the same drawn cost model.

    The best of several `comparisons` looks good by luck alone: its interval is widened for that.
    """
    ratios = log_ratios(runs, base, objective)
    mean, half = float(np.mean(ratios)), _half_width(ratios, comparisons)
    return Gain(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def _half_width(ratios: list[float], comparisons: int) -> float:
    """Half of the Student interval for one more draw; Bonferroni's for the best of several."""
    count = len(ratios)
    if count < 2:
        return 0.0
    tail = (1 - CONFIDENCE) / 2 / comparisons
    quantile = float(stats.t.ppf(1 - tail, count - 1))
    return quantile * float(np.std(ratios, ddof=1)) * math.sqrt(1 + 1 / count)
