"""The summary of a run, on schedules whose figures are worked out by hand."""

import numpy as np
import pytest
from sim_support import Result, lone, prompt, run, tiny

from granikv.sim.metrics import Slo, Summary, distribution, summarise, timed_requests
from granikv.sim.run import MemorySink
from granikv.traces.request import Request

_US = 1e-6


def _summary(result: Result, slo: Slo | None = None) -> Summary:
    return summarise(result.requests, result.steps, slo)


def _interrupted() -> Result:
    """Request 0 has its tokens at 11, 12, 25, 26, 27 us; request 1 at 24 and 25 us."""
    return run([lone(0, 0.0, 10, 5), lone(1, 11.5e-6, 20, 2)], tiny())


def test_latencies_of_two_requests() -> None:
    summary = _summary(_interrupted())
    assert summary.ttft_s.mean == pytest.approx((11 + 12.5) / 2 * _US)
    assert summary.ttft_s.p50 == pytest.approx((11 + 12.5) / 2 * _US)
    assert summary.tpot_s.mean == pytest.approx((16 / 4 + 1) / 2 * _US)
    assert summary.e2e_s.mean == pytest.approx((27 + 13.5) / 2 * _US)


def test_gaps_between_tokens_hold_what_lies_between_the_steps() -> None:
    """Gaps of 0: 1, 13, 1, 1 us, where 13 holds a prefill of 12 us; of 1: 1 us."""
    itl = _summary(_interrupted()).itl_s
    assert itl.mean == pytest.approx((1 + 13 + 1 + 1 + 1) / 5 * _US)
    assert itl.p50 == pytest.approx(1 * _US)
    assert itl.p99 == pytest.approx(13 * _US)


def test_throughput_is_tokens_from_the_first_arrival_to_the_last_token() -> None:
    summary = _summary(run([lone(0, 5e-3, 10, 5), lone(1, 6e-3, 10, 3)], tiny()))
    assert summary.duration_s == pytest.approx(1e-3 + 13 * _US)
    assert summary.throughput_tokens_per_s == pytest.approx(8 / (1e-3 + 13 * _US))
    assert summary.offered_s == pytest.approx(1e-3)
    assert summary.drain_s == pytest.approx(13 * _US)
    assert summary.busy_share == pytest.approx((15 + 13) * _US / summary.duration_s)


def test_shares_of_cached_and_shared_tokens() -> None:
    """Two rows read 100 tokens in common and 20 + 1, 20 + 2, ... of their own."""
    requests = [Request(i, 0.0, prompt((1, 100), (2 + i, 20)), 4) for i in range(2)]
    first = [Request(9, 0.0, prompt((1, 100), (9, 1)), 1)]
    moved = [Request(r.request_id + 10, 1e-3, r.prompt, r.output_tokens) for r in requests]
    summary = _summary(run([*first, *moved], tiny()))
    assert summary.cached_share == pytest.approx(200 / (101 + 240))
    private = 2 * (21 + 22 + 23)
    assert summary.shared_read_share == pytest.approx(600 / (600 + private))
    assert summary.hot_share == 0.0
    assert summary.mean_rows == 2.0
    assert summary.decode_steps == 3
    assert summary.decode_steps_by_mode == {"paged": 3}


@pytest.mark.parametrize(
    ("slo", "share"),
    [
        (None, 1.0),
        (Slo(), 1.0),
        (Slo(ttft_s=11.5e-6), 0.5),
        (Slo(tpot_s=2e-6), 0.5),
        (Slo(ttft_s=11.5e-6, tpot_s=2e-6), 0.0),
        (Slo(ttft_s=1.0, tpot_s=1.0), 1.0),
    ],
)
def test_goodput_counts_requests_within_the_slo(slo: Slo | None, share: float) -> None:
    """TTFT is 11 and 12.5 us, TPOT 4 and 1 us."""
    summary = _summary(_interrupted(), slo)
    assert summary.slo_share == share
    assert summary.goodput_requests_per_s == pytest.approx(2 * share / summary.duration_s)


def test_what_was_refused_misses_the_slo() -> None:
    result = run([lone(0, 0.0, 10, 5), lone(1, 0.0, 2000, 5)], tiny())
    summary = _summary(result, Slo(ttft_s=1.0))
    assert (summary.requests, summary.finished, summary.refused) == (2, 1, 1)
    assert summary.slo_share == 0.5


def test_one_token_has_no_tpot_and_meets_any() -> None:
    result = run([lone(0, 0.0, 10, 1)], tiny())
    assert timed_requests(result.requests)["tpot_s"].to_list() == [None]
    assert _summary(result, Slo(tpot_s=1e-9)).slo_share == 1.0


def test_a_run_without_requests_has_a_summary() -> None:
    summary = summarise(*MemorySink().frames())
    assert (summary.requests, summary.throughput_tokens_per_s, summary.slo_share) == (0, 0.0, 0.0)
    assert summary.itl_s.mean == 0.0


def test_lazy_frames_give_the_same_summary() -> None:
    result = _interrupted()
    assert summarise(result.requests.lazy(), result.steps.lazy()) == _summary(result)


def test_weights_stand_for_repeated_samples() -> None:
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1.0, 7.0, 2.0])
    weighted = distribution(values, weights)
    assert weighted.mean == pytest.approx((3 + 7 + 4) / 10)
    assert (weighted.p50, weighted.p90, weighted.p99) == (1.0, 2.0, 3.0)
