"""Admission policies against answers worked out by hand, window search against every window."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from granikv.core.admission import (
    IdleSlab,
    PaperAdmission,
    PrefixView,
    SharedAdmission,
    ValueAdmission,
    make_admission,
    makes_run,
)
from granikv.core.errors import ConfigError


def view(length=1000, live=1, hits=1, first=0.0, last=0.0, now=0.0, hinted=False):
    return PrefixView(99, length, live, hits, first, last, now, hinted)


def idle_row(*slabs, now=0.0):
    """Idle slabs from `(gap_before, length, last_use_s, matches)`; None is a locked slab of 10."""
    row, base, gap_of = [], 1, [s[0] for s in slabs if s is not None]
    node = 0
    for index, slab in enumerate(slabs):
        if slab is None:
            base += 10
            continue
        gap, length, last, matches = slab
        base += gap
        neighbour = index + 1 < len(slabs) and slabs[index + 1] is not None
        after = gap_of[node + 1] if neighbour else 0
        node += 1
        row.append(
            IdleSlab(
                node=node,
                length=length,
                live_requests=0,
                hits=1 + matches,
                first_use_s=0.0,
                last_use_s=last,
                now_s=now,
                base=base,
                gap_before=gap,
                gap_after=after,
            )
        )
        base += length
    return row


@pytest.mark.parametrize(
    ("live", "hits", "hinted", "wanted"),
    [(1, 1, False, False), (1, 2, False, True), (2, 1, False, True), (1, 1, True, True)],
)
def test_paper_wants_what_was_seen_twice_or_hinted(live, hits, hinted, wanted):
    policy = PaperAdmission()
    assert policy.wants_slab(view(length=1, live=live, hits=hits, hinted=hinted)) is wanted


def test_paper_never_displaces():
    assert PaperAdmission().victims(view(length=5), idle_row((0, 10, 0.0, 0))) == []


@pytest.mark.parametrize(
    ("length", "live", "hinted", "wanted"),
    [
        (256, 2, False, True),
        (255, 9, True, False),
        (256, 1, False, False),
        (256, 1, True, True),
        (256, 0, True, False),
    ],
)
def test_shared_wants_long_prefixes_with_two_live_readers(length, live, hinted, wanted):
    assert SharedAdmission().wants_slab(view(length, live=live, hinted=hinted)) is wanted


def test_shared_displaces_the_neighbours_that_were_idle_longest():
    # Runs of 30: slabs 1+2 (latest use 9), 2+3 (9), 3+4 (5), 4 alone with its gaps reaches 25 only.
    idle = idle_row((0, 15, 2.0, 0), (0, 15, 9.0, 0), (5, 10, 4.0, 0), (5, 20, 5.0, 0))
    assert SharedAdmission().victims(view(30), idle) == [3, 4]


def test_shared_of_equal_age_displaces_the_fewest_tokens():
    idle = idle_row((0, 40, 1.0, 0), None, (0, 30, 1.0, 0), None, (20, 10, 1.0, 0))
    assert SharedAdmission().victims(view(30), idle) == [3]


def test_a_locked_slab_parts_two_windows():
    assert SharedAdmission().victims(view(20), idle_row((0, 10, 0, 0), None, (0, 10, 0, 0))) == []
    assert SharedAdmission().victims(view(20), idle_row((0, 10, 0, 0), (0, 10, 0, 0))) == [1, 2]


def test_a_gap_counts_once():
    idle = idle_row((0, 10, 0.0, 0), (5, 10, 0.0, 0))
    assert SharedAdmission().victims(view(25), idle) == [1, 2]
    assert SharedAdmission().victims(view(26), idle) == []


def test_saved_reads_by_hand():
    policy = ValueAdmission(residence_s=10.0, life_s=600.0)
    assert policy.saved_reads(view(live=5)) == 4.0
    assert policy.saved_reads(view(live=0)) == 0.0
    # 40 matches in 100 s, each held 10 s: a = 4, and 4 - 1 + exp(-4).
    busy = view(live=1, hits=41, first=0.0, last=100.0, now=100.0)
    assert policy.saved_reads(busy) == pytest.approx(3 + math.exp(-4))
    # 0.4 matches a second, then 10 s of silence: the chance that more come, and with it a, falls.
    in_use = 1 / (1 + (math.exp((0.4 + 1 / 600) * 10) - 1) / (1 + 0.4 * 600))
    assert in_use == pytest.approx(0.816, abs=0.001)
    idle = view(live=0, hits=41, first=0.0, last=100.0, now=110.0)
    expected = 4 * in_use - 1 + math.exp(-4 * in_use)
    assert policy.saved_reads(idle) == pytest.approx(expected)
    # A young prefix is not judged on less than one residence: a = 3.
    young = view(live=1, hits=4, first=100.0, last=101.0, now=101.0)
    assert policy.saved_reads(young) == pytest.approx(2 + math.exp(-3))


def test_what_was_used_often_is_given_up_sooner():
    """Twelve seconds of silence say much of a use a second, and nothing of one a minute."""
    policy = ValueAdmission()
    kept = []
    for gap_s in (1.0, 60.0):
        uses = {"live": 0, "hits": 61, "first": 0.0, "last": 60 * gap_s}
        kept.append(
            policy.saved_reads(view(**uses, now=60 * gap_s + 12))
            / policy.saved_reads(view(**uses, now=60 * gap_s))
        )
    assert kept[0] < 0.01
    assert kept[1] > 0.9


def test_years_of_silence_are_no_overflow():
    assert ValueAdmission().saved_reads(view(live=0, hits=9, last=10.0, now=1e9)) == 0.0


def test_a_hint_counts_as_two_readers_while_live():
    policy = ValueAdmission()
    assert policy.saved_reads(view(live=1, hinted=True)) == 1.0
    assert policy.saved_reads(view(live=3, hinted=True)) == 2.0
    assert policy.saved_reads(view(live=0, hinted=True)) == 0.0


@pytest.mark.parametrize(
    ("length", "live", "hits", "wanted"),
    [
        (256, 2, 1, True),
        (255, 9, 1, False),
        (256, 1, 1, False),
        # One match in 10 s: a = 1, saved = exp(-1) = 0.37.
        (256, 1, 2, True),
    ],
)
def test_value_wants_what_saves_reads(length, live, hits, wanted):
    assert ValueAdmission().wants_slab(view(length, live=live, hits=hits)) is wanted


def test_value_displaces_the_least_valuable_window_if_clearly_worth_less():
    # At age 0 with a matches: slab values are 10 * (a - 1 + exp(-a)).
    idle = idle_row((0, 10, 0.0, 3), (0, 10, 0.0, 1), (0, 10, 0.0, 1), (0, 10, 0.0, 5))
    displaced = 2 * 10 * math.exp(-1)
    policy = ValueAdmission(hysteresis=1.5)
    # The newcomer is worth 20 * (live - 1); 1.5 * displaced is about 11.04.
    assert displaced * 1.5 < 20
    assert policy.victims(view(20, live=2), idle) == [2, 3]
    assert ValueAdmission(hysteresis=3.0).victims(view(20, live=2), idle) == []
    assert ValueAdmission(hysteresis=3.0).victims(view(20, live=3), idle) == [2, 3]


def test_a_worthless_newcomer_displaces_nothing():
    assert ValueAdmission().victims(view(10, live=1), idle_row((0, 10, 0.0, 0))) == []


def test_a_slab_loses_value_with_age():
    policy = ValueAdmission()
    values = [
        policy.value(view(live=0, hits=30, first=0.0, last=30.0, now=now))
        for now in (30.0, 60.0, 120.0, 600.0)
    ]
    assert values == sorted(values, reverse=True)
    assert values[-1] < 1.0 < values[0]


ROWS = st.lists(
    st.none()
    | st.tuples(
        st.integers(0, 4), st.integers(1, 6), st.integers(0, 5).map(float), st.integers(0, 4)
    ),
    max_size=9,
)


def every_window(idle, length):
    """All windows of neighbours that make the run, without any cleverness."""
    for start in range(len(idle)):
        for stop in range(start + 1, len(idle) + 1):
            window = idle[start:stop]
            joined = all(
                a.base + a.length + a.gap_after == b.base for a, b in itertools.pairwise(window)
            )
            span = window[-1].base + window[-1].length - window[0].base
            if joined and window[0].gap_before + span + window[-1].gap_after >= length:
                yield window


@given(ROWS, st.integers(1, 30))
@settings(deadline=None)
def test_the_window_found_is_the_cheapest_of_all(row, length):
    idle = idle_row(*row)
    windows = list(every_window(idle, length))
    lru = SharedAdmission().victims(view(length), idle)
    policy = ValueAdmission()
    value = policy.victims(view(length, live=10**6), idle)
    assert makes_run(lru, idle, length) == bool(windows) == bool(lru)
    assert makes_run(value, idle, length) == bool(windows) == bool(value)
    if windows:
        assert [
            slab.node
            for slab in min(
                windows,
                key=lambda w: (max(s.last_use_s for s in w), sum(s.length for s in w), w[0].base),
            )
        ] == lru
        costs = [math.fsum(policy.value(s) for s in w) for w in windows]
        chosen = math.fsum(policy.value(s) for s in idle if s.node in value)
        assert chosen == min(costs)


def test_makes_run_accepts_idle_nodes_once_in_any_order():
    idle = idle_row((2, 10, 0.0, 0), (3, 10, 0.0, 0), None, (0, 10, 0.0, 0))
    assert makes_run([2, 1], idle, 25)
    assert not makes_run([2, 1], idle, 26)
    assert not makes_run([1, 2, 3], idle, 26)
    assert not makes_run([1, 1], idle, 5)
    assert not makes_run([1, 50], idle, 5)
    assert not makes_run([], idle, 1)


def test_policies_by_name():
    assert make_admission("paper") == PaperAdmission()
    assert make_admission("shared", min_tokens=64) == SharedAdmission(min_tokens=64)
    assert make_admission("value", hysteresis=2.0) == ValueAdmission(hysteresis=2.0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("shred", {}, "did you mean 'shared'"),
        ("zzz", {}, "choose one of paper, shared, value"),
        ("paper", {"min_tokens": 3}, "cannot take its options"),
        ("shared", {"min_live": 0}, "min_live must be positive"),
        ("value", {"life_s": math.nan}, "life_s must be positive"),
        ("value", {"hysteresis": 0.5}, "hysteresis must be at least 1"),
    ],
)
def test_names_and_options_that_cannot_be(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_admission(name, **options)
