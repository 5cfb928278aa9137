"""What the simulator says of the shipped live runs: no error has grown, and goals that were reached
stay reached.
"""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from granikv.validate.compare.ladder import Ladder, climb, figures, grown

DATA = Path(__file__).parents[2] / "validate/data"


@cache
def ladder() -> Ladder:
    """All shipped runs and results."""
    return climb([DATA / "runs", DATA / "serve.h200-sxm.jsonl"])


def test_no_error_has_grown_by_more_than_a_tenth() -> None:
    before = json.loads((DATA / "ladder.json").read_text())["figures"]
    now = figures(ladder())
    assert grown(now, before) == {}
    # A run or cell that is no longer compared has no error either.
    assert set(before) <= set(now)


@pytest.mark.parametrize(("server", "worst"), [("stock", 0.08), ("granikv", 0.11)])
def test_decode_rates_over_the_grid(server: str, worst: float) -> None:
    """Goals: 3 % in the median, 8 % at worst; ours misses the second at 32K x 256, and where 256
    rows read four prefixes of unlike length from COLD: one share is told by all recorded steps that
    read there, and is a tenth too little for those.
    """
    cells = [one for one in ladder().steady if one.variant == server and "8b" in one.model]
    assert len(cells) > 40
    cold = [one for one in cells if one.cell.startswith("mixed") and server == "granikv"]
    assert all(abs(one.error) <= 0.13 for one in cold)
    errors = np.abs([one.error for one in cells if one not in cold])
    assert np.median(errors) <= 0.03
    assert errors.max() <= worst


def test_saturated_runs() -> None:
    """Goals: throughput 3 %, TPOT 4 %, cached tokens 0.1 points. Stock misses the first two by up
    to 2.6 points: the cost of its shared pages is told by servers of several prefixes, whose rows
    read at other times than those of one.
    """
    every = [report for report in ladder().runs if report.requests is not None]
    assert len(every) == 39
    reports = [report for report in every if _is_saturated(report.run.name)]
    assert len(reports) == 6
    for report in reports:
        found = report.requests
        assert found is not None
        is_stock = report.run.is_stock
        assert abs(found.throughput_error) <= (0.056 if is_stock else 0.03), report.run.name
        assert abs(found.cached_points) <= 0.1
        assert abs(found.times["tpot_s"].quantile_errors[0]) <= (0.060 if is_stock else 0.04)
        assert abs(found.times["ttft_s"].quantile_errors[0]) <= 0.10
    errors = [abs(report.requests.throughput_error) for report in every if report.requests]
    assert np.median(errors) <= 0.015
    assert max(errors) <= 0.065


def _is_saturated(name: str) -> bool:
    """Behind one prefix, with a window of finishes."""
    return "poisson" in name and "@" not in name


def test_the_schedule_is_the_live_servers_own() -> None:
    """With a run's own step times nothing is left to blame on scheduling, caching or placement.

    That holds to the point behind one prefix. A step's time is that of the nearest one in rows and
    private tokens, so that of several prefixes, hardly two steps alike, it says less: most where
    HOT is far too large (5.3 %, with the cost model's times 0.9 %), and where the boundary moves:
    once it is elsewhere than it was live, no recorded step is like those that follow (8.7 %, with
    the cost model's times 0.4 %).
    """
    schedules = {
        report.run.name: report.schedule for report in ladder().runs if report.schedule is not None
    }
    assert len(schedules) == 36
    errors = {name: abs(found.requests.throughput_error) for name, found in schedules.items()}
    assert np.median([*errors.values()]) <= 0.01
    assert max(error for name, error in errors.items() if "marginal" not in name) <= 0.055
    assert max(errors.values()) <= 0.09
    one_prefix = [found for name, found in schedules.items() if _is_saturated(name)]
    assert len(one_prefix) == 3
    for found in one_prefix:
        assert abs(found.requests.throughput_error) <= 0.01
        assert found.requests.same_cached > 0.99
        assert found.live_hot_used == found.simulated_hot_used


@pytest.mark.parametrize("load", ["morning-night", "night-morning"])
def test_moving_boundaries(load: str) -> None:
    """Goals: the same winner, and a gain of `marginal` over a fixed 0.2 within 3 points."""
    reports = [report for report in ladder().runs if load in report.run.name]
    assert len(reports) == (3 if load == "morning-night" else 2)
    for report in reports:
        found = report.requests
        assert found is not None
        assert found.pairs == report.run.requests.height, "a request was lost"
        assert abs(found.throughput_error) <= 0.025
        assert abs(found.cached_points) <= 0.3
        moves = report.run.steps["migrated_tokens"].sum()
        assert (moves > 190_000) is report.run.name.endswith("marginal")
    (decision,) = [one for one in ladder().decisions if f"trace-{load}," in one.workload]
    assert decision.best == decision.chosen == "granikv repartition=marginal"
    assert decision.range > 0.4
    assert abs(decision.points) <= 3.0


def test_decisions() -> None:
    """Stock or ours, wherever one is 15 % better: as the live servers have it."""
    counting = [one for one in ladder().decisions if one.counts]
    assert len(counting) > 25
    assert all(one.best == one.chosen for one in counting)
