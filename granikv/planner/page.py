"""page: a plan as one self-contained HTML file - recommendation, table, figures, assumptions."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from granikv.planner.cells import CellResult
from granikv.planner.gain import CONFIDENCE
from granikv.planner.page_figures import (
    cascade_gain,
    distributions_figures,
    gain_figure,
    gpu_time_figure,
    pools_figures,
    speed_figures,
)
from granikv.planner.page_parts import Page, Section, Table
from granikv.planner.provenance import assumptions, parameters, subject
from granikv.planner.search import REFERENCE_FRACTION, Findings
from granikv.planner.verdict import Verdict
from granikv.planner.words import OBJECTIVES


def comparison(findings: Findings, verdict: Verdict | None) -> Table:
    """Headers, and cells by name of the row: stock, cascade, each fraction, of the nominal seed.

    Rows without a nominal run are left out; without a verdict there are no gains.
    """
    has_slo = findings.task.slo.is_set
    headers = ["HOT fraction", "gain over stock", "tokens/s"]
    headers += ["goodput, req/s"] if has_slo else []
    headers += ["TTFT s, p50 / p95", "TPOT ms, p50 / p95", "HOT share"]
    headers += ["HOT misses", "cached", "retracted"]
    runs = {"stock engine": findings.of("sglang"), "cascade": findings.of("cascade")}
    runs |= {f"{f:g}": findings.of("granikv", f) for f in findings.fractions}
    gains = _gains(verdict)
    nominal = {name: found[0] for name, found in runs.items() if found and not found[0].cell.seed}
    return tuple(headers), {
        name: (gains.get(name, ""), *_figures(result, has_slo)) for name, result in nominal.items()
    }


def _gains(verdict: Verdict | None) -> dict[str, str]:
    """Gain over the stock engine as text, by name of the row."""
    if verdict is None:
        return {}
    cascade = {"cascade": f"{cascade_gain(verdict):.2f}x"}
    return cascade | {f"{point.fraction:g}": point.gain.text for point in verdict.points}


def _figures(result: CellResult, has_slo: bool) -> Iterable[str]:
    summary = result.summary
    yield f"{summary.throughput_tokens_per_s:,.0f}"
    if has_slo:
        yield f"{summary.goodput_requests_per_s:.2f}"
    yield f"{summary.ttft_s.p50:,.2f} / {summary.ttft_s.p95:,.2f}"
    yield f"{summary.tpot_s.p50 * 1e3:.1f} / {summary.tpot_s.p95 * 1e3:.1f}"
    yield f"{summary.hot_share:.1%}"
    yield f"{summary.hot_misses:,}"
    yield f"{summary.cached_share:.1%}"
    yield f"{summary.retractions:,}"


def write_page(
    findings: Findings, verdict: Verdict, path: Path, facts: Mapping[str, str] | None = None
) -> None:
    """Write the page; `facts` are further lines of its assumptions, by name.

    The file needs nothing else: plotly.js is inside.
    """
    Page(
        title="plan",
        subject=subject(findings.task),
        is_partial=findings.is_partial,
        sentences=verdict.sentences,
        cards=_cards(verdict),
        table=comparison(findings, verdict),
        best=f"{verdict.fraction:g}" if verdict.helps else "stock engine",
        sections=_sections(findings, verdict),
        assumptions=dict(facts or {}) | assumptions(findings),
        parameters=parameters(findings.task),
    ).write(path)


def _sections(findings: Findings, verdict: Verdict) -> list[Section]:
    best = verdict.best
    runs = {
        "stock": verdict.stock,
        "cascade": findings.of("cascade")[0],
        f"GraniKV at {best.fraction:g}": best.nominal,
    }
    gain_note = (
        f"In {OBJECTIVES[verdict.objective]}. The band is a {CONFIDENCE:.0%} interval from seeds "
        "that each draw the cost model from its stated errors; green is as good as the best."
    )
    pools_note = "First replica; rows: its decode batch."
    cdf_note = "Share of requests at or below a value."
    time_note = "By term of the cost model."
    return [
        Section("Gain over the stock engine", gain_note, {"": gain_figure(verdict)}),
        Section(
            "Speed over the pool fraction", "Nominal cost model.", speed_figures(runs, verdict)
        ),
        Section("Pool occupancy over time", pools_note, pools_figures(runs)),
        Section("Latency distributions", cdf_note, distributions_figures(runs)),
        Section("Where GPU time goes", time_note, {"": gpu_time_figure(runs)}),
    ]


def _cards(verdict: Verdict) -> dict[str, str]:
    low, high = verdict.flat
    who = "" if verdict.helps else "best tried, "
    cards = {
        "HOT pool fraction": f"{verdict.fraction:g}" if verdict.helps else "none",
        f"{who}over the stock engine": verdict.gain.text,
        f"{who}over batch-global cascade": verdict.over_cascade.text,
    }
    if verdict.over_reference is not None:
        cards[f"over fraction {REFERENCE_FRACTION:g}"] = verdict.over_reference.text
    if low < high:
        cards["equally good, within the noise"] = f"{low:g} to {high:g}"
    return cards
