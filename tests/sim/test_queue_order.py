"""The order in which waiting requests are tried: SGLang 0.5.17's `fcfs` and `lpm`."""

import pytest
from sim_support import lone, prompt, run, tiny

from granikv.traces.request import Request

_SEED = Request(0, 0.0, prompt((1, 100), (9, 1)), 1)
_ONE_BY_ONE = {"chunked_prefill_size": 8192, "max_prefill_tokens": 1, "size_tokens": 5000}


def _order(requests: list[Request], policy: str) -> list[int]:
    result = run(requests, tiny(schedule_policy=policy, **_ONE_BY_ONE))
    return result.requests.sort("first_token_s", "id")["id"].to_list()


def test_lpm_takes_the_longest_cached_prefix_first() -> None:
    requests = [
        _SEED,
        Request(1, 1e-6, prompt((5, 40)), 1),
        Request(2, 2e-6, prompt((1, 50), (6, 10)), 1),
        Request(3, 3e-6, prompt((1, 100), (7, 10)), 1),
    ]
    assert _order(requests, "fcfs") == [0, 1, 2, 3]
    assert _order(requests, "lpm") == [0, 3, 2, 1]


def test_lpm_counts_at_most_all_but_the_last_token() -> None:
    """Both have 99 usable tokens, so they stay in the order of the queue."""
    requests = [
        _SEED,
        Request(1, 1e-6, prompt((1, 99), (5, 10)), 1),
        Request(2, 2e-6, prompt((1, 100)), 1),
    ]
    assert _order(requests, "lpm") == [0, 1, 2]


@pytest.mark.parametrize(("shared", "order"), [(32, [0, 1, 3, 2]), (31, [0, 1, 2, 3])])
def test_lpm_holds_back_a_second_request_with_the_same_new_prefix(
    shared: int, order: list[int]
) -> None:
    """1 and 2 share tokens that nobody has cached: from 32 on, one goes first and the other one
    waits for its cache. The batch after the first takes two requests.
    """
    requests = [
        _SEED,
        Request(1, 1e-6, prompt((5, shared), (6, 10)), 1),
        Request(2, 2e-6, prompt((5, shared), (7, 10)), 1),
        Request(3, 3e-6, prompt((8, 40)), 1),
    ]
    config = tiny(schedule_policy="lpm", max_prefill_tokens=60, size_tokens=5000)
    result = run(requests, config)
    assert result.steps["rows"].to_list() == [1, 2, 1]
    assert result.requests.sort("first_token_s", "id")["id"].to_list() == order


@pytest.mark.parametrize(("waiting", "first"), [(128, 128), (129, 1)])
def test_lpm_gives_up_above_128_waiting_requests(waiting: int, first: int) -> None:
    requests = [_SEED]
    requests += [lone(i, 1e-6, 10, 1) for i in range(1, waiting)]
    requests.append(Request(waiting, 2e-6, prompt((1, 100), (7, 10)), 1))
    order = _order(requests, "lpm")
    assert order[1] == first
