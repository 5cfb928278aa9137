"""The oracle: never below what it starts from, bounded, and the same every time."""

import pytest
from drift_support import SIZE_TOKENS, phases, prefix_heavy, suffix_heavy
from sim_support import real_cost

from granikv.core.errors import ConfigError
from granikv.planner.oracle import Oracle, OracleOptions, find_oracle
from granikv.planner.trials import Bench, Schedule, constant, try_policy, try_schedule
from granikv.sim.config import ServerConfig
from granikv.sim.schedule import Ask

FRACTIONS = (0.05, 0.3, 0.6)
POLICIES = ("watermark", "marginal")


def bench(replicas: int = 1) -> Bench:
    """Flips every 6 s, for 24 s; the best fixed split is a compromise."""
    flips = [(prefix_heavy(10_000, 30.0), 6.0), (suffix_heavy(10_000, 4.0), 6.0)] * 2
    server = ServerConfig(size_tokens=SIZE_TOKENS, hot_fraction=0.2)
    return Bench(list(phases(flips, 0)), server, real_cost(), replicas)


@pytest.fixture(scope="module")
def found() -> Oracle:
    return find_oracle(bench(), OracleOptions(FRACTIONS, POLICIES, 4.0, 20))


def test_oracle_is_above_every_split_and_policy(found: Oracle) -> None:
    statics = [constant(f, int(f * SIZE_TOKENS), 1) for f in FRACTIONS]
    scores = [try_schedule(bench(), schedule).score for schedule in statics]
    scores += [try_policy(bench(), name, 0.2).score for name in POLICIES]
    assert found.start.score == max(scores)
    assert found.best.score > found.start.score


def test_oracle_schedule_gives_its_score_again(found: Oracle) -> None:
    assert try_schedule(bench(), found.best.schedule) == found.best


def test_oracle_is_the_same_again(found: Oracle) -> None:
    assert find_oracle(bench(), OracleOptions(FRACTIONS, POLICIES, 4.0, 20)) == found


@pytest.mark.parametrize("simulations", [0, 3])
def test_simulations_are_bounded(simulations: int) -> None:
    options = OracleOptions(FRACTIONS, ("watermark",), 4.0, simulations)
    assert find_oracle(bench(), options).simulations == 4 + simulations


def test_a_static_schedule_is_the_static_server() -> None:
    static = try_policy(bench(), "static", 0.2)
    assert try_schedule(bench(), constant(0.2, 40_000, 1)).score == static.score


def test_replicas_follow_their_own_tracks() -> None:
    trial = try_policy(bench(replicas=2), "marginal", 0.2)
    assert trial.schedule.tracks[0] != trial.schedule.tracks[1]
    assert try_schedule(bench(replicas=2), trial.schedule).score == trial.score


def test_a_held_time_ends_where_the_schedule_was() -> None:
    schedule = Schedule(0.2, ((Ask(0.0, 40), Ask(7.0, 50), Ask(12.0, 60)),))
    held = schedule.hold(5.0, 10.0, 90)
    assert held.tracks == ((Ask(0.0, 40), Ask(5.0, 90), Ask(10.0, 50), Ask(12.0, 60)),)
    assert held.hold(10.0, 12.0, 90).tracks[0][2:] == (Ask(10.0, 90), Ask(12.0, 60))


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="at least one HOT fraction"):
        OracleOptions(())
    for window_s in (0.0, -1.0, 1e-9, float("nan"), float("inf")):
        with pytest.raises(
            ConfigError, match=r"--window must be a finite time of at least 0.001 s"
        ):
            OracleOptions((0.2,), window_s=window_s)
