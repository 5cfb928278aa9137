"""Figures of the policies page, all plotly: ranking, HOT fraction and throughput over time."""

from collections.abc import Iterable
from itertools import cycle

import plotly.graph_objects as go

from granikv.planner.cells import CellResult
from granikv.planner.contest import ORACLE
from granikv.planner.page_figures import add_line, blank_figure
from granikv.planner.ranking import Ranking

_ORACLE, _STATIC = "#111827", "#6b7280"
_POLICIES = ("#2563eb", "#d97706", "#059669", "#a855f7", "#dc2626", "#0891b2")


def ranking_figure(ranking: Ranking) -> go.Figure:
    """Gains over the best static split, best on top."""
    standings = ranking.standings[::-1]
    gains = [standing.over_static for standing in standings]
    colors = {"static": _STATIC, "policy": _POLICIES[0], "oracle": _ORACLE}
    figure = blank_figure("gain (x)", "", height=110 + 30 * len(standings))
    bars = {
        "type": "data",
        "symmetric": False,
        "array": [gain.high - gain.mean for gain in gains],
        "arrayminus": [gain.mean - gain.low for gain in gains],
    }
    figure.add_scatter(
        x=[gain.mean for gain in gains],
        y=[standing.name for standing in standings],
        mode="markers",
        marker={"size": 11, "color": [colors[standing.kind] for standing in standings]},
        error_x=bars,
        customdata=[gain.text for gain in gains],
        hovertemplate="%{customdata}<extra></extra>",
        showlegend=False,
    )
    figure.add_vline(1.0, line={"color": _STATIC, "dash": "dash", "width": 1})
    figure.update_layout(hovermode="closest")
    return figure


def fraction_figure(runs: dict[str, CellResult], size_tokens: int) -> go.Figure:
    """HOT's share of all tokens over time, a line for each run."""
    lines = {
        name: (run.timeline["time_s"], [t / size_tokens for t in run.timeline["hot_tokens"]])
        for name, run in runs.items()
    }
    return _over_time("HOT fraction", ".3f", lines)


def rate_figure(runs: dict[str, CellResult]) -> go.Figure:
    """Decoded tokens per second over time, a line for each run."""
    lines = {name: (run.rate["time_s"], run.rate["tokens_per_s"]) for name, run in runs.items()}
    return _over_time("tokens/s", ",.4~g", lines)


def _over_time(
    title: str, hover_format: str, lines: dict[str, tuple[list[float], list[float]]]
) -> go.Figure:
    """Steps over seconds, by name of the run."""
    figure = blank_figure("s", title, height=400)
    for (name, (times, values)), style in zip(lines.items(), _styles(lines), strict=True):
        add_line(figure, name, times, values, line=style | {"shape": "hv"}, mode="lines")
    figure.update_yaxes(rangemode="tozero", hoverformat=hover_format)
    return figure


def _styles(runs: Iterable[str]) -> list[dict[str, object]]:
    """Static splits dashed grey, the oracle dotted black, policies in colours of their own."""
    colors = cycle(_POLICIES)
    styles: list[dict[str, object]] = []
    for name in runs:
        if name == ORACLE:
            styles.append({"color": _ORACLE, "dash": "dot", "width": 1.5})
        elif name.startswith("static "):
            styles.append({"color": _STATIC, "dash": "dash", "width": 1.5})
        else:
            styles.append({"color": next(colors), "width": 2})
    return styles
