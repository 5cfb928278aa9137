"""Boundary moves in small pools whose answers fit on paper."""

import pickle

import numpy as np
import pytest

from granikv.core.allocator import HotColdAllocator, Slab


def pool_with_cold(held: int) -> HotColdAllocator:
    """HOT 1..4, COLD 5..20, the lowest `held` COLD slots in use."""
    allocator = HotColdAllocator(20, 4)
    allocator.alloc_cold(held)
    return allocator


def test_growth_in_pieces():
    allocator = pool_with_cold(3)
    plan = allocator.plan_move(10)
    assert plan.grows
    assert plan.src.tolist() == [5, 6, 7]
    assert plan.dst.tolist() == [11, 12, 13]
    assert (plan.src.dtype, plan.dst.dtype) == (np.int32, np.int32)
    assert plan.feasible
    allocator.begin_move(plan)
    # Fenced: the three free slots 8..10 and the three targets.
    assert (allocator.fenced, allocator.cold_free, allocator.cold_used) == (6, 7, 3)
    assert [s.tolist() for s in allocator.next_piece(2)] == [[5, 6], [11, 12]]
    assert (allocator.fenced, allocator.cold_free, allocator.cold_used) == (6, 7, 3)
    assert not allocator.can_finish_move()
    allocator.free_cold([11])
    assert (allocator.fenced, allocator.cold_free, allocator.cold_used) == (6, 8, 2)
    assert [s.tolist() for s in allocator.next_piece(2)] == [[7], [13]]
    assert [s.tolist() for s in allocator.next_piece(2)] == [[], []]
    assert allocator.hot_tokens == 4
    assert allocator.move is plan
    allocator.finish_move()
    assert (allocator.hot_tokens, allocator.fenced, allocator.cold_free) == (10, 0, 8)
    assert allocator.move is None
    assert allocator.reserve_slab(10) == Slab(1, 10)
    allocator.check_integrity()


def test_a_source_freed_in_flight_releases_its_target():
    allocator = pool_with_cold(3)
    allocator.begin_move(allocator.plan_move(10))
    allocator.free_cold([6])
    assert (allocator.cold_free, allocator.cold_used, allocator.fenced) == (8, 2, 6)
    assert allocator.alloc_cold(1).tolist() == [12]
    assert [s.tolist() for s in allocator.next_piece(9)] == [[5, 7], [11, 13]]
    with pytest.raises(ValueError, match="held"):
        allocator.free_cold([5])
    allocator.finish_move()
    allocator.check_integrity()


def test_growth_that_cannot_fit_says_by_how_much():
    allocator = pool_with_cold(12)
    plan = allocator.plan_move(16)
    assert not plan.feasible
    assert plan.shortfall_tokens == 8
    before = pickle.dumps(allocator)
    with pytest.raises(ValueError, match="short of 8 tokens"):
        allocator.begin_move(plan)
    assert pickle.dumps(allocator) == before


@pytest.mark.parametrize("change", ["alloc", "free", "slab"])
def test_a_stale_plan_is_refused(change):
    allocator = pool_with_cold(3)
    plan = allocator.plan_move(2 if change == "slab" else 10)
    if change == "alloc":
        allocator.alloc_cold(1)
    elif change == "free":
        allocator.free_cold([6])
    else:
        allocator.reserve_slab(4)
    with pytest.raises(ValueError, match="stale"):
        allocator.begin_move(plan)
    assert allocator.move is None


def test_aborted_growth_gives_everything_back():
    allocator = pool_with_cold(3)
    allocator.begin_move(allocator.plan_move(10))
    allocator.next_piece(1)
    allocator.abort_move()
    assert (allocator.hot_tokens, allocator.cold_free, allocator.cold_used) == (4, 13, 3)
    # Slot 5 was moved to 11 and is the lowest that came back.
    assert allocator.alloc_cold(4).tolist() == [5, 8, 9, 10]
    allocator.check_integrity()


def test_shrinking_waits_for_blockers():
    allocator = HotColdAllocator(30, 20)
    first, second, third = (allocator.reserve_slab(n) for n in (4, 8, 5))
    allocator.free_slab(first)
    plan = allocator.plan_move(10)
    assert not plan.grows
    assert plan.blockers == (second, third)
    allocator.begin_move(plan)
    assert (allocator.fenced, allocator.hot_free, allocator.slab_limit_tokens) == (3, 4, 10)
    assert [s.tolist() for s in allocator.next_piece(5)] == [[], []]
    assert not allocator.can_finish_move()
    allocator.free_slab(third)
    assert (allocator.fenced, allocator.hot_free) == (8, 4)
    # Slots 5..12: six below the new boundary, two above.
    allocator.free_slab(second)
    assert (allocator.fenced, allocator.hot_free) == (10, 10)
    assert allocator.can_finish_move()
    allocator.finish_move()
    assert (allocator.hot_tokens, allocator.hot_free, allocator.cold_free) == (10, 10, 20)
    assert allocator.alloc_cold(2).tolist() == [11, 12]
    allocator.check_integrity()


def test_a_slab_that_ends_at_the_new_boundary_blocks_nothing():
    allocator = HotColdAllocator(30, 20)
    allocator.reserve_slab(10)
    assert allocator.plan_move(10).blockers == ()
    assert allocator.plan_move(9).blockers == (Slab(1, 10),)


def test_a_tail_freed_while_hot_shrinks_is_fenced():
    allocator = HotColdAllocator(30, 20)
    slab = allocator.reserve_slab(20)
    allocator.begin_move(allocator.plan_move(10))
    allocator.shrink_slab(slab, 8)
    assert (allocator.hot_free, allocator.fenced, allocator.largest_free_run) == (2, 10, 2)
    assert allocator.can_finish_move()
    allocator.check_integrity()


def test_aborted_shrinking_joins_the_runs_again():
    allocator = HotColdAllocator(30, 20)
    slab = allocator.reserve_slab(15)
    allocator.begin_move(allocator.plan_move(10))
    allocator.free_slab(slab)
    allocator.abort_move()
    assert (allocator.hot_tokens, allocator.largest_free_run) == (20, 20)
    allocator.check_integrity()


def test_the_whole_pool_can_become_cold_and_hot_again():
    allocator = HotColdAllocator(12, 11)
    for hot_tokens in (0, 11, 0):
        allocator.begin_move(allocator.plan_move(hot_tokens))
        allocator.finish_move()
        assert (allocator.hot_free, allocator.cold_free) == (hot_tokens, 12 - hot_tokens)
        allocator.check_integrity()


@pytest.mark.parametrize("hot_tokens", [-1, 20])
def test_a_boundary_outside_the_pool(hot_tokens):
    with pytest.raises(ValueError, match="hot_tokens must be in"):
        pool_with_cold(0).plan_move(hot_tokens)


def test_a_piece_needs_tokens():
    allocator = pool_with_cold(1)
    allocator.begin_move(allocator.plan_move(10))
    with pytest.raises(ValueError, match="max_tokens must be positive"):
        allocator.next_piece(0)
