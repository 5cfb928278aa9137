"""write_report: one HTML page with measured against predicted times and residuals over shape."""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from granikv.cost_models.fit.figures import HEADERS, NOTE, PEER_NOTE, figure_rows
from granikv.cost_models.fit.result import TermFit
from granikv.cost_models.params import GpuParams

_MAX_POINTS = 4000  # of each scatter; more only makes the page slow
_SEED = 20261130
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.25em .7em;border-bottom:1px solid #ccc;"
    "text-align:right}td:first-child,th:first-child{text-align:left}"
)


def write_report(params: GpuParams, fits: Sequence[TermFit], path: Path) -> None:
    """Write the page; plotly.js is inside, so that the file needs nothing else."""
    import plotly.io  # only a report draws; predictions must not wait for it

    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        f"<title>Cost model of {html.escape(params.gpu)}</title><style>{_STYLE}</style>",
        f"<h1>Cost model of {html.escape(params.gpu)}</h1><p>{html.escape(params.note)}</p>",
        _table(HEADERS, figure_rows(params.derived_from or params.gpu, fits)),
        f"<p>{html.escape(NOTE)} {html.escape(PEER_NOTE)}</p>",
    ]
    for number, fit in enumerate(fits):
        figure = plotly.io.to_html(
            _figure(fit), include_plotlyjs=number == 0, full_html=False, validate=False
        )
        parts += [f"<h2>{html.escape(fit.title)}</h2>", _about(fit), figure]
    parts += ["<h2>All parameters</h2>", _parameters(params), "</html>"]
    path.write_text("\n".join(parts))


def _figure(fit: TermFit) -> Any:
    """Measured against predicted on the left, then the residual over each axis."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    rng = np.random.default_rng(_SEED)
    shown = rng.permutation(len(fit.measured_ns))[:_MAX_POINTS]
    measured, predicted = fit.measured_ns[shown] / 1e3, fit.held_out_ns[shown] / 1e3
    residual = predicted / measured - 1
    titles = ["held-out prediction, us", *(f"residual over {name}" for name in fit.sizes)]
    figure = make_subplots(rows=1, cols=len(titles), subplot_titles=titles)
    figure.add_trace(_points(measured, predicted), row=1, col=1)
    ends = [float(measured.min()), float(measured.max())]
    line = go.Scatter(x=ends, y=ends, mode="lines", line={"color": "#888", "dash": "dot"})
    figure.add_trace(line, row=1, col=1)
    figure.update_xaxes(type="log", title="measured, us", row=1, col=1)
    figure.update_yaxes(type="log", row=1, col=1)
    for column, values in enumerate(fit.sizes.values(), start=2):
        figure.add_trace(_points(values[shown], residual), row=1, col=column)
        figure.update_xaxes(type="log", row=1, col=column)
        figure.update_yaxes(tickformat=".0%", range=[-0.6, 0.6], row=1, col=column)
    figure.update_layout(showlegend=False, height=360, template="plotly_white")
    return figure


def _points(x: np.ndarray, y: np.ndarray) -> Any:
    import plotly.graph_objects as go

    # Three digits are enough to draw, and keep the page small.
    rounded = [np.array([float(f"{value:.3g}") for value in values]) for values in (x, y)]
    return go.Scattergl(
        x=rounded[0], y=rounded[1], mode="markers", marker={"size": 3, "opacity": 0.4}
    )


def _about(fit: TermFit) -> str:
    fitted = fit.fitted
    ranges = ", ".join(
        f"{name} {low:g} to {high:g}" for name, (low, high) in fitted.valid_range.items()
    )
    return f"<p>{html.escape(fitted.source)}. Rows cover {html.escape(ranges)}.</p>"


def _parameters(params: GpuParams) -> str:
    rows = [
        (name, item.summary, item.provenance, f"{item.rel_error:.0%}", item.source)
        for name, item in params.terms.items()
    ]
    return _table(("parameter", "value", "provenance", "1 sigma", "source"), rows)


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in headers)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
