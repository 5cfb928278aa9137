"""page: a plan as one self-contained HTML file - recommendation, table, figures, assumptions."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

import plotly.graph_objects as go

from granikv import __version__
from granikv.planner.cells import CellResult
from granikv.planner.plan import provenance
from granikv.planner.search import REFERENCE_FRACTION, Findings
from granikv.planner.verdict import CONFIDENCE, OBJECTIVES, Point, Verdict
from granikv.sim.metrics import Distribution

_STOCK, _CASCADE, _GRANIKV = "#6b7280", "#d97706", "#2563eb"
_HOT, _COLD, _ROWS = "#dc2626", "#93c5fd", "#111827"
_BAND, _FLAT = "rgba(37, 99, 235, 0.15)", "rgba(16, 185, 129, 0.12)"
_TERMS = {
    "host": ("host", "#9ca3af"),
    "gemm": ("matrix products", "#60a5fa"),
    "attention": ("decode attention", "#dc2626"),
    "collective": ("collectives", "#a78bfa"),
    "extend": ("prefill", "#fbbf24"),
    "copy": ("KV copies", "#34d399"),
}
_PROVENANCE = {
    "datasheet": "datasheet values",
    "fitted": "fitted to measured kernels",
    "paper": "published figures, not fitted",
    "stated": "stated, not fitted",
}
_NOT_MODELLED = (
    "waves and tails of kernels, clock changes and power limits",
    "tokenisation, the network, and sampling beyond a fixed host time per step",
    "other users of the GPU, failures and restarts",
    "whether a real server's KV capacity is what the memory rule says (its log has the number)",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the comparison, as text; `is_recommended` marks the answer."""

    cells: tuple[str, ...]
    is_recommended: bool = False


def comparison(findings: Findings, verdict: Verdict | None) -> tuple[tuple[str, ...], list[Row]]:
    """Headers and rows: stock, batch-global cascade, each fraction, of the nominal seed.

    Systems without a nominal run are left out; without a verdict there are no gains.
    """
    has_slo = findings.task.slo.is_set
    headers = ("HOT fraction", "gain over stock", "tokens/s")
    headers += ("goodput, req/s",) if has_slo else ()
    headers += ("TTFT s, p50 / p95", "TPOT ms, p50 / p95", "HOT share of prompts")
    headers += ("HOT misses", "cached share", "retractions")
    gains = _gains(verdict)
    best = None if verdict is None else verdict.fraction
    entries = [
        ("stock engine", gains.get("sglang", ""), findings.of("sglang"), False),
        ("batch-global cascade", gains.get("cascade", ""), findings.of("cascade"), False),
    ]
    for fraction in findings.fractions:
        runs = findings.of("granikv", fraction)
        entries.append((f"{fraction:g}", gains.get(fraction, ""), runs, fraction == best))
    rows = [
        Row((name, gain, *_figures(runs[0], has_slo)), is_best)
        for name, gain, runs, is_best in entries
        if runs and runs[0].cell.seed == 0
    ]
    return headers, rows


def _gains(verdict: Verdict | None) -> dict[float | str, str]:
    """Gain over the stock engine as text, by system or fraction."""
    if verdict is None:
        return {}
    gains: dict[float | str, str] = {"sglang": "1.00x", "cascade": f"{_cascade_gain(verdict):.2f}x"}
    return gains | {point.fraction: point.gain.text for point in verdict.points}


def _cascade_gain(verdict: Verdict) -> float:
    # Gains are means of paired logarithms, so that of cascade over stock is the ratio of two.
    return verdict.gain.mean / verdict.over_cascade.mean


def _figures(result: CellResult, has_slo: bool) -> Iterable[str]:
    summary = result.summary
    yield f"{summary.throughput_tokens_per_s:,.0f}"
    if has_slo:
        yield f"{summary.goodput_requests_per_s:.2f}"
    yield f"{_seconds(summary.ttft_s.p50)} / {_seconds(summary.ttft_s.p95)}"
    yield f"{summary.tpot_s.p50 * 1e3:.1f} / {summary.tpot_s.p95 * 1e3:.1f}"
    yield f"{summary.hot_share:.1%}"
    yield f"{summary.hot_misses:,}"
    yield f"{summary.cached_share:.1%}"
    yield f"{summary.retractions:,}"


def _seconds(value: float) -> str:
    if value < 10:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def provenance_line(findings: Findings) -> str:
    """How sound the cost model is: as sound as its least sound parameter."""
    params = findings.task.params
    kinds = Counter(parameter.provenance for _, parameter in params.terms.items())
    parts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    derived = f", derived from {params.derived_from}" if params.derived_from else ""
    worst = _PROVENANCE[provenance(findings.task)]
    return f"Cost model of {params.gpu}: {worst} ({parts} parameters{derived})."


def write_page(
    findings: Findings, verdict: Verdict, path: Path, facts: Mapping[str, str] | None = None
) -> None:
    """Write the page; `facts` are further lines of its assumptions, by name.

    The file needs nothing else: plotly.js is inside.
    """
    shown = _shown(verdict)
    stock = findings.of("sglang")[0]
    groups = (
        _Figures("Gain over the stock engine", _gain_caption(verdict), [("", _gain_figure(verdict))]),
        _Figures("Speed over the pool fraction", _SPEED_CAPTION, _speed_figures(findings, verdict)),
        _Figures("Pool occupancy over time", _POOL_CAPTION, _pool_figures(stock, shown.nominal)),
        _Figures("Latency distributions", _CDF_CAPTION, _cdf_figures(findings, shown)),
        _Figures("Where GPU time goes", _TIME_CAPTION, [("", _time_figure(findings, shown))]),
    )
    task = findings.task
    subject = f"{task.trace.name} on {task.model.name}, {task.hardware.name}"
    subject += f" x {task.tp}" if task.tp > 1 else ""
    subject += f", {findings.replicas} replicas" if findings.replicas > 1 else ""
    body = _PAGE.substitute(
        subject=escape(subject),
        warning=_WARNING if findings.is_partial else "",
        cards=_cards(verdict),
        sentences="".join(f"<p>{escape(sentence)}</p>" for sentence in verdict.sentences),
        table=_table(*comparison(findings, verdict)),
        figures=_sections(groups),
        assumptions=_assumptions(findings, facts or {}),
        parameters=_parameters(findings),
        version=escape(__version__),
    )
    path.write_text(body, encoding="utf-8")


def _shown(verdict: Verdict) -> Point:
    """The recommended point, or the best tried when none is recommended."""
    return max(verdict.points, key=lambda point: point.gain.mean)


# ---------------------------------------------------------------------- figures


@dataclass(frozen=True, slots=True)
class _Figures:
    """A section: panels side by side where there is room, each with its own small title."""

    title: str
    caption: str
    panels: Sequence[tuple[str, go.Figure]]


_SPEED_CAPTION = "Nominal cost model. TTFT is time to first token, TPOT time per output token; 95th percentiles."
_POOL_CAPTION = "Tokens in use in the KV pool of the first replica (areas), and requests in the decode batch (line)."
_CDF_CAPTION = "Share of finished requests at or below a value."
_TIME_CAPTION = "GPU seconds for the whole trace, by term of the cost model; a shorter bar is less work."


def _gain_caption(verdict: Verdict) -> str:
    return (
        f"In {OBJECTIVES[verdict.objective]}. The band is a {CONFIDENCE:.0%} interval from seeds that each draw "
        "the cost model from its own errors; the shaded region is within the noise of the best."
    )


def _figure(x: str, y: str, height: int = 320) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 64, "r": 16, "t": 8, "b": 48},
        font={"family": "system-ui, sans-serif", "size": 13, "color": "#1f2937"},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        hovermode="x unified",
    )
    figure.update_xaxes(title=x, automargin=True)
    figure.update_yaxes(title=y, automargin=True)
    return figure


def _gain_figure(verdict: Verdict) -> go.Figure:
    points = verdict.points
    fractions = [point.fraction for point in points]
    means = [point.gain.mean for point in points]
    figure = _figure("HOT pool fraction", "gain (x)", height=400)
    edges = {"mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
    figure.add_scatter(x=fractions, y=[point.gain.high for point in points], **edges)
    figure.add_scatter(
        x=fractions, y=[point.gain.low for point in points], fill="tonexty", fillcolor=_BAND, **edges
    )
    figure.add_scatter(
        x=fractions,
        y=means,
        name="GraniKV",
        mode="lines+markers",
        line={"color": _GRANIKV, "width": 2.5},
        customdata=[point.gain.text for point in points],
        hovertemplate="%{customdata}",
    )
    ends = [fractions[0], fractions[-1]]
    for name, level, color in (
        ("batch-global cascade", _cascade_gain(verdict), _CASCADE),
        ("stock engine", 1.0, _STOCK),
    ):
        line = {"color": color, "dash": "dash"}
        mode = "lines" if len(points) > 1 else "markers"
        figure.add_scatter(
            x=ends, y=[level] * 2, name=name, mode=mode, line=line, hovertemplate="%{y:.2f}x"
        )
    if verdict.flat[0] < verdict.flat[1]:
        figure.add_vrect(x0=verdict.flat[0], x1=verdict.flat[1], fillcolor=_FLAT, line_width=0, layer="below")
    best = _shown(verdict)
    figure.add_scatter(
        x=[best.fraction],
        y=[best.gain.mean],
        name="recommended" if verdict.fraction is not None else "best tried",
        mode="markers",
        marker={"symbol": "star", "size": 17, "color": _GRANIKV, "line": {"color": "white", "width": 1}},
        hoverinfo="skip",
    )
    return figure


def _speed_figures(findings: Findings, verdict: Verdict) -> list[tuple[str, go.Figure]]:
    panels: list[tuple[str, str, float, str]] = [
        ("Throughput", "throughput_tokens_per_s", 1.0, "output tokens/s"),
        ("TTFT, p95", "ttft_s", 1.0, "s"),
        ("TPOT, p95", "tpot_s", 1e3, "ms"),
    ]
    figures = []
    for title, name, scale, unit in panels:
        figure = _figure("HOT pool fraction", unit)
        fractions = [point.fraction for point in verdict.points]
        values = [_value(point.nominal, name) * scale for point in verdict.points]
        figure.add_scatter(
            x=fractions, y=values, name="GraniKV", mode="lines+markers", line={"color": _GRANIKV}
        )
        for label, system, color in (("stock", "sglang", _STOCK), ("cascade", "cascade", _CASCADE)):
            level = _value(findings.of(system)[0], name) * scale
            mode = "lines" if len(fractions) > 1 else "markers"
            line = {"color": color, "dash": "dash"}
            figure.add_scatter(x=fractions, y=[level] * len(fractions), name=label, mode=mode, line=line)
        figure.update_yaxes(rangemode="tozero", hoverformat=",.4~g")
        figures.append((title, figure))
    return figures


def _value(result: CellResult, name: str) -> float:
    value: float | Distribution = getattr(result.summary, name)
    return value.p95 if isinstance(value, Distribution) else value


def _pool_figures(stock: CellResult, shown: CellResult) -> list[tuple[str, go.Figure]]:
    fraction = shown.cell.hot_fraction
    runs = ((f"GraniKV at {fraction:g}", shown), ("stock engine (one pool)", stock))
    largest = max(
        hot + cold
        for _, run in runs
        for hot, cold in zip(run.timeline["hot_used"], run.timeline["cold_used"], strict=True)
    )
    panels = []
    for title, run in runs:
        times = run.timeline["time_s"]
        figure = _figure("s", "tokens in use")
        for name, key, color in (("HOT", "hot_used", _HOT), ("COLD", "cold_used", _COLD)):
            if name == "HOT" and run is stock:
                continue
            figure.add_scatter(
                x=times,
                y=run.timeline[key],
                name=name,
                stackgroup="pool",
                mode="lines",
                line={"width": 0.5, "color": color, "shape": "hv"},
            )
        figure.add_scatter(
            x=times,
            y=run.timeline["rows"],
            name="rows",
            yaxis="y2",
            mode="lines",
            line={"width": 1.2, "color": _ROWS, "shape": "hv"},
        )
        figure.update_yaxes(range=[0, largest * 1.05])
        figure.update_layout(
            margin={"r": 56},
            yaxis2={
                "overlaying": "y",
                "side": "right",
                "title": {"text": "rows", "standoff": 4},
                "rangemode": "tozero",
                "showgrid": False,
            },
        )
        panels.append((title, figure))
    return panels


def _cdf_figures(findings: Findings, shown: Point) -> list[tuple[str, go.Figure]]:
    runs = (
        ("stock", findings.of("sglang")[0], _STOCK),
        ("cascade", findings.of("cascade")[0], _CASCADE),
        (f"GraniKV at {shown.fraction:g}", shown.nominal, _GRANIKV),
    )
    panels = []
    for title, key, scale, unit in (("TTFT", "ttft_s", 1.0, "s"), ("TPOT", "tpot_s", 1e3, "ms")):
        figure = _figure(unit, "% of requests")
        for name, run, color in runs:
            values = [value * scale for value in run.cdf[key]]
            dash = "dash" if name == "cascade" else "solid"
            figure.add_scatter(
                x=values,
                y=list(range(len(values))),
                name=name,
                mode="lines",
                line={"color": color, "dash": dash, "width": 2},
            )
        figure.update_xaxes(type="log", dtick=1, minor={"dtick": "D1"})
        figure.update_layout(hovermode="closest")
        panels.append((title, figure))
    return panels


def _time_figure(findings: Findings, shown: Point) -> go.Figure:
    runs = {
        f"GraniKV at {shown.fraction:g}": shown.nominal,
        "cascade": findings.of("cascade")[0],
        "stock": findings.of("sglang")[0],
    }
    figure = _figure("GPU seconds", "", height=300)
    for term, (label, color) in _TERMS.items():
        seconds = [_busy_s(run) * run.term_share[term] for run in runs.values()]
        if any(seconds):
            figure.add_bar(
                x=seconds, y=list(runs), name=label, orientation="h", marker={"color": color}
            )
    figure.update_layout(barmode="stack", legend={"traceorder": "normal"}, hovermode="y unified")
    figure.update_xaxes(hoverformat=",.4~g")
    return figure


def _busy_s(result: CellResult) -> float:
    summary = result.summary
    return summary.busy_share * summary.duration_s * result.cell.replicas


# ---------------------------------------------------------------------- text
