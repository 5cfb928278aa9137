"""The simulator against queueing theory and against schedules worked out by hand.

A prompt as long as the chunk fills a prefill batch, so requests with one output token are a single
server with a constant service time: `EXTEND_NS + EXTEND_NS_PER_TOKEN * tokens`.
"""

import math

import numpy as np
import pytest
from sim_support import EXTEND_NS, EXTEND_NS_PER_TOKEN, Result, lone, run, tiny

_TOKENS = 90
_SERVICE_NS = EXTEND_NS + EXTEND_NS_PER_TOKEN * _TOKENS
_ONE_AT_A_TIME = tiny(chunked_prefill_size=_TOKENS)


def _waits_ns(arrivals_ns: list[int]) -> list[int]:
    requests = [lone(i, at / 1e9, _TOKENS, 1) for i, at in enumerate(arrivals_ns)]
    result = run(requests, _ONE_AT_A_TIME)
    assert result.outcome.finished == len(requests)
    first = (result.requests["first_token_s"] * 1e9).round().cast(int).to_list()
    return [end - at - _SERVICE_NS for end, at in zip(first, arrivals_ns, strict=True)]


def _lindley_ns(arrivals_ns: list[int]) -> list[int]:
    """Waits of a single server: what is left of the server's work when a request comes."""
    waits, wait = [], 0
    for before, at in zip([arrivals_ns[0], *arrivals_ns], arrivals_ns, strict=False):
        gap = at - before
        wait = max(0, wait + _SERVICE_NS - gap) if waits else 0
        waits.append(wait)
    return waits


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_poisson_arrivals_wait_as_in_m_d_1(load: float) -> None:
    """Mean wait of M/D/1: `rho * s / (2 * (1 - rho))`.

    A sample mean over n requests has a relative standard error of about
    `sqrt(2 / n) * rho / (1 - rho)` (reflected Brownian motion with the queue's drift and variance,
    whose mean has the asymptotic variance 1/2 on its own scale); four of them are allowed.
    """
    count = 8000
    gaps = np.random.default_rng(7).exponential(_SERVICE_NS / load, count)
    arrivals_ns = np.cumsum(gaps).astype(np.int64).tolist()
    waits = _waits_ns(arrivals_ns)
    assert waits == _lindley_ns(arrivals_ns)
    expected = load * _SERVICE_NS / (2 * (1 - load))
    bound = 4 * math.sqrt(2 / count) * load / (1 - load)
    assert abs(np.mean(waits) / expected - 1) < bound


@pytest.mark.parametrize("gap_ns", [_SERVICE_NS - 1000, _SERVICE_NS, _SERVICE_NS + 1000])
def test_regular_arrivals_wait_as_in_d_d_1(gap_ns: int) -> None:
    """Each request waits for what the ones before it have left over: nothing up to full load."""
    waits = _waits_ns([i * gap_ns for i in range(200)])
    assert waits == [i * max(0, _SERVICE_NS - gap_ns) for i in range(200)]


def _times_ns(result: Result, column: str) -> list[int]:
    return [round(value * 1e9) for value in result.requests[column]]


def _steps(result: Result) -> list[tuple[int, str, int, int]]:
    rows = result.steps.select("start_s", "kind", "rows", "steps").rows()
    return [(round(start * 1e9), kind, rows, steps) for start, kind, rows, steps in rows]


_THREE = [lone(0, 0.0, 10, 3), lone(1, 5_000e-9, 20, 2), lone(2, 12_500e-9, 30, 1)]


def test_three_requests_by_hand() -> None:
    """Extend steps take 11, 12 and 13 us, a decode step 1 us.

    At 11 us request 1 is in the queue and is prefilled before request 0 decodes, at 23 us request
    2.
    """
    result = run(_THREE, tiny())
    assert _times_ns(result, "first_token_s") == [11_000, 23_000, 36_000]
    assert _times_ns(result, "finish_s") == [38_000, 37_000, 36_000]
    assert _steps(result) == [
        (0, "extend", 1, 1),
        (11_000, "extend", 1, 1),
        (23_000, "extend", 1, 1),
        (36_000, "decode", 2, 1),
        (37_000, "decode", 1, 1),
    ]


def test_three_requests_with_an_overlapped_scheduler_by_hand() -> None:
    """What runs next is decided one batch earlier, so each arrival waits for one more batch.

    At 0 only request 0 is there: its decode step is decided while it is prefilled. At 11 us, while
    that step runs, request 1 is seen; at 24 us request 2. Request 2's end is seen too late to stop
    the decode step that follows, which is decided when its prefill starts.
    """
    result = run(_THREE, tiny(overlap_schedule=True))
    assert _times_ns(result, "first_token_s") == [11_000, 24_000, 38_000]
    assert _times_ns(result, "finish_s") == [25_000, 25_000, 38_000]
    assert _steps(result) == [
        (0, "extend", 1, 1),
        (11_000, "decode", 1, 1),
        (12_000, "extend", 1, 1),
        (24_000, "decode", 2, 1),
        (25_000, "extend", 1, 1),
        (38_000, "decode", 1, 1),
    ]


def test_an_overlapped_scheduler_runs_a_finished_row_once_more() -> None:
    alone = run([lone(0, 0.0, 10, 4)], tiny(overlap_schedule=True))
    assert _times_ns(alone, "finish_s") == [14_000]
    assert _steps(alone) == [(0, "extend", 1, 1), (11_000, "decode", 1, 4)]
    assert alone.outcome.end_s == 15e-6


def test_an_idle_server_starts_at_once() -> None:
    for overlap in (False, True):
        result = run([lone(0, 1e-3, 10, 2), lone(1, 5e-3, 10, 2)], tiny(overlap_schedule=overlap))
        assert _times_ns(result, "first_token_s") == [1_011_000, 5_011_000]


def test_arrivals_of_one_instant_share_a_batch() -> None:
    result = run([lone(i, 1e-3, 10, 2) for i in range(5)], tiny())
    assert _steps(result)[0] == (1_000_000, "extend", 5, 1)
