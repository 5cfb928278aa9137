"""figures: what a fit reaches beside its goals and beside the peer, as rows of text."""

import json
from collections.abc import Sequence
from typing import Any

from granikv.cost_models.catalog import DATA
from granikv.cost_models.fit.result import TermFit

HEADERS = (
    "term",
    "median",
    "p90",
    "goal",
    "reached",
    "fitted rows",
    "shapes, rows",
    "peer held out",
    "peer whole",
)
PEER_FILE = DATA / "peer" / "aiconfigurator-core-0.12.0.json"
NOTE = (
    "Absolute errors on whole shapes that the fit had not seen, with 5 % to 95 % of resampling "
    "shapes; fitted rows: median error on the rows of the fit itself."
)
PEER_NOTE = (
    "Peer: aiconfigurator-core 0.12.0, which interpolates the tables that our public rows are cut "
    "from: asked with the held-out shapes taken out of its tables, and with its tables whole, "
    "where it only looks its rows up. Median / p90 over a sample of the public rows."
)


def figure_rows(gpu: str, fits: Sequence[TermFit]) -> list[tuple[str, ...]]:
    """One row of `HEADERS` for each fitted term."""
    peer = _peer(gpu)
    return [_row(fit, peer.get(fit.name, {})) for fit in fits]


def _row(fit: TermFit, peer: dict[str, Any]) -> tuple[str, ...]:
    error, goal = fit.error, fit.goal
    reached = {None: "", True: "yes", False: "no"}[fit.meets_goal]
    return (
        fit.title,
        f"{error.median:.1%} ({_interval(error.median_interval)})",
        f"{error.p90:.1%} ({_interval(error.p90_interval)})",
        "" if goal is None else f"{goal[0]:.0%}, {goal[1]:.0%}",
        reached,
        f"{fit.fitted.residual:.1%}",
        f"{error.shapes:,}, {error.points:,}",
        _pair(peer.get("peer_held_out")),
        _pair(peer.get("peer_with_its_rows")),
    )


def _interval(interval: tuple[float, float]) -> str:
    return f"{interval[0] * 100:.1f}-{interval[1] * 100:.1f}"


def _pair(error: dict[str, float] | None) -> str:
    return "" if error is None else f"{error['median']:.1%} / {error['p90']:.1%}"


def _peer(gpu: str) -> dict[str, Any]:
    if not PEER_FILE.exists():
        return {}
    body: dict[str, Any] = json.loads(PEER_FILE.read_text())["gpus"].get(gpu, {})
    return body
