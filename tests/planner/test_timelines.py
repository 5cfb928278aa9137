"""Series over time: what the pools hold where the boundary moves, and tokens that add up."""

import numpy as np
import pytest
from drift_support import SIZE_TOKENS, load
from sim_support import real_cost, run

from granikv.planner.timelines import POINTS, pools_over_time, rate_over_time
from granikv.sim.config import ServerConfig

CONFIG = ServerConfig(size_tokens=SIZE_TOKENS, hot_fraction=0.2, repartition="marginal")


def test_pools_are_counted_on_their_side_of_a_moving_boundary() -> None:
    result = run(load("morning and night", 0), CONFIG, real_cost())
    (boundary,) = result.outcome.boundaries
    series = pools_over_time(result.steps.lazy(), CONFIG, boundary)
    hot_tokens = np.array(series["hot_tokens"])
    assert len(hot_tokens) <= POINTS
    assert len(set(hot_tokens)) > 2
    assert set(hot_tokens) <= {tokens for _, tokens in boundary}
    assert (np.array(series["hot_used"]) <= hot_tokens).all()
    assert (np.array(series["cold_used"]) >= 0).all()
    assert (np.array(series["cold_used"]) <= SIZE_TOKENS - hot_tokens).all()


@pytest.mark.parametrize("replicas", [1, 3])
def test_rates_add_up_to_all_decoded_tokens(replicas: int) -> None:
    result = run(load("suffix-heavy", 0), CONFIG, real_cost(), replicas=replicas)
    rate = rate_over_time(result.steps.lazy())
    decode = result.steps.filter(result.steps["kind"] == "decode")
    width_s = rate["time_s"][1]
    assert sum(rate["tokens_per_s"]) * width_s == pytest.approx(
        (decode["rows"] * decode["steps"]).sum()
    )


def test_a_run_without_decode_steps_has_no_rates() -> None:
    steps = run([], CONFIG, real_cost()).steps
    assert rate_over_time(steps.lazy()) == {"time_s": [], "tokens_per_s": []}
    assert pools_over_time(steps.lazy(), CONFIG, [(0.0, 40_000)])["time_s"] == []
