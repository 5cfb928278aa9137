"""Scores: larger is better, and nobody gains by refusing requests."""

from dataclasses import replace

import pytest

from granikv.planner.objective import score


@pytest.fixture(scope="module")
def summary(planned):
    return planned[0].of("sglang")[0].summary


def test_latency_is_a_rate_so_that_more_is_better(summary):
    slow = replace(summary, e2e_s=replace(summary.e2e_s, mean=4.0))
    assert score(slow, "latency") == pytest.approx(0.25)


def test_refusing_requests_does_not_look_fast(summary):
    all_served = replace(
        summary, requests=100, finished=100, e2e_s=replace(summary.e2e_s, mean=2.0)
    )
    half_refused = replace(
        all_served, finished=50, refused=50, e2e_s=replace(summary.e2e_s, mean=1.5)
    )
    assert score(half_refused, "latency") == pytest.approx(0.5 / 1.5)
    assert score(half_refused, "latency") < score(all_served, "latency")


def test_nothing_finished_is_worth_nothing(summary):
    none = replace(summary, finished=0, e2e_s=replace(summary.e2e_s, mean=0.0))
    assert score(none, "latency") == 0.0


def test_other_scores_are_the_rates_themselves(summary):
    assert score(summary, "throughput") == summary.throughput_tokens_per_s
    assert score(summary, "goodput") == summary.goodput_requests_per_s
