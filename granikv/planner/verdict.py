"""Verdict: what the cells say - a pool fraction with its interval, or why none helps - in numbers and in words."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from granikv.planner.cells import CellResult
from granikv.planner.search import (
    MAX_REPLICAS,
    REFERENCE_FRACTION,
    SLO_SHARE,
    Findings,
    is_overloaded,
)
from granikv.sim.metrics import Summary

Objective = Literal["goodput", "throughput", "latency"]
Kind = Literal["use", "no_benefit", "overloaded"]

# Two-sided. The interval is for one more draw, since the real machine is one draw of the cost model's errors.
CONFIDENCE = 0.9
# A gain below this is not worth a changed server, whatever its interval says.
_WORTHWHILE = 1.01

OBJECTIVES: dict[Objective, str] = {
    "goodput": "requests per second within the SLO",
    "throughput": "output tokens per second",
    "latency": "mean end-to-end latency (as speed-up)",
}


@dataclass(frozen=True, slots=True)
class Gain:
    """A ratio of scores (above 1 is better) with its interval; equal bounds when there is one seed only."""

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
        fraction: recommended pool fraction, None for the stock engine.
        flat: lowest and highest fraction that the noise cannot tell from the best.
        over_reference: gain over fraction 0.2, None when that is the best or was not run.
        over_cascade: gain over batch-global cascade.
        sentences: the recommendation in words, most important first.
    """

    kind: Kind
    objective: Objective
    fraction: float | None
    gain: Gain
    over_reference: Gain | None
    over_cascade: Gain
    flat: tuple[float, float]
    points: tuple[Point, ...]
    sentences: tuple[str, ...]


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
    best = max(points, key=lambda point: point.gain.mean)
    best_runs = findings.of("granikv", best.fraction)
    flat = _flat_region(findings, best, points, objective)
    reference = findings.of("granikv", REFERENCE_FRACTION)
    over_reference = (
        _gain(best_runs, reference, objective)
        if reference and best.fraction != REFERENCE_FRACTION
        else None
    )
    over_cascade = _gain(best_runs, cascade, objective)
    helps = best.gain.mean >= _WORTHWHILE and best.gain.low > 1.0
    overloaded = is_overloaded(best.nominal)
    kind: Kind = "overloaded" if overloaded else "use" if helps else "no_benefit"
    verdict = Verdict(
        kind=kind,
        objective=objective,
        fraction=best.fraction if helps else None,
        gain=best.gain,
        over_reference=over_reference,
        over_cascade=over_cascade,
        flat=flat,
        points=points,
        sentences=(),
    )
    return _with_words(verdict, findings, best, stock[0])


def score(result: CellResult, objective: Objective) -> float:
    """What a cell achieved; larger is better."""
    summary = result.summary
    if objective == "goodput":
        return summary.goodput_requests_per_s
    if objective == "throughput":
        return summary.throughput_tokens_per_s
    return 1.0 / summary.e2e_s.mean if summary.e2e_s.mean else 0.0


def _objective(findings: Findings, stock: CellResult) -> Objective:
    """Goodput under an SLO; throughput when the stock engine cannot keep up or all comes at once; else latency."""
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
            mine, theirs = score(result, objective), score(by_seed[result.cell.seed], objective)
            # A score of zero (nothing met the SLO) has no logarithm; a tiny one keeps the order.
            ratios.append(math.log(max(mine, 1e-9) / max(theirs, 1e-9)))
    return ratios


def _gain(runs: list[CellResult], base: list[CellResult], objective: Objective) -> Gain:
    """Paired by seed: both sides saw the same trace and the same drawn cost model."""
    ratios = _log_ratios(runs, base, objective)
    mean = float(np.mean(ratios))
    half = _half_width(ratios)
    return Gain(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def _half_width(ratios: list[float]) -> float:
    """Half of the Student interval for one more draw."""
    count = len(ratios)
    if count < 2:
        return 0.0
    quantile = float(stats.t.ppf(0.5 + CONFIDENCE / 2, count - 1))
    return quantile * float(np.std(ratios, ddof=1)) * math.sqrt(1 + 1 / count)


def _flat_region(
    findings: Findings, best: Point, points: tuple[Point, ...], objective: Objective
) -> tuple[float, float]:
    """The fractions around the best whose difference to it is inside the noise."""
    best_runs = findings.of("granikv", best.fraction)

    def is_level(point: Point) -> bool:
        ratios = _log_ratios(findings.of("granikv", point.fraction), best_runs, objective)
        return float(np.mean(ratios)) + _half_width(ratios) >= -1e-9

    place = points.index(best)
    low = high = place
    while low > 0 and is_level(points[low - 1]):
        low -= 1
    while high + 1 < len(points) and is_level(points[high + 1]):
        high += 1
    return points[low].fraction, points[high].fraction


# ---------------------------------------------------------------------- words


def _with_words(verdict: Verdict, findings: Findings, best: Point, stock: CellResult) -> Verdict:
    lines: list[str] = []
    if verdict.kind == "overloaded":
        lines.append(_overload_words(findings))
    if verdict.fraction is None:
        lines.append(_no_benefit_words(verdict, best, stock))
    else:
        lines.append(_use_words(verdict, findings))
        lines.extend(_limit_words(verdict.points, best))
    if findings.task.slo.is_set:
        lines.append(_slo_words(best.nominal, stock))
    return Verdict(
        kind=verdict.kind,
        objective=verdict.objective,
        fraction=verdict.fraction,
        gain=verdict.gain,
        over_reference=verdict.over_reference,
        over_cascade=verdict.over_cascade,
        flat=verdict.flat,
        points=verdict.points,
        sentences=tuple(lines),
    )


def _use_words(verdict: Verdict, findings: Findings) -> str:
    size = findings.task.server.size_tokens
    tokens = int((verdict.fraction or 0.0) * size)
    text = (
        f"Boot with --hot-fraction {verdict.fraction:g} ({tokens:,} of {size:,} KV tokens are HOT): "
        f"{verdict.gain.text} the stock engine in {OBJECTIVES[verdict.objective]}"
    )
    if verdict.over_reference is not None:
        text += f", {verdict.over_reference.text} fraction {REFERENCE_FRACTION:g}"
    text += f", {verdict.over_cascade.text} batch-global cascade."
    low, high = verdict.flat
    if low < high:
        text += f" Anything from {low:g} to {high:g} is within the noise of that."
    return text


def _no_benefit_words(verdict: Verdict, best: Point, stock: CellResult) -> str:
    summary = best.nominal.summary
    gain = f"the best fraction tried ({best.fraction:g}) gives {verdict.gain.text} of the stock engine"
    if stock.summary.shared_read_share < 0.05:
        why = (
            f"only {stock.summary.shared_read_share:.1%} of the KV reads of decoding are of tokens that two or "
            "more running requests share, so there is little for a HOT slab to save"
        )
    elif best.nominal.promoted_tokens == 0 and summary.peak_hot_used == 0:
        why = "no prefix was ever placed in HOT" + _miss_words(best.nominal)
    else:
        attention = stock.term_share.get("attention", 0.0)
        why = (
            f"decode attention is {attention:.0%} of the stock engine's GPU time, and what HOT saves of it is "
            "within the noise or lost to a smaller COLD pool"
        )
    return f"No benefit here, because {why}; {gain}. Keep the stock engine for this traffic."


def _limit_words(points: tuple[Point, ...], best: Point) -> list[str]:
    """What stops smaller and larger pools."""
    place = points.index(best)
    lines = []
    if place > 0:
        lines.append(_below_words(points[place - 1], best))
    if place + 1 < len(points):
        lines.append(_above_words(points[place + 1], best))
    return [line for line in lines if line]


def _below_words(below: Point, best: Point) -> str:
    fewer = below.nominal.summary.hot_misses - best.nominal.summary.hot_misses
    if fewer <= 0:
        return ""
    return (
        f"Below it HOT misses limit: {below.nominal.summary.hot_misses} at {below.fraction:g} against "
        f"{best.nominal.summary.hot_misses} at {best.fraction:g}{_miss_words(below.nominal)}."
    )


def _above_words(above: Point, best: Point) -> str:
    more, here = above.nominal.summary, best.nominal.summary
    if more.retractions > here.retractions:
        return (
            f"Above it COLD pressure limits: {more.retractions} retractions at {above.fraction:g} against "
            f"{here.retractions}."
        )
    if more.cached_share < here.cached_share - 0.002:
        return (
            f"Above it COLD pressure limits: the cache then serves {more.cached_share:.1%} of the prompt tokens "
            f"instead of {here.cached_share:.1%}."
        )
    if more.ttft_s.mean > 1.02 * here.ttft_s.mean:
        return (
            f"Above it COLD pressure limits: mean TTFT rises from {here.ttft_s.mean * 1e3:.0f} to "
            f"{more.ttft_s.mean * 1e3:.0f} ms."
        )
    return "A larger pool changes nothing: HOT already holds every prefix that is worth a slab."


def _miss_words(result: CellResult) -> str:
    if not result.hot_misses:
        return ""
    reasons = {
        "too_long": "prefix longer than HOT",
        "no_room": "HOT full",
        "fragmented": "no run long enough",
    }
    parts = ", ".join(f"{reasons.get(k, k)} {v}" for k, v in sorted(result.hot_misses.items()))
    return f" ({parts})"


def _overload_words(findings: Findings) -> str:
    needed = findings.needed_replicas.get("granikv")
    stock = findings.needed_replicas.get("sglang")
    if needed is None:
        return (
            f"Overloaded: requests arrive faster than {findings.replicas} replica(s) serve them, and "
            f"{MAX_REPLICAS} are not enough either."
        )
    text = f"Overloaded: needs {needed} replicas at this rate"
    if stock is not None and stock != needed:
        text += f" (the stock engine {stock})"
    return f"{text}; the figures below are for {findings.replicas}."


def _slo_words(best: CellResult, stock: CellResult) -> str:
    mine, theirs = best.summary, stock.summary
    text = (
        f"{mine.slo_share:.1%} of the requests meet the SLO (stock {theirs.slo_share:.1%}); "
        f"TTFT p95 {_ms(mine, 'ttft')} ms (stock {_ms(theirs, 'ttft')}), "
        f"TPOT p95 {_ms(mine, 'tpot')} ms (stock {_ms(theirs, 'tpot')})"
    )
    return text + ("." if mine.slo_share >= SLO_SHARE else f": less than {SLO_SHARE:.0%}.")


def _ms(summary: Summary, name: Literal["ttft", "tpot"]) -> str:
    values = summary.ttft_s if name == "ttft" else summary.tpot_s
    return f"{values.p95 * 1e3:.0f}" if name == "ttft" else f"{values.p95 * 1e3:.1f}"
