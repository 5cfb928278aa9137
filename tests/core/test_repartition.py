"""Repartition policies on windows made by hand and at random, and on a pool that follows them."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from granikv.core.marginal import MarginalPolicy
from granikv.core.policies import POLICIES, make_policy
from granikv.core.repartition import Hold, Window
from granikv.core.watermark import WatermarkPolicy

QUIET = Window(
    now_s=1.0,
    size_tokens=100_000,
    hot_tokens=20_000,
    hot_used=20_000,
    hot_free=0,
    largest_free_run=0,
    cold_used=40_000,
    cold_free=40_000,
    cold_evictable=10_000,
    cold_promised=0,
    cold_waiting_tokens=0,
    hot_misses={},
    hot_miss_tokens=0,
    evictions=0,
    cold_refusals=0,
    retractions=0,
    private_tokens=25_000,
    rows_per_slab=((20_000, 4),),
    rows_per_cold_run=(),
)
# Eight rows read 8,000 tokens in COLD that HOT had no room for.
MISSING = replace(
    QUIET, hot_misses={"no_room": 3}, hot_miss_tokens=24_000, rows_per_cold_run=((8_000, 8),)
)
# COLD is short while half of HOT is read by nobody.
SHORT = replace(QUIET, cold_free=0, cold_evictable=0, cold_refusals=4, rows_per_slab=((10_000, 4),))


@st.composite
def windows(draw: st.DrawFn) -> Window:
    """Any state of a pool of 2 to 10**6 tokens, likely or not."""
    size = draw(st.integers(2, 10**6))
    hot = draw(st.integers(0, size - 1))
    slabs = st.lists(st.tuples(st.integers(1, max(1, hot // 4)), st.integers(2, 300)), max_size=4)
    read = tuple(draw(slabs)) if hot >= 4 else ()
    used = draw(st.integers(sum(length for length, _ in read), hot))
    cold_used = draw(st.integers(0, size - hot))
    runs = st.tuples(st.integers(1, size), st.integers(2, 300))
    misses = draw(st.integers(0, 3 * size))
    return Window(
        now_s=draw(st.floats(0, 1e6)),
        size_tokens=size,
        hot_tokens=hot,
        hot_used=used,
        hot_free=hot - used,
        largest_free_run=draw(st.integers(0, hot - used)),
        cold_used=cold_used,
        cold_free=size - hot - cold_used,
        cold_evictable=draw(st.integers(0, cold_used)),
        cold_promised=draw(st.integers(0, 2 * size)),
        cold_waiting_tokens=draw(st.integers(0, 10**7)),
        hot_misses={"no_room": 1} if misses else {},
        hot_miss_tokens=misses,
        evictions=draw(st.integers(0, 9)),
        cold_refusals=draw(st.integers(0, 2)),
        retractions=draw(st.integers(0, 2)),
        private_tokens=draw(st.integers(0, cold_used)),
        rows_per_slab=read,
        rows_per_cold_run=tuple(draw(st.lists(runs, max_size=4))),
    )


@pytest.mark.parametrize("name", POLICIES)
@given(st.lists(windows(), min_size=1, max_size=30))
def test_targets_lie_inside_the_pool_and_cost_what_is_there(name: str, seen: list[Window]) -> None:
    """No policy asks COLD for tokens that requests hold, nor HOT for those that rows share."""
    policy, again = make_policy(name), make_policy(name)
    for window in seen:
        target = policy.observe(window)
        assert target == again.observe(window)
        if target is None:
            continue
        assert name != "static"
        assert 0 <= target < window.size_tokens
        assert target != window.hot_tokens
        assert target - window.hot_tokens <= window.cold_idle
        assert window.hot_tokens - target <= window.hot_unread


@pytest.mark.parametrize("name", ["watermark", "marginal"])
@given(windows())
def test_a_constant_load_is_followed_in_one_direction(name: str, window: Window) -> None:
    """The boundary follows the answers, all else stays: it goes one way, if it goes at all."""
    policy = make_policy(name)
    ways = set()
    for _ in range(60):
        target = policy.observe(window)
        window = replace(window, now_s=window.now_s + 1.0)
        if target is None:
            continue
        change = target - window.hot_tokens
        ways.add(change > 0)
        window = replace(
            window,
            hot_tokens=target,
            hot_free=max(0, window.hot_free + change),
            cold_free=max(0, window.cold_free - change),
        )
        if window.hot_unread < 0 or target < window.hot_used:
            break
    assert len(ways) <= 1


@pytest.mark.parametrize(
    ("policy", "window", "change"),
    [
        (WatermarkPolicy(), QUIET, None),
        (WatermarkPolicy(), MISSING, 5_000),
        (WatermarkPolicy(), replace(MISSING, retractions=1), 5_000),
        (WatermarkPolicy(), replace(MISSING, hot_miss_tokens=999), None),
        (WatermarkPolicy(), replace(MISSING, cold_free=0, cold_evictable=4_000), 3_000),
        (WatermarkPolicy(), replace(MISSING, cold_free=0, cold_evictable=900), None),
        (WatermarkPolicy(), replace(MISSING, rows_per_slab=((14_000, 4),)), None),
        (WatermarkPolicy(), SHORT, -5_000),
        (WatermarkPolicy(), replace(SHORT, hot_miss_tokens=24_000), None),
        (WatermarkPolicy(), replace(SHORT, rows_per_slab=((17_000, 4),)), -3_000),
        (WatermarkPolicy(), replace(SHORT, rows_per_slab=((20_000, 4),)), None),
        (MarginalPolicy(), QUIET, None),
        (MarginalPolicy(), MISSING, 8_000),
        (MarginalPolicy(), replace(MISSING, rows_per_slab=((15_000, 4),)), 3_000),
        (MarginalPolicy(), replace(MISSING, rows_per_slab=((12_000, 4),)), None),
        (MarginalPolicy(), replace(MISSING, cold_free=0, cold_evictable=5_000), 5_000),
        (MarginalPolicy(), replace(MISSING, cold_free=0, cold_evictable=0), None),
        (MarginalPolicy(), replace(MISSING, hot_miss_tokens=0), None),
        # COLD's token is worth 6.0 reads, but a run that is read there gives its tokens back.
        (MarginalPolicy(), replace(MISSING, cold_refusals=1), 8_000),
        # No two rows read it yet: worth one read a token, against COLD's 0, 5.7 or 0.8.
        (MarginalPolicy(), replace(MISSING, rows_per_cold_run=()), 8_000),
        (MarginalPolicy(), replace(MISSING, rows_per_cold_run=(), cold_refusals=1), None),
        (MarginalPolicy(0.0), replace(MISSING, rows_per_cold_run=(), cold_refusals=1), 8_000),
        # Too short for a slab.
        (MarginalPolicy(), replace(MISSING, rows_per_cold_run=((255, 9),), retractions=1), None),
        (MarginalPolicy(return_s=0.0), SHORT, -10_000),
        (MarginalPolicy(return_s=0.0), replace(SHORT, rows_per_slab=((20_000, 4),)), None),
        (MarginalPolicy(return_s=0.0), replace(SHORT, cold_refusals=0), None),
    ],
)
def test_answers_by_hand(policy, window, change):
    target = policy.observe(window)
    assert target == (None if change is None else window.hot_tokens + change)


def test_marginal_values_by_hand():
    """In token reads a step: 6,100 beside KV, 25,000 alone; 8,000, 900 and 10,000 once."""
    policy = MarginalPolicy(fixed_reads=6_100.0)
    window = replace(SHORT, rows_per_cold_run=((8_000, 8), (900, 9)))
    assert policy.cold_value(window) == 0.0
    policy.observe(window)
    assert policy.cold_value(window) == (6_100 + 8_000 + 900 + 10_000) / 25_000 == 1.0


def follow(policy, *windows):
    """Answers to one window a second, as changes."""
    answers = [policy.observe(replace(w, now_s=float(i))) for i, w in enumerate(windows)]
    return [a and a - w.hot_tokens for a, w in zip(answers, windows, strict=True)]


def test_marginal_gives_the_least_of_what_was_spare_for_ten_seconds():
    less = replace(SHORT, rows_per_slab=((16_000, 4),))
    answers = follow(MarginalPolicy(), *[SHORT] * 5, less, *[SHORT] * 6)
    assert answers == [None] * 10 + [-4_000, None]


@pytest.mark.parametrize("between", [QUIET, MISSING])
def test_marginal_waits_anew_once_cold_has_room_or_hot_needs_its_tokens(between):
    answers = follow(MarginalPolicy(), *[SHORT] * 10, between, *[SHORT] * 11)
    assert answers[:10] == [None] * 10
    assert answers[11:] == [None] * 10 + [-10_000]


@pytest.mark.parametrize(("waiting_tokens", "given"), [(0, None), (500, -10_000)])
def test_a_full_server_refuses_nobody_and_is_short_while_somebody_waits(waiting_tokens, given):
    silent = replace(SHORT, cold_refusals=0, cold_waiting_tokens=waiting_tokens)
    assert follow(MarginalPolicy(), SHORT, *[silent] * 10)[-1] == given


def test_marginal_remembers_a_miss_while_it_is_read_in_cold():
    full = replace(MISSING, cold_free=0, cold_evictable=0)  # no room: nothing moves
    read = replace(MISSING, hot_misses={}, hot_miss_tokens=0)
    gone = replace(read, rows_per_cold_run=())
    assert follow(MarginalPolicy(), full, read) == [None, 8_000]
    assert follow(MarginalPolicy(), full, gone, read) == [None, None, None]


@given(st.lists(st.sampled_from([QUIET, MISSING, SHORT]), min_size=30, max_size=60))
def test_marginal_never_gives_twice_within_ten_seconds(windows):
    answers = follow(MarginalPolicy(), *windows)
    given_at = [i for i, change in enumerate(answers) if change is not None and change < 0]
    assert all(later - earlier > 10 for earlier, later in pairwise(given_at))


def test_watermark_remembers_a_miss_for_a_while():
    """24,000 tokens, halved five times, are below 1% of 100,000."""
    policy = WatermarkPolicy()
    full = replace(MISSING, cold_free=0, cold_evictable=0)  # no room: nothing moves
    silent = replace(full, hot_miss_tokens=0)
    roomy = replace(MISSING, hot_miss_tokens=0)
    assert [policy.observe(window) for window in (full, *[silent] * 3)] == [None] * 4
    assert policy.observe(roomy) is not None
    assert policy.observe(roomy) is None


def test_each_reversal_doubles_the_wait():
    hold = Hold(2, 8)
    waits = []
    for grows in (True, False, True, False, True, True, True, True):
        hold.begin(grows=grows)
        waits.append(1)
        while not hold.is_over():
            waits[-1] += 1
    assert waits == [2, 4, 8, 8, 8, 4, 2, 2]


def test_a_load_that_answers_every_move_is_followed_ever_more_slowly():
    policy = WatermarkPolicy()
    moves, window = [], MISSING
    for look in range(200):
        if policy.observe(window) is not None:
            moves.append(look)
            window = SHORT if window is MISSING else MISSING
    gaps = [later - earlier for earlier, later in pairwise(moves)]
    assert min(gaps[6:]) >= 16


@pytest.mark.parametrize(
    "build",
    [
        lambda: WatermarkPolicy(step=0.0),
        lambda: WatermarkPolicy(hold=0),
        lambda: MarginalPolicy(fixed_reads=-1.0),
        lambda: MarginalPolicy(shortest_tokens=0),
        lambda: MarginalPolicy(return_s=float("nan")),
    ],
)
def test_options_out_of_range(build):
    with pytest.raises(ValueError, match="must be"):
        build()
