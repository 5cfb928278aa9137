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
    """Goals: 3 % in the median, 8 % at worst; ours misses the second at 32K x 256."""
    cells = [one for one in ladder().steady if one.variant == server and "8b" in one.model]
    errors = np.abs([one.error for one in cells])
    assert len(errors) > 40
    assert np.median(errors) <= 0.03
    assert errors.max() <= worst


def test_saturated_runs() -> None:
    """Goals: throughput 3 %, TPOT 4 %, cached tokens 0.1 points. Stock misses the first two by up
    to a point.
    """
    reports = [report for report in ladder().runs if report.requests is not None]
    assert len(reports) == 6
    for report in reports:
        found = report.requests
        assert found is not None
        is_stock = report.run.is_stock
        assert abs(found.throughput_error) <= (0.041 if is_stock else 0.03), report.run.name
        assert abs(found.cached_points) <= 0.1
        assert abs(found.times["tpot_s"].quantile_errors[0]) <= (0.047 if is_stock else 0.04)
        assert abs(found.times["ttft_s"].quantile_errors[0]) <= 0.10


def test_the_schedule_is_the_live_servers_own() -> None:
    """With a run's own step times nothing is left to blame on scheduling, caching or placement."""
    schedules = [report.schedule for report in ladder().runs if report.schedule is not None]
    assert len(schedules) == 3
    for found in schedules:
        assert abs(found.requests.throughput_error) <= 0.01
        assert found.requests.same_cached > 0.99
        assert found.live_hot_used == found.simulated_hot_used


def test_decisions() -> None:
    """Stock or ours, wherever one is 15 % better: as the live servers have it."""
    counting = [one for one in ladder().decisions if one.counts]
    assert len(counting) > 25
    assert all(one.best == one.chosen for one in counting)
