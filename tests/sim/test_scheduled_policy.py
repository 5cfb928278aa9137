"""Schedules of HOT sizes: followed at the looks, and a policy's own asks give its run again."""

import pytest
from drift_support import SIZE_TOKENS, load
from sim_support import real_cost

from granikv.core.policies import make_policy
from granikv.core.repartition import RepartitionPolicy
from granikv.sim.config import ServerConfig
from granikv.sim.run import MemorySink, RunOutcome, simulate
from granikv.sim.schedule import Ask, RecordingPolicy, ScheduledPolicy

CONFIG = ServerConfig(size_tokens=SIZE_TOKENS, hot_fraction=0.2)


def steered(policy: RepartitionPolicy, name: str) -> tuple[RunOutcome, MemorySink]:
    sink = MemorySink()
    return simulate(load(name, 0), CONFIG, real_cost(), sink, policies=[policy]), sink


def test_the_boundary_follows_the_schedule() -> None:
    asks = (Ask(0.0, 40_000), Ask(20.0, 60_000), Ask(40.0, None), Ask(50.0, 30_000))
    outcome, _ = steered(ScheduledPolicy(asks), "suffix-heavy")
    (boundary,) = outcome.boundaries
    assert [hot_tokens for _, hot_tokens in boundary] == [40_000, 60_000, 30_000]
    assert boundary[0] == (0.0, 40_000)
    # Looks come once a second, and a move takes some steps.
    assert [round(at_s) for at_s, _ in boundary[1:]] == pytest.approx([20, 50], abs=2)


def test_a_policy_s_asks_give_its_run_again() -> None:
    recording = RecordingPolicy(make_policy("marginal"))
    outcome, sink = steered(recording, "morning and night")
    again, replayed = steered(ScheduledPolicy(tuple(recording.asks)), "morning and night")
    assert len(outcome.boundaries[0]) > 1
    assert again.boundaries == outcome.boundaries
    for first, second in zip(sink.frames(), replayed.frames(), strict=True):
        assert first.equals(second)


def test_asks_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="in order of time"):
        ScheduledPolicy((Ask(1.0, 10), Ask(0.0, 20)))


def test_policies_must_be_one_a_replica() -> None:
    with pytest.raises(ValueError, match="policies must be 2, one a replica, got 1"):
        simulate([], CONFIG, real_cost(), MemorySink(), replicas=2, policies=[ScheduledPolicy(())])
