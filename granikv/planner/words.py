"""Words: a verdict as sentences for people - what to do, why, what limits it."""

from typing import Literal

from granikv.planner.cells import CellResult
from granikv.planner.objective import Objective
from granikv.planner.search import MAX_REPLICAS, REFERENCE_FRACTION, SLO_SHARE, Findings
from granikv.planner.verdict import Point, Verdict
from granikv.sim.metrics import Summary

OBJECTIVES: dict[Objective, str] = {
    "goodput": "requests per second within the SLO",
    "throughput": "output tokens per second",
    "latency": "mean end-to-end latency (as speed-up)",
}
_MISS_REASONS = {
    "too_long": "prefix longer than HOT",
    "no_room": "HOT full",
    "fragmented": "no run long enough",
}
# Below this share of KV reads in common, sharing is named as the reason why nothing helps.
_LITTLE_SHARING = 0.05


def recommend(verdict: Verdict, findings: Findings) -> tuple[str, ...]:
    """The recommendation, most important sentence first."""
    lines: list[str] = []
    if verdict.kind == "overloaded":
        lines.append(_overloaded(findings))
    if verdict.helps:
        lines.append(_use(verdict, findings))
        lines.extend(_limits(verdict.points, verdict.best))
    else:
        lines.append(_no_benefit(verdict))
    if findings.task.slo.is_set:
        lines.append(_slo(verdict.best.nominal, verdict.stock))
    return tuple(lines)


def _use(verdict: Verdict, findings: Findings) -> str:
    size, fraction = findings.task.server.size_tokens, verdict.best.fraction
    text = (
        f"Boot with --hot-fraction {fraction:g} ({int(fraction * size):,} of {size:,} KV tokens "
        f"are HOT): {verdict.gain.text} the stock engine in {OBJECTIVES[verdict.objective]}"
    )
    if verdict.over_reference is not None:
        text += f", {verdict.over_reference.text} fraction {REFERENCE_FRACTION:g}"
    text += f", {verdict.over_cascade.text} batch-global cascade."
    low, high = verdict.flat
    if low < high:
        text += f" Anything from {low:g} to {high:g} is within the noise of that."
    return text


def _no_benefit(verdict: Verdict) -> str:
    stock, best = verdict.stock, verdict.best
    if stock.summary.shared_read_share < _LITTLE_SHARING:
        why = (
            f"only {stock.summary.shared_read_share:.1%} of the KV reads of decoding are of tokens "
            "that two or more running requests share, so there is little for a HOT slab to save"
        )
    elif best.nominal.summary.peak_hot_used == 0:
        why = "no prefix was ever placed in HOT" + _misses(best.nominal)
    else:
        why = (
            f"decode attention is {stock.term_share.get('attention', 0.0):.0%} of the stock "
            "engine's GPU time, and what HOT saves of it is within the noise or lost to a smaller "
            "COLD pool"
        )
    return (
        f"No benefit here, because {why}; the best fraction tried ({best.fraction:g}) gives "
        f"{verdict.gain.text} of the stock engine. Keep the stock engine for this traffic."
    )


def _limits(points: tuple[Point, ...], best: Point) -> list[str]:
    """What stops smaller and larger pools."""
    place = points.index(best)
    lines = []
    if place > 0:
        lines.append(_below(points[place - 1], best))
    if place + 1 < len(points):
        lines.append(_above(points[place + 1], best))
    return [line for line in lines if line]


def _below(below: Point, best: Point) -> str:
    fewer, here = below.nominal.summary.hot_misses, best.nominal.summary.hot_misses
    if fewer <= here:
        return ""
    return (
        f"Below it HOT misses limit: {fewer} at {below.fraction:g} against {here} at "
        f"{best.fraction:g}{_misses(below.nominal)}."
    )


def _above(above: Point, best: Point) -> str:
    more, here = above.nominal.summary, best.nominal.summary
    limit = "Above it COLD pressure limits:"
    if more.retractions > here.retractions:
        return (
            f"{limit} {more.retractions} retractions at {above.fraction:g} against "
            f"{here.retractions}."
        )
    if more.cached_share < here.cached_share - 0.002:
        return (
            f"{limit} at {above.fraction:g} the cache serves {more.cached_share:.1%} of the prompt "
            f"tokens instead of {here.cached_share:.1%}."
        )
    if more.ttft_s.mean > 1.02 * here.ttft_s.mean:
        return (
            f"{limit} at {above.fraction:g} mean TTFT rises from {here.ttft_s.mean * 1e3:.0f} to "
            f"{more.ttft_s.mean * 1e3:.0f} ms."
        )
    return "A larger pool changes nothing: HOT already holds every prefix that is worth a slab."


def _misses(result: CellResult) -> str:
    if not result.hot_misses:
        return ""
    reasons = sorted(result.hot_misses.items())
    return " (" + ", ".join(f"{_MISS_REASONS.get(k, k)} {v}" for k, v in reasons) + ")"


def _overloaded(findings: Findings) -> str:
    needed = findings.needed_replicas.get("granikv")
    stock = findings.needed_replicas.get("sglang")
    if needed is None:
        return (
            f"Overloaded: requests arrive faster than {findings.replicas} replica(s) serve them, "
            f"and {MAX_REPLICAS} are not enough either."
        )
    text = f"Overloaded: needs {needed} replicas at this rate"
    if stock is not None and stock != needed:
        text += f" (the stock engine {stock})"
    return f"{text}; the figures below are for {findings.replicas}."


def _slo(best: CellResult, stock: CellResult) -> str:
    mine, theirs = best.summary, stock.summary
    text = (
        f"{mine.slo_share:.1%} of the requests meet the SLO (stock {theirs.slo_share:.1%}); "
        f"TTFT p95 {_p95(mine, 'ttft')} ms (stock {_p95(theirs, 'ttft')}), "
        f"TPOT p95 {_p95(mine, 'tpot')} ms (stock {_p95(theirs, 'tpot')})"
    )
    return text + ("." if mine.slo_share >= SLO_SHARE else f": less than {SLO_SHARE:.0%}.")


def _p95(summary: Summary, name: Literal["ttft", "tpot"]) -> str:
    if name == "ttft":
        return f"{summary.ttft_s.p95 * 1e3:.0f}"
    return f"{summary.tpot_s.p95 * 1e3:.1f}"
