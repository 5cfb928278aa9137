"""Nothing is lost and nothing appears: requests, tokens and slots."""

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from sim_support import Bench, Result, lone, prompt, real_cost, run, servers, tiny, workloads

from granikv.sim.config import ServerConfig
from granikv.sim.pools import Pools
from granikv.traces.request import Request


def _assert_conserved(result: Result) -> None:
    """sent = finished + refused + aborted + what is still inside, and each has one row."""
    outcome = result.outcome
    inside = outcome.unfinished
    assert outcome.sent == outcome.finished + outcome.refused + outcome.aborted + inside
    assert result.requests["id"].n_unique() == len(result.requests) == outcome.sent
    by_status = dict(result.requests["status"].value_counts().iter_rows())
    assert by_status.get("finished", 0) == outcome.finished
    assert by_status.get("refused", 0) == outcome.refused
    assert by_status.get("aborted", 0) == outcome.aborted
    assert by_status.get("running", 0) + by_status.get("waiting", 0) == inside


def _assert_no_slot_lost(pools: Pools) -> None:
    """With every request released, each slot is free or caches a token."""
    pools.check_integrity()
    allocator, index = pools.allocator, pools.index
    cold_cached = sum(node.length for node in index.nodes() if not node.is_hot)
    hot_cached = sum(node.length for node in index.nodes() if node.is_hot)
    assert len(pools.batch) == 0
    assert allocator.cold_used == cold_cached == index.evictable_tokens
    assert allocator.hot_used == hot_cached
    free = allocator.cold_free + allocator.hot_free
    assert free + cold_cached + hot_cached == allocator.size_tokens


@settings(max_examples=60)
@given(workloads(), servers(), st.integers(1, 2))
def test_equal_runs_leave_equal_records(
    requests: list[Request], config: ServerConfig, replicas: int
) -> None:
    first = run(requests, config, real_cost(), replicas=replicas)
    again = run(requests, config, real_cost(), replicas=replicas)
    assert_frame_equal(first.requests, again.requests)
    assert_frame_equal(first.steps, again.steps)
    assert first.outcome == again.outcome


@settings(max_examples=80)
@given(workloads(), servers(), st.integers(1, 2), st.floats(0.01, 1.0))
def test_requests_are_conserved_at_any_time(
    requests: list[Request], config: ServerConfig, replicas: int, share: float
) -> None:
    whole = run(requests, config, real_cost(), replicas=replicas)
    _assert_conserved(whole)
    assert whole.outcome.unfinished == 0
    assert whole.outcome.sent == len(requests)
    cut_s = max(share * whole.outcome.end_s, 1e-9)
    _assert_conserved(run(requests, config, real_cost(), replicas=replicas, until_s=cut_s))


def test_requests_in_a_prefill_step_are_inside() -> None:
    for until_s in (1e-6, 14e-6, 100e-6):
        result = run([lone(0, 0.0, 50, 3), lone(1, 0.0, 300, 3)], tiny(), until_s=until_s)
        _assert_conserved(result)
        assert result.outcome.sent == 2


@settings(max_examples=80)
@given(workloads(), servers(), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3))
def test_pools_are_sound_at_any_time(
    requests: list[Request], config: ServerConfig, cuts: list[float]
) -> None:
    end_s = run(requests, config, real_cost()).outcome.end_s
    bench = Bench(requests, config, real_cost())
    for share in sorted(cuts):
        if round(share * end_s * 1e9) > bench.env.now:
            bench.run(share * end_s)
            bench.pools.check_integrity()
    bench.run()
    _assert_no_slot_lost(bench.pools)


@settings(max_examples=100)
@given(workloads(), servers())
def test_every_finished_request_got_its_tokens(
    requests: list[Request], config: ServerConfig
) -> None:
    """A prefill step gives each request that it completes one token, a decode step one per row.

    Under overlap each finished row may run once more, and a retracted row loses the token that its
    scheduler has not seen; without, the sums are equal.
    """
    result = run(requests, config, real_cost())
    wanted = {request.request_id: request.output_tokens for request in requests}
    done = result.requests.filter(pl.col("status") == "finished")
    assert all(tokens == wanted[id_] for id_, tokens in done.select("id", "output_tokens").rows())
    assert (done["finish_s"] >= done["first_token_s"]).all()
    assert (done["first_token_s"] > done["arrival_s"]).all()
    if result.outcome.aborted:
        return
    decode = result.steps.filter(pl.col("kind") == "decode")
    decoded = int((decode["rows"] * decode["steps"]).sum())
    retractions = int(result.steps["retractions"].sum())
    surplus = decoded + len(done) + retractions - int(done["output_tokens"].sum())
    assert 0 <= surplus <= (len(done) + retractions if config.overlap_schedule else 0)


@settings(max_examples=60)
@given(workloads(), servers(), st.integers(1, 2))
def test_steps_do_not_overlap(requests: list[Request], config: ServerConfig, replicas: int) -> None:
    steps = run(requests, config, real_cost(), replicas=replicas).steps
    for replica in range(replicas):
        own = steps.filter(pl.col("replica") == replica).sort("iter")
        start = own["start_s"].to_numpy()
        end = start + own["gpu_us"].to_numpy() * 1e-6
        assert np.all(start[1:] >= end[:-1] - 1e-9)
        count = own["steps"].to_numpy()
        assert np.array_equal(own["iter"].to_numpy(), np.cumsum(count) - count)


def test_a_finished_session_caches_its_answer() -> None:
    """A follow-up that repeats prompt and answer reads both from the cache (the last token has no
    KV).
    """
    first = Request(0, 0.0, prompt((1, 100)), 20, session="a", output_segment=7)
    second = Request(
        1, 0.0, prompt((1, 100), (7, 20), (2, 30)), 5, session="a", after=0, think_s=1e-3
    )
    result = run([first, second], tiny())
    assert result.requests["cached_tokens"].to_list() == [0, 119]
    first_end, second_start = result.requests["finish_s"][0], result.requests["arrival_s"][1]
    assert round((second_start - first_end) * 1e9) == 1_000_000
