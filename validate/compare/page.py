"""page: the ladder as one self-contained HTML file, simulated against live on every rung."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike

from granikv import __version__
from granikv.validate.compare.ladder import Ladder, RunReport

_CONFIG = {"displayModeBar": False, "responsive": True}
_LIVE, _SIMULATED, _EVEN = "#111827", "#2563eb", "#9ca3af"
_MODES = {
    "extend": "#fbbf24", "private": "#6b7280", "paged": "#d97706", "cascade": "#34d399",
    "dense": "#dc2626",
}  # fmt: skip
_MOST_POINTS = 1500  # of a scatter; more are thinned evenly
_TIMES = {"ttft_s": "time to first token, s", "tpot_s": "time per output token, s"}


def write_page(ladder: Ladder, path: Path) -> None:
    """Write the page; it needs nothing else, plotly.js is inside."""
    sections = [
        ("Steps", _STEP_NOTE, _step_figures(ladder.runs)),
        ("Decode rates of full batches", _STEADY_NOTE, _steady_figures(ladder)),
        ("Requests", _REQUEST_NOTE, _request_figures(ladder.runs)),
        ("Distributions", _DISTRIBUTION_NOTE, _distribution_figures(ladder.runs)),
        ("Batches over time", _BATCH_NOTE, _batch_figures(ladder.runs)),
    ]
    parts, is_first = [], True
    for title, note, figures in sections:
        if not figures:
            continue
        parts.append(f"<h2>{title}</h2><p>{escape(note)}</p><div class=grid>")
        for name, figure in figures.items():
            html = figure.to_html(_CONFIG, full_html=False, include_plotlyjs=is_first)
            is_first = False
            parts.append(f"<figure><figcaption>{escape(name)}</figcaption>{html}</figure>")
        parts.append("</div>")
    body = _PAGE.substitute(
        cards=_cards(ladder), sections="".join(parts), version=escape(__version__)
    )
    path.write_text(body, encoding="utf-8")


def _cards(ladder: Ladder) -> str:
    """The worst error of each rung."""
    throughput = [abs(r.requests.throughput_error) for r in ladder.runs if r.requests is not None]
    steps = [
        error.median
        for r in ladder.runs
        if r.steps is not None
        for error in r.steps.errors("mode").values()
    ]
    steady = [abs(one.error) for one in ladder.steady]
    counting = [one for one in ladder.decisions if one.counts]
    cards = {}
    if steps:
        cards["step time, median error of a mode, worst run"] = f"{max(steps):.1%}"
    if steady:
        cards[f"decode rate, median of {len(steady)} batches"] = f"{np.median(steady):.1%}"
        cards["decode rate, worst batch"] = f"{max(steady):.1%}"
    if throughput:
        cards[f"output rate, worst of {len(throughput)} runs"] = f"{max(throughput):.1%}"
    if counting:
        right = sum(one.best == one.chosen for one in counting)
        cards["decisions as the server would have them"] = f"{right} of {len(counting)}"
    return "".join(
        f"<div><b>{escape(value)}</b>{escape(name)}</div>" for name, value in cards.items()
    )


# ---------------------------------------------------------------------- figures


def _step_figures(reports: Iterable[RunReport]) -> dict[str, go.Figure]:
    found = {}
    for report in reports:
        if report.steps is None:
            continue
        figure = _figure("recorded, ms", "predicted, ms")
        for (mode,), group in sorted(report.steps.table.group_by("mode")):
            thin = group.gather_every(-(-group.height // _MOST_POINTS))
            x, y = thin["recorded_us"].to_numpy() / 1e3, thin["predicted_us"].to_numpy() / 1e3
            _dots(figure, str(mode), x, y, _MODES.get(str(mode), _SIMULATED))
        _even_line(figure, report.steps.table["recorded_us"].to_numpy() / 1e3)
        figure.update_xaxes(type="log").update_yaxes(type="log")
        found[report.run.name] = figure
    return found


def _steady_figures(ladder: Ladder) -> dict[str, go.Figure]:
    found: dict[str, go.Figure] = {}
    for server in dict.fromkeys(f"{one.model}, {one.variant}" for one in ladder.steady):
        many = [one for one in ladder.steady if f"{one.model}, {one.variant}" == server]
        figure = _figure("measured, tokens/s", "simulated, tokens/s")
        live = [one.live for one in many]
        text = [f"{one.cell}: {one.error:+.1%}" for one in many]
        _dots(figure, server, live, [one.simulated for one in many], _SIMULATED, text)
        _even_line(figure, live)
        figure.update_xaxes(type="log").update_yaxes(type="log")
        found[server] = figure
    return found


def _request_figures(reports: Iterable[RunReport]) -> dict[str, go.Figure]:
    found = {}
    for report in reports:
        if report.replayed is None:
            continue
        live = report.run.requests.filter(report.run.requests["status"] == "finished")
        pairs = live.join(report.replayed.requests, on="id", suffix="_sim")
        figure = _figure("live, s after its arrival", "simulated, s after its arrival")
        for column, name, color in (("first_token_s", "first token", _MODES["extend"]),
                                    ("finish_s", "end", _SIMULATED)):  # fmt: skip
            x = (pairs[column] - pairs["arrival_s"]).to_numpy()
            y = (pairs[f"{column}_sim"] - pairs["arrival_s_sim"]).to_numpy()
            _dots(figure, name, x, y, color)
        _even_line(figure, (pairs["finish_s"] - pairs["arrival_s"]).to_numpy())
        found[report.run.name] = figure
    return found


def _distribution_figures(reports: Iterable[RunReport]) -> dict[str, go.Figure]:
    from granikv.sim.metrics import timed_requests

    found = {}
    for report in reports:
        if report.replayed is None:
            continue
        live, simulated = map(timed_requests, (report.run.requests, report.replayed.requests))
        simulated = simulated.join(live.select("id"), on="id")
        for column, title in _TIMES.items():
            figure = _figure(title, "share of requests")
            for name, frame, color in (("live", live, _LIVE), ("simulated", simulated, _SIMULATED)):
                values = np.sort(frame[column].drop_nulls().to_numpy())
                shares = np.arange(1, len(values) + 1) / max(len(values), 1)
                figure.add_scatter(x=values, y=shares, name=name, line={"color": color})
            found[f"{report.run.name}: {title}"] = figure
    return found


def _batch_figures(reports: Iterable[RunReport]) -> dict[str, go.Figure]:
    found = {}
    for report in reports:
        if report.replayed is None or not report.run.steps.height:
            continue
        figure = _figure("s", "decoding rows")
        frames = (
            ("live", report.run.steps, _LIVE),
            ("simulated", report.replayed.steps, _SIMULATED),
        )
        for name, frame, color in frames:
            decode = frame.filter(frame["kind"] == "decode")
            decode = decode.gather_every(-(-max(decode.height, 1) // _MOST_POINTS))
            line = {"color": color, "shape": "hv", "width": 1.5}
            x, y = decode["start_s"].to_numpy(), decode["rows"].to_numpy()
            figure.add_scatter(x=x, y=y, name=name, mode="lines", line=line)
        found[report.run.name] = figure
    return found


def _figure(x: str, y: str) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        template="plotly_white",
        height=340,
        margin={"l": 56, "r": 16, "t": 8, "b": 48},
        font={"family": "system-ui, sans-serif", "size": 13, "color": "#1f2937"},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
    )
    figure.update_xaxes(title=x, automargin=True)
    figure.update_yaxes(title=y, automargin=True)
    return figure


def _dots(
    figure: go.Figure, name: str, x: ArrayLike, y: ArrayLike, color: str, text: Sequence[str] = ()
) -> None:
    marker = {"color": color, "size": 6, "opacity": 0.6}
    figure.add_scatter(x=x, y=y, name=name, mode="markers", marker=marker, text=list(text) or None)


def _even_line(figure: go.Figure, values: ArrayLike) -> None:
    """Where both are equal."""
    known = np.asarray(values)
    if known.size:
        ends = [float(known.min()), float(known.max())]
        line = {"color": _EVEN, "dash": "dash", "width": 1}
        figure.add_scatter(x=ends, y=ends, mode="lines", line=line, showlegend=False)


_STEP_NOTE = (
    "The cost model alone, fed the batch of each recorded step. The dashed line is no error."
)
_STEADY_NOTE = "Output tokens per second of batches that decode together, one dot a batch."
_REQUEST_NOTE = "One dot a request: the whole simulator on the same requests."
_DISTRIBUTION_NOTE = "Requests that finished on the server, live and simulated."
_BATCH_NOTE = (
    "Rows of the decode batch: live and simulated, each on its own clock from the first send."
)
_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>GraniKV: simulated against live</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2937; background: #f9fafb; margin: 0 }
main { max-width: 1120px; margin: 0 auto; padding: 24px 16px 64px }
h1 { font-size: 22px } h2 { font-size: 20px; margin: 40px 0 4px } p, footer { color: #6b7280 }
.grid { display: grid; gap: 12px; margin: 16px 0 }
@media (min-width: 760px) { .grid { grid-template-columns: 1fr 1fr } }
figure { margin: 0; background: #fff; border-radius: 6px; padding: 8px; min-width: 0 }
figcaption { font-weight: 600; font-size: 14px; padding: 2px 8px }
.cards { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)) }
.cards div { background: #fff; padding: 12px 16px; border-radius: 6px; color: #6b7280 }
.cards b { display: block; font-size: 20px; color: #1f2937 }
</style></head><body><main>
<h1>GraniKV: simulated against live</h1>
<div class="cards">$cards</div>
$sections
<footer>GraniKV $version; live runs were measured on the servers that their records name.</footer>
</main></body></html>
""")
