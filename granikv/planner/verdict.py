"""Verdict: what the cells say, in numbers: the best fraction, its gain, how sure that is."""

import math
from dataclasses import dataclass
from typing import Literal

from granikv.planner.cells import CellResult
from granikv.planner.gain import WORTHWHILE, Gain, gain, log_ratios
from granikv.planner.objective import Objective
from granikv.planner.search import REFERENCE_FRACTION, Findings, is_overloaded

Kind = Literal["use", "no_benefit", "overloaded"]

# Mean gains this close are the same.
_EQUAL = 0.003


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
        Point(f, gain(findings.of("granikv", f), stock, objective), findings.of("granikv", f)[0])
        for f in findings.fractions
    )
    best = _best(points)
    best_runs = findings.of("granikv", best.fraction)
    flat = _flat_region(findings, best, points, objective)
    reference = findings.of("granikv", REFERENCE_FRACTION)
    over_reference = (
        gain(best_runs, reference, objective)
        if reference and best.fraction != REFERENCE_FRACTION
        else None
    )
    over_cascade = gain(best_runs, cascade, objective)
    cautious = gain(best_runs, stock, objective, comparisons=len(points))
    helps = best.gain.mean >= WORTHWHILE and cautious.low > 1.0
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


def _flat_region(
    findings: Findings, best: Point, points: tuple[Point, ...], objective: Objective
) -> tuple[float, float]:
    """The fractions around the best that are as good as it in at least one seed."""
    best_runs = findings.of("granikv", best.fraction)

    def is_level(point: Point) -> bool:
        ratios = log_ratios(findings.of("granikv", point.fraction), best_runs, objective)
        return max(ratios) >= math.log(1 - _EQUAL)

    place = points.index(best)
    low = high = place
    while low > 0 and is_level(points[low - 1]):
        low -= 1
    while high + 1 < len(points) and is_level(points[high + 1]):
        high += 1
    return points[low].fraction, points[high].fraction
