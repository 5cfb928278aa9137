"""trace_info against a brute-force model, and its golden values on the shipped cut."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from granikv.traces import Request, Run, open_trace
from granikv.traces.hot_pool import PoolRow
from granikv.traces.prefix_tree import PrefixTree
from granikv.traces.segments import private_segment
from granikv.traces.stats import trace_info
from granikv.traces.tables import DATA


def tokens_of(prompt):
    """A prompt as single tokens, each named by the path that leads to it."""
    return tuple((segment, place) for segment, length in prompt for place in range(length))


@st.composite
def prompts(draw):
    stream = st.tuples(st.integers(0, 2), st.integers(1, 4))
    return [
        tuple(Run(*run) for run in draw(st.lists(stream, min_size=1, max_size=4)))
        for _ in range(draw(st.integers(1, 12)))
    ]


@given(prompts())
@settings(max_examples=300, deadline=None)
def test_tree_agrees_with_a_set_of_token_paths(trace):
    tree = PrefixTree(60.0)
    seen = Counter()
    for now, prompt in enumerate(trace):
        path = tokens_of(prompt)
        expected = 0
        while expected < len(path) and seen[path[: expected + 1]]:
            expected += 1
        assert tree.add(prompt, float(now)) == expected
        for end in range(1, len(path) + 1):
            seen[path[:end]] += 1
        tree.check_integrity()
    longest = defaultdict(int)
    for path, count in seen.items():
        for end in range(1, len(path)):
            longest[path[:end]] = max(longest[path[:end]], count)
    maximal = Counter(
        (len(path), count) for path, count in seen.items() if count > 1 and longest[path] < count
    )
    found = tree.shared_prefixes()
    assert Counter((node.depth_tokens, node.requests) for node in found) == maximal


def ask(*prompts_and_times):
    return [
        Request(number, time, tuple(Run(*run) for run in prompt), 4 * number + 1)
        for number, (prompt, time) in enumerate(prompts_and_times)
    ]


def test_a_trace_worked_out_by_hand():
    info = trace_info(
        ask(
            ([(1, 100), (2, 50)], 0.0),
            ([(1, 100), (2, 50)], 10.0),
            ([(1, 100), (3, 50)], 10.0),
            ([(1, 40)], 100.0),
            ([(9, 60)], 130.0),
        ),
        min_prefix_tokens=100,
    )
    assert (info.requests, info.duration_s, info.distinct_times, info.largest_tick) == (
        5,
        130.0,
        4,
        2,
    )
    assert info.rate_per_s == pytest.approx(5 / 130)
    assert info.prompt.total == 550
    assert info.prompt.quantiles[3] == 150.0
    assert info.prompt.quantiles[1] == pytest.approx(48.0)
    assert info.output.mean == 9.0
    assert info.shared_tokens == 150 + 100 + 40
    assert info.shared_fraction == pytest.approx(290 / 550)
    assert info.covered_requests == 2
    assert (info.prefixes, info.prefixes_10, info.prefixes_100) == (3, 0, 0)
    found = [(p.tokens, p.requests, p.tokens_served, p.lifetime_s) for p in info.top_by_tokens]
    assert found == [(100, 3, 300, 10.0), (150, 2, 300, 10.0), (40, 4, 160, 100.0)]
    assert [p.tokens for p in info.top_by_requests] == [40, 100, 150]
    assert [(p.tokens, p.peak_requests) for p in info.top_by_peak] == [(100, 3), (150, 2)]


def test_the_window_slides_and_is_half_open():
    one = [(1, 10)]
    requests = ask((one, 0.0), (one, 30.0), (one, 60.0), (one, 200.0), (one, 201.0))
    assert trace_info(requests, min_prefix_tokens=1).top_by_peak[0].peak_requests == 2
    wide = trace_info(requests, window_s=60.5, min_prefix_tokens=1)
    assert wide.top_by_peak[0].peak_requests == 3


def test_greedy_pool_counts_a_token_once():
    system, tools = (1, 100), (2, 900)
    requests = ask(
        *[([system, tools], float(i)) for i in range(4)], ([system], 4.0), ([system], 5.0)
    )
    rows = trace_info(requests).pool
    # The system prompt alone serves 6 tokens per stored token; the longer one then adds 900 for 4.
    assert rows == (
        PoolRow(1, 100, 600),
        PoolRow(2, 1_100, 600 + 4 * 900),
    )


def test_greedy_pool_takes_a_longer_prefix_first_when_it_serves_more():
    requests = ask(*[([(1, 10), (2, 990)], float(i)) for i in range(9)], ([(1, 10)], 9.0))
    rows = trace_info(requests).pool
    assert rows[0] == PoolRow(1, 10, 100)
    assert rows[1] == PoolRow(2, 1_010, 100 + 9 * 990)


def test_private_runs_need_no_memory():
    tree = PrefixTree(60.0)
    for number in range(100):
        assert tree.add((Run(private_segment(number), 500),), float(number)) == 0
    assert list(tree.nodes()) == []


def test_all_at_once_has_no_rate():
    info = trace_info(ask(([(1, 5)], 0.0), ([(1, 5)], 0.0)))
    assert info.rate_per_s is None
    assert info.largest_tick == 2


def test_no_requests():
    with pytest.raises(ValueError, match="must not be empty"):
        trace_info([])


def test_shipped_cut_has_its_golden_values():
    info = trace_info(open_trace(DATA / "mooncake-conversation.jsonl.gz"))
    # Recounted block by block with a plain dictionary of (parent, id).
    assert info.requests == 2_728
    assert info.duration_s == 899.999
    assert (info.distinct_times, info.largest_tick) == (301, 19)
    assert info.prompt.total == 36_783_744
    assert info.output.total == 951_148
    assert info.shared_tokens == 11_359_373
    assert info.covered_requests == 22
    assert (info.prefixes, info.prefixes_10, info.prefixes_100) == (739, 8, 1)
    assert info.prompt.quantiles[3] == 7_965.0
    assert info.pool[1] == PoolRow(2, 25_088, 1_829_888)
    assert info.waiting_turns == 0
