"""Jumping over equal decode steps leaves the records that stepping leaves."""

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from sim_support import Result, lone, prompt, real_cost, run, servers, tiny, workloads

from granikv.core.repartition import Window
from granikv.sim import repartitioner
from granikv.sim.config import ServerConfig
from granikv.sim.router import ROUTERS
from granikv.traces.request import Request


def _both(
    requests: list[Request], config: ServerConfig, replicas: int = 1, router: str = "round_robin"
) -> tuple[Result, Result]:
    exact = config.model_copy(update={"exact": True})
    return (
        run(requests, config, real_cost(), replicas=replicas, router=router),
        run(requests, exact, real_cost(), replicas=replicas, router=router),
    )


def _assert_equal(jumped: Result, stepped: Result) -> None:
    assert_frame_equal(jumped.requests, stepped.requests)
    order = ["replica", "iter"]
    assert_frame_equal(jumped.steps.sort(order), stepped.steps.sort(order))
    assert jumped.outcome.end_s == stepped.outcome.end_s
    assert jumped.outcome.hot_misses == stepped.outcome.hot_misses
    assert jumped.outcome.promoted_tokens == stepped.outcome.promoted_tokens


@settings(max_examples=220)
@given(workloads(), servers(), st.integers(1, 2), st.sampled_from(ROUTERS))
def test_jumping_equals_stepping(
    requests: list[Request], config: ServerConfig, replicas: int, router: str
) -> None:
    _assert_equal(*_both(requests, config, replicas, router))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("system", ["sglang", "cascade", "granikv"])
def test_a_busy_hour_in_miniature(system: str, overlap: bool) -> None:
    """Many equal rows, arrivals in the middle of jumps, evictions: a fixed case that certainly
    jumps.
    """
    requests = [
        Request(i, 0.037 * i, prompt((i % 3, 700), (100 + i, 50 + i)), 40 + 7 * (i % 9))
        for i in range(120)
    ]
    config = ServerConfig(
        system=system, size_tokens=8000, hot_fraction=0.3, overlap_schedule=overlap
    )
    jumped, stepped = _both(requests, config)
    _assert_equal(jumped, stepped)
    assert jumped.outcome.finished == 120
    assert jumped.steps["evictions"].sum() > 0
    assert (jumped.steps["steps"] > 3).sum() > 50


def test_a_pool_that_runs_out_in_the_middle_of_a_jump() -> None:
    requests = [lone(i, 0.0, 100, 300) for i in range(5)]
    config = tiny(schedule_conservativeness=0.0)
    jumped, stepped = _both(requests, config)
    _assert_equal(jumped, stepped)
    assert jumped.steps["retractions"].sum() > 0
    assert jumped.steps.filter(pl.col("retractions") > 0)["steps"].max() > 1


@pytest.mark.parametrize("overlap", [False, True])
def test_arrivals_exactly_at_a_boundary(overlap: bool) -> None:
    """Ties between an arrival and the end of a step are broken alike: the arrival comes first."""
    config = tiny(overlap_schedule=overlap)
    first = lone(0, 0.0, 10, 50)
    boundary_s = 11_000e-9 + 20 * 1_000e-9
    for shift_ns in (-1, 0, 1):
        requests = [first, lone(1, boundary_s + shift_ns * 1e-9, 10, 5)]
        jumped = run(requests, config)
        stepped = run(requests, config.model_copy(update={"exact": True}))
        _assert_equal(jumped, stepped)


class _Wanderer:
    """Moves the boundary up and down at every third look."""

    def __init__(self) -> None:
        self.looks = 0

    def observe(self, window: Window) -> int | None:
        self.looks += 1
        step = window.size_tokens // 8
        up, down = window.hot_tokens + step, max(0, window.hot_tokens - step)
        return {1: up, 4: down}.get(self.looks % 6)


@settings(max_examples=60)
@given(workloads(), servers(), st.sampled_from([0.004, 0.021, 0.3]), st.sampled_from([7, 10_000]))
def test_jumping_equals_stepping_while_the_boundary_moves(
    requests: list[Request], config: ServerConfig, interval_s: float, budget_tokens: int
) -> None:
    moving = config.model_copy(
        update={
            "system": "granikv",
            "policy_interval_s": interval_s,
            "move_tokens_per_step": budget_tokens,
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repartitioner, "make_policy", lambda name: _Wanderer())
        _assert_equal(*_both(requests, moving))


@settings(max_examples=40)
@given(workloads(), servers(), st.sampled_from(["watermark", "marginal"]))
def test_jumping_shows_policies_the_same_windows(
    requests: list[Request], config: ServerConfig, name: str
) -> None:
    update = {"system": "granikv", "policy_interval_s": 0.01, "repartition": name}
    _assert_equal(*_both(requests, config.model_copy(update=update)))


def test_a_boundary_that_moves_is_in_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repartitioner, "make_policy", lambda name: _Wanderer())
    requests = [Request(i, 0.05 * i, prompt((1, 300), (9 + i, 80)), 100) for i in range(30)]
    config = ServerConfig(size_tokens=4000, policy_interval_s=0.1, move_tokens_per_step=50)
    jumped, stepped = _both(requests, config)
    _assert_equal(jumped, stepped)
    assert jumped.steps["migrated_tokens"].sum() > 0
    assert jumped.steps["migrated_tokens"].max() <= 50 * jumped.steps["steps"].max()
    assert jumped.outcome.finished == 30
