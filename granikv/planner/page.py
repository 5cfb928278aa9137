"""page: a plan as one self-contained HTML file - recommendation, table, figures, assumptions."""

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from string import Template

import plotly.graph_objects as go

from granikv import __version__
from granikv.cost_models.coverage import ORDER
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
from granikv.planner.plan import coverage
from granikv.planner.search import REFERENCE_FRACTION, Findings
from granikv.planner.verdict import Verdict
from granikv.planner.words import OBJECTIVES

_CONFIG = {"displayModeBar": False, "responsive": True}
_COVERAGE = {
    "measured range": "fitted, inside the measured range",
    "extrapolated": "fitted, but asked beyond what was measured",
    "datasheet": "not measured, stated or published values",
}
_TERM_NAMES = {
    "gemm": "matrix products",
    "paged": "paged attention",
    "private_memory_efficiency": "private tokens",
    "shared_page_cost": "shared pages",
    "extend": "prefill attention",
    "dense": "dense prefix pass",
    "all_reduce": "all-reduce",
    "elementwise_memory_efficiency": "small kernels",
    "cascade_compute_efficiency": "cascade prefix pass",
    "fused_latency_ns": "fused launch",
    "fused_exposed_share": "overlap in a fused launch",
    "merge_latency_ns": "merge",
}
_NOT_MODELLED = (
    "waves and tails of kernels, clocks and power limits; tokenisation, the network and sampling "
    "beyond a host time per step and row; other users of the GPU, failures and restarts"
)

Table = tuple[tuple[str, ...], dict[str, tuple[str, ...]]]


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


def provenance_line(findings: Findings) -> str:
    """What the answer rests on, the least sound part of the cost model last."""
    by_coverage: dict[str, list[str]] = {}
    for term, found in coverage(findings).items():
        by_coverage.setdefault(found, []).append(_TERM_NAMES.get(term, term))
    parts = [
        f"{_COVERAGE[name]}: {', '.join(by_coverage[name])}"
        for name in ORDER
        if name in by_coverage
    ]
    return f"Cost model of {findings.task.params.gpu}; {'; '.join(parts)}."


def write_page(
    findings: Findings, verdict: Verdict, path: Path, facts: Mapping[str, str] | None = None
) -> None:
    """Write the page; `facts` are further lines of its assumptions, by name.

    The file needs nothing else: plotly.js is inside.
    """
    task = findings.task
    subject = f"{task.trace.name} on {task.model.name}, {task.hardware.name}"
    subject += f" x {task.tp}" if task.tp > 1 else ""
    recommended = f"{verdict.fraction:g}" if verdict.helps else "stock engine"
    body = _PAGE.substitute(
        subject=escape(subject),
        warning=_WARNING if findings.is_partial else "",
        cards=_cards(verdict),
        sentences="".join(f"<p>{escape(sentence)}</p>" for sentence in verdict.sentences),
        table=_table(*comparison(findings, verdict), best=recommended),
        figures=_sections(findings, verdict),
        assumptions=_assumptions(findings, facts or {}),
        parameters=_parameters(findings),
        version=escape(__version__),
    )
    path.write_text(body, encoding="utf-8")


# ---------------------------------------------------------------------- figures


def _sections(findings: Findings, verdict: Verdict) -> str:
    """All figures as HTML; plotly.js comes with the first one."""
    best = verdict.best
    runs = {
        "stock": verdict.stock,
        "cascade": findings.of("cascade")[0],
        f"GraniKV at {best.fraction:g}": best.nominal,
    }
    gain_caption = (
        f"In {OBJECTIVES[verdict.objective]}. The band is a {CONFIDENCE:.0%} interval from seeds "
        "that each draw the cost model from its stated errors; green is as good as the best."
    )
    sections: list[tuple[str, str, dict[str, go.Figure]]] = [
        ("Gain over the stock engine", gain_caption, {"": gain_figure(verdict)}),
        ("Speed over the pool fraction", "Nominal cost model.", speed_figures(runs, verdict)),
        ("Pool occupancy over time", "First replica; rows: its decode batch.", pools_figures(runs)),
        (
            "Latency distributions",
            "Share of requests at or below a value.",
            distributions_figures(runs),
        ),
        ("Where GPU time goes", "By term of the cost model.", {"": gpu_time_figure(runs)}),
    ]
    parts, is_first = [], True
    for title, caption, panels in sections:
        parts.append(f"<h2>{title}</h2><p class=note>{escape(caption)}</p>")
        # The number of columns is fixed before the scripts run: they measure their own width once.
        parts.append(f"<div class='grid of{len(panels)}'>")
        for name, figure in panels.items():
            html = figure.to_html(_CONFIG, full_html=False, include_plotlyjs=is_first)
            is_first = False
            parts.append(f"<figure><figcaption>{escape(name)}</figcaption>{html}</figure>")
        parts.append("</div>")
    return "".join(parts)


def _cards(verdict: Verdict) -> str:
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
    return "".join(
        f"<div><b>{escape(value)}</b>{escape(name)}</div>" for name, value in cards.items()
    )


def _table(headers: tuple[str, ...], rows: Mapping[str, tuple[str, ...]], best: str = "") -> str:
    head = "".join(f"<th>{escape(header)}" for header in headers)
    body = "".join(
        f"<tr{' class=best' if name == best else ''}>"
        + "".join(f"<td>{escape(cell)}" for cell in (name, *cells))
        for name, cells in rows.items()
    )
    return f"<div class=scroll><table><tr>{head}{body}</table></div>"


def _assumptions(findings: Findings, facts: Mapping[str, str]) -> str:
    task, server = findings.task, findings.task.server
    slo = [("TTFT", task.slo.ttft_s), ("TPOT", task.slo.tpot_s)]
    limits = ", ".join(f"{name} {limit * 1e3:g} ms" for name, limit in slo if limit is not None)
    lines = dict(facts) | {
        "Model": f"{task.model.name} ({task.model.source})",
        "GPU": f"{task.hardware.name}, tensor parallelism {task.tp}",
        "Cost model": f"{provenance_line(findings)} {task.params.note}",
        "Service levels": limits or "none given",
        "Scheduler": (
            f"SGLang 0.5.17's rules, {server.schedule_policy}, {server.max_running_requests:,} "
            f"running requests at most, chunks of {server.chunked_prefill_size:,} tokens"
        ),
        "HOT pool": f"admission {server.admission}, dispatch {server.dispatch}",
        "Replicas": f"{findings.replicas}, router {task.router}",
        "Seeds": f"{findings.seeds}; seed 0 is the nominal cost model, every other one a draw",
        "Not modelled": _NOT_MODELLED,
    }
    return "".join(f"<dt>{escape(name)}<dd>{escape(text)}" for name, text in lines.items())


def _parameters(findings: Findings) -> str:
    rows = {}
    for name, p in findings.task.params.terms.items():
        numbers = (p.summary, f"{p.rel_error:.0%}", f"{p.rows_used:,}")
        rows[name] = (*numbers, p.provenance, p.source)
    return _table(("parameter", "value", "1 sigma", "rows", "origin", "source"), rows)


_WARNING = "<p class=warning>Interrupted: some simulations are missing.</p>"
_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>GraniKV plan: $subject</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2937; background: #f9fafb; margin: 0 }
main { max-width: 1120px; margin: 0 auto; padding: 24px 16px 64px }
h1 { font-size: 15px; font-weight: 600; color: #6b7280; margin: 0 0 12px }
h2 { font-size: 20px; margin: 40px 0 4px }
.note, dt, footer { color: #6b7280 }
.answer { background: #fff; border-left: 5px solid #2563eb; padding: 12px 20px; border-radius: 6px }
.answer p { margin: 6px 0 } .answer p:first-child { font-size: 19px; font-weight: 600 }
.warning { background: #fef3c7; padding: 8px 16px; border-radius: 6px }
.cards, .grid { display: grid; gap: 12px; margin: 16px 0 }
.cards { grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)) }
@media (min-width: 760px) { .of2 { grid-template-columns: 1fr 1fr } }
@media (min-width: 1000px) { .of3 { grid-template-columns: 1fr 1fr 1fr } }
.cards div { background: #fff; padding: 12px 16px; border-radius: 6px; color: #6b7280 }
.cards b { display: block; font-size: 15px; color: #1f2937 }
.scroll { overflow-x: auto; background: #fff; border-radius: 6px }
table { border-collapse: collapse; width: 100%; font: 14px/1.4 system-ui, sans-serif }
td { white-space: nowrap }
th, td { padding: 7px 12px; text-align: right; border-bottom: 1px solid #e5e7eb }
td:first-child, th:first-child { text-align: left } th { font-weight: 600; vertical-align: bottom }
.best { background: #dbeafe; font-weight: 600 }
figure { margin: 0; background: #fff; border-radius: 6px; padding: 8px; min-width: 0 }
figcaption { font-weight: 600; font-size: 14px; padding: 2px 8px }
dl { background: #fff; border-radius: 6px; padding: 12px 20px; margin: 8px 0 }
dt { font-size: 14px; margin-top: 8px } dd { margin: 0 }
details td, details th { text-align: left; white-space: normal }
</style></head><body><main>
<h1>GraniKV plan: $subject</h1>
$warning<div class="answer">$sentences</div>
<div class="cards">$cards</div>
$table
$figures
<h2>Assumptions</h2><dl>$assumptions</dl>
<details><summary>Every parameter of the cost model, with its origin</summary>$parameters</details>
<footer>Simulated by GraniKV $version; nothing here was measured on a server.</footer>
</main></body></html>
""")
