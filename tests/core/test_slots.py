"""Free runs against a set of slots, the COLD stack against a list."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from granikv.core.errors import IntegrityError
from granikv.core.slots import ColdPool, FreeRuns, Slab

LO, HI = 3, 40


def runs_of(free: set[int]) -> list[tuple[int, int]]:
    """Maximal runs of a set, as `(base, length)` by address."""
    runs: list[tuple[int, int]] = []
    for slot in sorted(free):
        if runs and sum(runs[-1]) == slot:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((slot, 1))
    return runs


def expected_base(free: set[int], n: int, fit: str, below: int | None) -> int | None:
    """Base that a search through every run picks."""
    fitting = [
        (length, base)
        for base, length in runs_of(free)
        if length >= n and (below is None or base + n <= below)
    ]
    if fit == "best":
        return min(fitting)[1] if fitting else None
    return min((base for _, base in fitting), default=None)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["first", "best", "give", "at", "range"]),
        st.integers(LO - 2, HI + 1),
        st.integers(1, 12),
        st.booleans(),
    ),
    max_size=60,
)


@given(OPERATIONS)
@settings(deadline=None)
def test_free_runs_follow_a_set(operations):
    runs, free = FreeRuns(LO, HI), set(range(LO, HI))
    runs.give(LO, HI - LO)
    for name, base, n, limited in operations:
        span = set(range(base, base + n))
        if name in ("first", "best"):
            below = base if limited else None
            got = runs.take(n, name, below)
            assert got == expected_base(free, n, name, below)
            free -= set(range(got, got + n)) if got is not None else set()
        elif name == "range":
            cut = runs.take_range(base, base + n)
            assert cut == runs_of(free & span)
            free -= span
        elif name == "at" and span <= free:
            runs.take_at(base, n)
            free -= span
        elif name == "give" and span <= set(range(LO, HI)) - free:
            runs.give(base, n)
            free |= span
        else:
            before = pickle.dumps(runs)
            with pytest.raises(ValueError, match="base"):
                runs.take_at(base, n) if name == "at" else runs.give(base, n)
            assert pickle.dumps(runs) == before
        runs.check_integrity()
        assert list(runs) == runs_of(free)
        assert runs.total == len(free)
        assert runs.largest == max((length for _, length in runs_of(free)), default=0)


@given(st.sets(st.integers(LO, HI - 1)), st.integers(LO, HI - 1), st.integers(1, 6))
@settings(deadline=None)
def test_gaps_are_the_free_slots_next_to_a_span(free, base, n):
    free -= set(range(base, base + n))
    runs = FreeRuns(LO, HI + 6)
    for start, length in runs_of(free):
        runs.give(start, length)
    by_base, by_end = dict(runs_of(free)), {sum(run): run[1] for run in runs_of(free)}
    assert runs.gaps([base], [base + n]) == ([by_end.get(base, 0)], [by_base.get(base + n, 0)])


def test_free_runs_grow_past_their_first_arrays():
    runs = FreeRuns(0, 4000)
    for base in range(0, 4000, 2):
        runs.give(base, 1)
    assert runs.count == 2000
    assert list(runs)[-1] == (3998, 1)
    runs.check_integrity()


@pytest.mark.parametrize("n", [0, -1])
def test_take_refuses_no_slots(n):
    with pytest.raises(ValueError, match="n must be positive"):
        FreeRuns(1, 5).take(n)


def test_a_broken_total_is_named():
    runs = FreeRuns(1, 5)
    runs.give(1, 2)
    runs.total = 3
    with pytest.raises(IntegrityError, match="total"):
        runs.check_integrity()


def test_slab_lists_its_slots():
    assert Slab(5, 3).slots().tolist() == [5, 6, 7]
    assert Slab(5, 3).slots().dtype == np.int32
    assert Slab(5, 3).end == 8


@given(st.lists(st.integers(-8, 8), max_size=40), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_cold_pool_follows_a_stack(steps, random):
    pool, stack, held = ColdPool(3, 30), list(range(29, 2, -1)), []
    for step in steps:
        if step >= 0:
            got = pool.alloc(step)
            if step > len(stack):
                assert got is None
                continue
            expected = [stack.pop() for _ in range(step)]
            assert got.tolist() == expected
            assert got.dtype == np.int32
            held += expected
        else:
            random.shuffle(held)
            back, held = held[:-step], held[-step:]
            pool.free(np.array(back, np.int64))
            stack += back
        pool.check_integrity()
        assert (pool.available, pool.used) == (len(stack), len(held))
        assert pool.held_slots(0, 30).tolist() == sorted(held)
        assert pool.free_slots(0, 30).tolist() == sorted(stack)


@given(st.permutations(range(1, 13)), st.integers(0, 12), st.integers(0, 12), st.integers(0, 12))
@settings(deadline=None)
def test_two_calls_equal_one(order, kept, a, b):
    once, twice = ColdPool(1, 13), ColdPool(1, 13)
    for pool in (once, twice):
        pool.alloc(12)
    once.free(order[kept:])
    middle = (12 + kept) // 2
    twice.free(order[kept:middle])
    twice.free(order[middle:])
    if a + b > 12 - kept:
        assert once.alloc(a + b) is None
        return
    assert once.alloc(a + b).tolist() == [*twice.alloc(a).tolist(), *twice.alloc(b).tolist()]
    rest = once.available
    assert once.alloc(rest).tolist() == twice.alloc(rest).tolist()


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([3, 3], "distinct"),
        ([4, 5, 3, 5], "distinct"),
        ([3, 20], "held"),
        ([1], "held"),
        ([0], "positive"),
        ([-3], "positive"),
        (np.array([-3], np.int32), "lie in"),
        (np.array([3, 400], np.int32), "lie in"),
        ([2**40], "positive int32"),
        ([3.0], "integer"),
        ([[3]], "1-D"),
    ],
)
def test_a_bad_free_changes_nothing(slots, message):
    pool = ColdPool(3, 30)
    pool.alloc(5)
    before = pickle.dumps(pool)
    with pytest.raises(ValueError, match=message):
        pool.free(slots)
    assert pickle.dumps(pool) == before


def test_freed_slots_cannot_be_freed_again():
    pool = ColdPool(1, 9)
    slots = pool.alloc(4)
    pool.free(slots)
    with pytest.raises(ValueError, match="held"):
        pool.free(slots[:1])


def test_alloc_gives_a_copy_that_later_calls_leave_alone():
    pool = ColdPool(1, 9)
    first = pool.alloc(3)
    seen = first.tolist()
    pool.free(first)
    pool.alloc(8)
    assert first.tolist() == seen


def test_alloc_refuses_a_negative_count():
    with pytest.raises(ValueError, match="negative"):
        ColdPool(1, 9).alloc(-1)


def test_freeing_nothing_is_fine():
    pool = ColdPool(1, 9)
    pool.free([])
    assert pool.available == 8


def test_withdraw_refuses_held_slots():
    pool = ColdPool(1, 9)
    held = pool.alloc(2)
    before = pickle.dumps(pool)
    with pytest.raises(ValueError, match="free"):
        pool.withdraw(held)
    assert pickle.dumps(pool) == before
