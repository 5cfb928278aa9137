import pytest

from granikv.kernels.schedule import (
    MAX_REPLAYS,
    MIN_REPLAYS,
    plan_calls,
    plan_replays,
    point_s,
)


@pytest.mark.parametrize(
    ("call_us", "calls"), [(3.0, 32), (10.0, 32), (40.0, 8), (500.0, 4), (2000.0, 2), (9000.0, 1)]
)
def test_calls_fill_a_graph(call_us, calls):
    assert plan_calls(call_us) == calls


def test_replays_are_cut_only_for_long_points():
    assert plan_replays(0.0) == plan_replays(8_000) == MAX_REPLAYS
    assert plan_replays(16_000) == 10
    assert plan_replays(1e6) == MIN_REPLAYS


def test_point_time_is_overhead_and_repetitions():
    assert point_s(10.0, overhead_s=0.0) < 0.03
    # 9 graphs of one 20 ms call, each behind a flush, and one call before the capture
    assert point_s(20_000.0, overhead_s=0.0) == pytest.approx(0.02 + 0.0002 + 11 * 0.0201)
