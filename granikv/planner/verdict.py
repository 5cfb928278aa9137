"""Verdict: what the cells say, in numbers: the best fraction, its gain, how sure that is."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from granikv.planner.cells import CellResult
from granikv.planner.objective import Objective, score
from granikv.planner.search import REFERENCE_FRACTION, Findings, is_overloaded

Kind = Literal["use", "no_benefit", "overloaded"]

# Two-sided. The interval is for one more draw, since the real machine is one draw of the cost
# model's errors.
CONFIDENCE = 0.9
# A gain below this is not worth a changed server, whatever its interval says.
_WORTHWHILE = 1.01
# Mean gains this close are the same.
_EQUAL = 0.003


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


@dataclass(frozen=True, slots=True)
class Point:
    """One pool fraction against the stock engine."""

    fraction: float
    gain: Gain
    nominal: CellResult


@dataclass(frozen=True, slots=True)
class Verdict:
    """The recommendation.

    Attributes:
        helps: whether the best fraction beats the stock engine by more than the noise.
        best: the best fraction; of equally good ones the smallest, which leaves COLD most.
        stock: the stock engine's nominal run.
        flat: lowest and highest fraction that the noise cannot tell from the best.
        over_reference: gain over fraction 0.2, None when that is the best or was not run.
        over_cascade: gain over batch-global cascade.
        sentences: the recommendation in words, most important first (`words.recommend`).
    """

    kind: Kind
    objective: Objective
    helps: bool
    best: Point
    stock: CellResult
    over_reference: Gain | None
    over_cascade: Gain
    flat: tuple[float, float]
    points: tuple[Point, ...]
    sentences: tuple[str, ...] = ()

    @property
    def fraction(self) -> float | None:
        """The recommended pool fraction, None for the stock engine."""
        return self.best.fraction if self.helps else None

    @property
    def gain(self) -> Gain:
        """The best fraction's gain over the stock engine."""
        return self.best.gain


def judge(findings: Findings) -> Verdict:
    """Compare all pool fractions with the stock engine, seed by seed.

    Raises:
        ValueError: the nominal seed is incomplete (an interrupted search).
    """
    stock = findings.of("sglang")
    cascade = findings.of("cascade")
    if not stock or not cascade or not all(findings.of("granikv", f) for f in findings.fractions):
        raise ValueError("findings must hold the nominal seed of every cell")
    objective = _objective(findings, stock[0])
    points = tuple(
        Point(f, _gain(findings.of("granikv", f), stock, objective), findings.of("granikv", f)[0])
        for f in findings.fractions
    )
    best = _best(points)
    best_runs = findings.of("granikv", best.fraction)
    flat = _flat_region(findings, best, points, objective)
    reference = findings.of("granikv", REFERENCE_FRACTION)
    over_reference = (
        _gain(best_runs, reference, objective)
        if reference and best.fraction != REFERENCE_FRACTION
        else None
    )
    over_cascade = _gain(best_runs, cascade, objective)
    ratios = _log_ratios(best_runs, stock, objective)
    # The best of several fractions looks good by luck alone: its interval is widened for that.
    low = float(np.mean(ratios)) - _half_width(ratios, comparisons=len(points))
    helps = best.gain.mean >= _WORTHWHILE and low > 0.0
    overloaded = is_overloaded(best.nominal)
    kind: Kind = "overloaded" if overloaded else "use" if helps else "no_benefit"
    return Verdict(
        kind=kind,
        objective=objective,
        helps=helps,
        best=best,
        stock=stock[0],
        over_reference=over_reference,
        over_cascade=over_cascade,
        flat=flat,
        points=points,
    )


def _best(points: tuple[Point, ...]) -> Point:
    """The smallest fraction whose mean gain is as good as the largest one's."""
    top = max(point.gain.mean for point in points)
    return next(point for point in points if point.gain.mean >= top * (1 - _EQUAL))


def _objective(findings: Findings, stock: CellResult) -> Objective:
    """Goodput under an SLO; throughput when the stock engine cannot keep up or all comes at once;
    else latency.
    """
    if findings.task.slo.is_set:
        return "goodput"
    if is_overloaded(stock) or stock.summary.offered_s < 1.0:
        return "throughput"
    return "latency"


def _log_ratios(
    runs: list[CellResult], base: list[CellResult], objective: Objective
) -> list[float]:
    by_seed = {result.cell.seed: result for result in base}
    ratios = []
    for result in runs:
        if result.cell.seed in by_seed:
            mine = score(result.summary, objective)
            theirs = score(by_seed[result.cell.seed].summary, objective)
            # A score of zero (nothing met the SLO) has no logarithm; a tiny one keeps the order.
            ratios.append(math.log(max(mine, 1e-9) / max(theirs, 1e-9)))
    return ratios


def _gain(runs: list[CellResult], base: list[CellResult], objective: Objective) -> Gain:
    """Paired by seed: both sides saw the same trace and the same drawn cost model."""
    ratios = _log_ratios(runs, base, objective)
    mean = float(np.mean(ratios))
    half = _half_width(ratios)
    return Gain(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def _half_width(ratios: list[float], comparisons: int = 1) -> float:
    """Half of the Student interval for one more draw; Bonferroni's for the best of several."""
    count = len(ratios)
    if count < 2:
        return 0.0
    tail = (1 - CONFIDENCE) / 2 / comparisons
    quantile = float(stats.t.ppf(1 - tail, count - 1))
    return quantile * float(np.std(ratios, ddof=1)) * math.sqrt(1 + 1 / count)


def _flat_region(
    findings: Findings, best: Point, points: tuple[Point, ...], objective: Objective
) -> tuple[float, float]:
    """The fractions around the best that are as good as it in at least one seed."""
    best_runs = findings.of("granikv", best.fraction)

    def is_level(point: Point) -> bool:
        ratios = _log_ratios(findings.of("granikv", point.fraction), best_runs, objective)
        return max(ratios) >= math.log(1 - _EQUAL)

    place = points.index(best)
    low = high = place
    while low > 0 and is_level(points[low - 1]):
        low -= 1
    while high + 1 < len(points) and is_level(points[high + 1]):
        high += 1
    return points[low].fraction, points[high].fraction
