"""Transforms: order, gaps, cuts, prefixes; the input stays as it was."""

import copy
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from granikv.traces import Request, Run, open_trace
from granikv.traces.generate import generate
from granikv.traces.spec import WorkloadSpec
from granikv.traces.tables import DATA
from granikv.traces.transform import TransformOptions, apply


def at(*times, **more):
    return [
        Request(number, time, (Run(number, 10),), 5, **more) for number, time in enumerate(times)
    ]


def times(requests):
    return [request.arrival_s for request in requests]


@given(st.lists(st.floats(0, 1e5), max_size=30).map(sorted), st.floats(0.01, 100))
def test_speedup_keeps_order_and_gaps(arrivals, factor):
    faster = times(apply(at(*arrivals), TransformOptions(speedup=factor)))
    assert faster == [arrival / factor for arrival in arrivals]
    assert faster == sorted(faster)


def test_speedup_two_is_twice_as_fast_down_to_a_microsecond():
    requests = at(0.0, 0.000_001, 0.000_003, 1.0)
    requests[3].think_s = 8.0
    fast = list(apply(requests, TransformOptions(speedup=2.0)))
    assert times(fast) == [0.0, 0.000_000_5, 0.000_001_5, 0.5]
    assert fast[3].think_s == 4.0


def test_cut_is_half_open_and_starts_at_zero():
    kept = list(apply(at(0.0, 1.0, 2.0, 2.5, 3.0), TransformOptions(start_s=1.0, end_s=3.0)))
    assert [request.request_id for request in kept] == [1, 2, 3]
    assert times(kept) == [0.0, 1.0, 1.5]


def test_max_requests_counts_after_the_cut_and_stops_reading():
    endless = (Request(number, float(number), (Run(0, 1),), 1) for number in itertools.count())
    kept = list(apply(endless, TransformOptions(start_s=5.0, max_requests=3)))
    assert [request.request_id for request in kept] == [5, 6, 7]
    endless = (Request(number, float(number), (Run(0, 1),), 1) for number in itertools.count())
    assert len(list(apply(endless, TransformOptions(end_s=10.0)))) == 10


def test_a_turn_whose_predecessor_was_cut_starts_anew():
    requests = at(0.0, 1.0, 2.0)
    requests[1].after, requests[1].think_s = 0, 3.0
    requests[2].after, requests[2].think_s = 1, 3.0
    kept = list(apply(requests, TransformOptions(start_s=0.5)))
    assert [(request.after, request.think_s) for request in kept] == [(None, 0.0), (1, 3.0)]


def test_a_prepended_prefix_is_shared_by_all():
    requests = list(
        apply(at(0.0, 1.0, prefix_tokens=2), TransformOptions(prepend_prefix_tokens=100))
    )
    assert {request.prompt[0] for request in requests} == {requests[0].prompt[0]}
    assert [request.prompt_tokens for request in requests] == [110, 110]
    assert [request.prefix_tokens for request in requests] == [102, 102]
    assert requests[0].prompt[1] == Run(0, 10)


@given(
    st.lists(st.sampled_from([0.0, 3.0, 6.0, 6.001, 9.0]), max_size=40).map(sorted),
    st.floats(0.1, 20),
    st.integers(0, 9),
)
def test_jitter_stays_sorted_and_within_a_tick(arrivals, tick, seed):
    requests = at(*arrivals)
    moved = list(apply(requests, TransformOptions(tick_jitter_s=tick), seed))
    assert [request.request_id for request in moved] == [request.request_id for request in requests]
    assert times(moved) == sorted(times(moved))
    # Sorting pairs of (old, new) by time cannot move a time out of its window.
    assert all(
        old <= new < old + tick or new == pytest.approx(old + tick)
        for old, new in zip(arrivals, times(moved), strict=True)
    )
    assert moved == list(apply(requests, TransformOptions(tick_jitter_s=tick), seed))


def test_jitter_spreads_a_tick_evenly():
    moved = times(apply(at(*[3.0] * 10_000), TransformOptions(tick_jitter_s=3.0), 1))
    assert moved[0] < 3.01
    assert moved[-1] > 5.99
    assert moved[5_000] == pytest.approx(4.5, abs=0.1)
    assert len(set(moved)) == 10_000


def test_jitter_breaks_up_the_bursts_of_a_coarse_clock():
    source = open_trace(DATA / "mooncake-conversation.jsonl.gz")
    before = times(source)
    after = times(apply(source, TransformOptions(tick_jitter_s=3.0)))
    assert len(set(before)) < 350
    assert len(set(after)) == len(after) == len(before)


def test_waiting_turns_keep_their_places_under_jitter():
    requests = at(1.0, 1.0, 1.0, 2.0)
    requests[1].after = 0
    requests[2].after = 1
    moved = list(apply(requests, TransformOptions(tick_jitter_s=5.0), 2))
    assert [request.request_id for request in moved] == [0, 1, 2, 3]
    assert moved[0].arrival_s == moved[1].arrival_s == moved[2].arrival_s
    assert times(moved) == sorted(times(moved))


def test_the_given_requests_stay_as_they_are():
    requests = at(0.0, 1.0, 2.0, think_s=1.0, prefix_tokens=3)
    before = copy.deepcopy(requests)
    options = TransformOptions(
        start_s=0.5, max_requests=2, prepend_prefix_tokens=7, tick_jitter_s=0.5, speedup=3.0
    )
    changed = list(apply(requests, options))
    assert requests == before
    assert [request.prompt_tokens for request in changed] == [17, 17]


def test_no_options_change_nothing():
    requests = at(0.0, 1.0)
    assert list(apply(requests, TransformOptions())) == requests


def test_transforms_stream():
    spec = WorkloadSpec.model_validate(
        {
            "requests": 10**12,
            "arrivals": {"kind": "poisson", "rate_per_s": 10},
            "private_tokens": 5,
            "output_tokens": 5,
        }
    )
    options = TransformOptions(start_s=1.0, prepend_prefix_tokens=9, tick_jitter_s=0.1, speedup=2.0)
    stream = apply(generate(spec, 0), options)
    assert next(stream).prompt_tokens == 14


@pytest.mark.parametrize(
    "options",
    [
        {"speedup": 0.0},
        {"speedup": float("inf")},
        {"tick_jitter_s": -1.0},
        {"start_s": float("nan")},
        {"start_s": 2.0, "end_s": 2.0},
        {"max_requests": 0},
        {"prepend_prefix_tokens": -1},
    ],
)
def test_options_out_of_range(options):
    with pytest.raises(ValueError, match="must"):
        TransformOptions(**options)
