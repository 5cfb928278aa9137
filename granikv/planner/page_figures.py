"""Figures of the plan page, all plotly: gain, speed, pools over time, distributions, GPU time."""

from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go

from granikv.planner.cells import CellResult
from granikv.planner.verdict import Verdict

_GRANIKV = "#2563eb"
_COLORS = {
    "stock": "#6b7280",
    "cascade": "#d97706",
    "HOT": "#f87171",
    "COLD": "#bfdbfe",
    "rows": "#111827",
    "HOT size": "#b91c1c",
}
# The two often coincide; dots over dashes show both.
_DASHES = {"stock": {"dash": "dash"}, "cascade": {"dash": "dot"}}
_BAND, _FLAT = "rgba(37, 99, 235, 0.15)", "rgba(16, 185, 129, 0.12)"
_LOG_TICKS = [digit * 10.0**power for power in range(-4, 7) for digit in (1, 3)]
_TERMS = {
    "host": ("host", "#9ca3af"),
    "gemm": ("matrix products", "#60a5fa"),
    "attention": ("decode attention", "#dc2626"),
    "collective": ("collectives", "#a78bfa"),
    "extend": ("prefill", "#fbbf24"),
    "copy": ("KV copies", "#34d399"),
}


def blank_figure(x: str, y: str, height: int = 320) -> go.Figure:
    """An empty figure in the style of all pages; `x` and `y` are the titles of its axes."""
    figure = go.Figure()
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 56, "r": 16, "t": 8, "b": 48},
        font={"family": "system-ui, sans-serif", "size": 13, "color": "#1f2937"},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "traceorder": "normal"},
        hovermode="x unified",
    )
    figure.update_xaxes(title=x, automargin=True)
    figure.update_yaxes(title=y, automargin=True)
    return figure


def add_line(
    figure: go.Figure, name: str, x: Sequence[float], y: Sequence[float], **style: Any
) -> None:
    """Add a line in the system's colour; a single point becomes a marker."""
    mode = "lines+markers" if name.startswith("GraniKV") or len(x) == 1 else "lines"
    line = {"color": _COLORS.get(name, _GRANIKV)} | style.pop("line", {})
    figure.add_scatter(**({"x": x, "y": y, "name": name, "mode": mode, "line": line} | style))


def cascade_gain(verdict: Verdict) -> float:
    """Gain of batch-global cascade over the stock engine."""
    # Gains are means of paired logarithms, so that of cascade over stock is the ratio of two.
    return verdict.gain.mean / verdict.over_cascade.mean


def gain_figure(verdict: Verdict) -> go.Figure:
    """Gain over the stock engine by fraction, its interval as a band, the flat region shaded."""
    fractions = [point.fraction for point in verdict.points]
    gains = [point.gain for point in verdict.points]
    figure = blank_figure("HOT pool fraction", "gain (x)", height=400)
    edge = {"mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
    add_line(figure, "", fractions, [gain.high for gain in gains], **edge)
    low = [gain.low for gain in gains]
    add_line(figure, "", fractions, low, fill="tonexty", fillcolor=_BAND, **edge)
    text = {"customdata": [gain.text for gain in gains], "hovertemplate": "%{customdata}"}
    add_line(figure, "GraniKV", fractions, [gain.mean for gain in gains], **text)
    for name, level in (("stock", 1.0), ("cascade", cascade_gain(verdict))):
        add_line(figure, name, fractions, [level] * len(fractions), line=_DASHES[name])
    if verdict.flat[0] < verdict.flat[1]:
        figure.add_vrect(*verdict.flat, fillcolor=_FLAT, line_width=0, layer="below")
    best = verdict.best
    star = {"symbol": "star", "size": 18, "color": _GRANIKV, "line": {"color": "white", "width": 1}}
    name = "recommended" if verdict.helps else "best tried"
    here = {"mode": "markers", "marker": star, "hoverinfo": "skip"}
    add_line(figure, name, [best.fraction], [best.gain.mean], **here)
    figure.update_yaxes(rangemode="tozero")
    return figure


def speed_figures(runs: dict[str, CellResult], verdict: Verdict) -> dict[str, go.Figure]:
    """Throughput, TTFT and TPOT by fraction; `runs` holds the levels of stock and cascade."""
    panels: dict[str, tuple[str, Callable[[CellResult], float]]] = {
        "Throughput": ("output tokens/s", lambda run: run.summary.throughput_tokens_per_s),
        "Time to first token, p95": ("s", lambda run: run.summary.ttft_s.p95),
        "Time per output token, p95": ("ms", lambda run: run.summary.tpot_s.p95 * 1e3),
    }
    fractions = [point.fraction for point in verdict.points]
    figures = {}
    for title, (unit, value) in panels.items():
        figure = figures[title] = blank_figure("HOT pool fraction", unit)
        add_line(figure, "GraniKV", fractions, [value(point.nominal) for point in verdict.points])
        for name in ("stock", "cascade"):
            level = [value(runs[name])] * len(fractions)
            add_line(figure, name, fractions, level, line=_DASHES[name])
        figure.update_yaxes(rangemode="tozero", hoverformat=",.4~g")
    return figures


def pools_figures(runs: dict[str, CellResult]) -> dict[str, go.Figure]:
    """Tokens in HOT and COLD and decode rows over time, a panel for each run but cascade.

    Where the boundary moves, a dotted line is HOT's size.
    """
    shown = {name: runs[name] for name in reversed(runs) if name != "cascade"}
    largest = max(
        hot + cold
        for run in shown.values()
        for hot, cold in zip(run.timeline["hot_used"], run.timeline["cold_used"], strict=True)
    )
    figures = {}
    for title, run in shown.items():
        figure = figures[title] = blank_figure("s", "tokens in use")
        times = run.timeline["time_s"]
        pools = ("HOT", "COLD") if run.cell.hot_fraction is not None else ("COLD",)
        for name in pools:
            area = {"stackgroup": "pool", "mode": "lines", "line": {"width": 0.5, "shape": "hv"}}
            used = run.timeline[f"{name.lower()}_used"]
            add_line(figure, name, times, used, fillcolor=_COLORS[name], **area)
        if len(set(run.timeline["hot_tokens"])) > 1:
            size = {"mode": "lines", "line": {"dash": "dot", "shape": "hv", "width": 1.5}}
            add_line(figure, "HOT size", times, run.timeline["hot_tokens"], **size)
        rows = {"yaxis": "y2", "mode": "lines", "line": {"width": 1.2, "shape": "hv"}}
        add_line(figure, "rows", times, _envelope(run.timeline["rows"]), **rows)
        figure.update_yaxes(range=[0, largest * 1.05])
        right = {"overlaying": "y", "side": "right", "title": {"text": "rows"}, "showgrid": False}
        right |= {"rangemode": "tozero", "tickmode": "auto"}
        figure.update_layout(margin={"r": 56}, yaxis2=right)
    return figures


def _envelope(rows: Sequence[float]) -> list[float]:
    """Largest of neighbouring samples: a prefill step counts only the requests it extends."""
    return [max(rows[max(0, place - 4) : place + 5]) for place in range(len(rows))]


def distributions_figures(runs: dict[str, CellResult]) -> dict[str, go.Figure]:
    """Cumulative distributions of TTFT and TPOT, a line for each run."""
    panels = {
        "Time to first token": ("ttft_s", 1.0, "s"),
        "Time per output token": ("tpot_s", 1e3, "ms"),
    }
    figures = {}
    for title, (key, scale, unit) in panels.items():
        figure = figures[title] = blank_figure(unit, "% of requests")
        for name, run in runs.items():
            values = [value * scale for value in run.cdf[key]]
            line = {"dash": "dot"} if name == "cascade" else {}
            add_line(figure, name, values, list(range(len(values))), mode="lines", line=line)
        figure.update_xaxes(
            type="log", tickvals=_LOG_TICKS, ticktext=[f"{t:g}" for t in _LOG_TICKS]
        )
        figure.update_layout(hovermode="closest")
    return figures


def gpu_time_figure(runs: dict[str, CellResult]) -> go.Figure:
    """GPU seconds by term of the cost model, a stacked bar for each run."""
    names = list(reversed(runs))
    shown = [(runs[name], runs[name].summary) for name in names]
    busy_s = [found.busy_share * found.duration_s * run.cell.replicas for run, found in shown]
    figure = blank_figure("GPU seconds for the whole trace", "", height=300)
    for term, (label, color) in _TERMS.items():
        shares = [run.term_share[term] for run, _ in shown]
        seconds = [busy * share for busy, share in zip(busy_s, shares, strict=True)]
        if any(seconds):
            bar = {"orientation": "h", "marker": {"color": color}}
            figure.add_bar(x=seconds, y=names, name=label, **bar)
    figure.update_layout(barmode="stack", hovermode="y unified")
    figure.update_xaxes(hoverformat=",.4~g")
    return figure
