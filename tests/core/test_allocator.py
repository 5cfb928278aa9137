"""HotColdAllocator against a model that knows who owns each slot and what KV is written there."""

import pickle

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from granikv.core.allocator import HotColdAllocator, Slab
from granikv.core.errors import IntegrityError

PICK = st.integers(0, 10**6)


class AllocatorMachine(RuleBasedStateMachine):
    """Slabs and COLD holders write distinct marks; every move must keep them readable."""

    @initialize(
        size=st.integers(2, 48), hot=st.integers(0, 47), fit=st.sampled_from(["first", "best"])
    )
    def start(self, size, hot, fit):
        self.size, self.fit = size, fit
        self.hot = min(hot, size - 1)
        self.allocator = HotColdAllocator(size, self.hot, fit)
        self.slabs: set[Slab] = set()
        self.cold: set[int] = set()
        self.kv = np.zeros(size + 1, np.int64)
        self.marks: dict[int, int] = {}
        self.target: int | None = None
        self.waiting: dict[int, int] = {}

    # What the model says is free, from first principles.

    def owned_hot(self) -> set[int]:
        return {slot for slab in self.slabs for slot in range(slab.base, slab.end)}

    def free_hot(self) -> set[int]:
        limit = self.hot if self.target is None else min(self.hot, self.target)
        return set(range(1, limit + 1)) - self.owned_hot()

    def free_cold(self) -> set[int]:
        start = self.hot if self.target is None else max(self.hot, self.target)
        return set(range(start + 1, self.size + 1)) - self.cold - set(self.waiting.values())

    def hot_runs(self) -> list[tuple[int, int]]:
        runs, free = [], self.free_hot()
        for slot in sorted(free):
            if slot - 1 not in free:
                end = next(s for s in range(slot, self.size + 2) if s not in free)
                runs.append((slot, end - slot))
        return runs

    def write(self, slots) -> None:
        for slot in map(int, slots):
            mark = len(self.marks) + int(self.kv.max()) + 1
            self.kv[slot] = mark
            self.marks[slot] = mark

    def forget(self, slots) -> None:
        for slot in map(int, slots):
            del self.marks[slot]
            self.kv[slot] = 0

    def some_slab(self, pick) -> Slab:
        return sorted(self.slabs, key=lambda slab: slab.base)[pick % len(self.slabs)]

    def refused(self, call, *arguments) -> None:
        before = pickle.dumps(self.allocator)
        with pytest.raises(ValueError, match=r"must|one move"):
            call(*arguments)
        assert pickle.dumps(self.allocator) == before

    @rule(n=st.integers(1, 20), below=st.none() | st.integers(1, 50))
    def reserve(self, n, below):
        fitting = [
            (length, base)
            for base, length in self.hot_runs()
            if length >= n and (below is None or base + n <= below)
        ]
        if below is None:
            assert self.allocator.can_reserve(n) == bool(fitting)
        slab = self.allocator.reserve_slab(n, below)
        if not fitting:
            assert slab is None
            return
        best = min(fitting)[1] if self.fit == "best" else min(base for _, base in fitting)
        assert slab == Slab(best, n)
        self.slabs.add(slab)
        self.write(slab.slots())

    @precondition(lambda self: self.slabs)
    @rule(pick=PICK)
    def free_slab(self, pick):
        slab = self.some_slab(pick)
        self.allocator.free_slab(slab)
        self.slabs.remove(slab)
        self.forget(slab.slots())
        self.refused(self.allocator.free_slab, slab)

    @precondition(lambda self: self.slabs)
    @rule(pick=PICK, left=st.integers(-1, 20))
    def split_slab(self, pick, left):
        slab = self.some_slab(pick)
        if not 0 < left < slab.length:
            self.refused(self.allocator.split_slab, slab, left)
            return
        parts = self.allocator.split_slab(slab, left)
        assert parts == (Slab(slab.base, left), Slab(slab.base + left, slab.length - left))
        self.slabs.remove(slab)
        self.slabs.update(parts)

    @precondition(lambda self: self.slabs)
    @rule(pick=PICK, length=st.integers(-1, 20))
    def shrink_slab(self, pick, length):
        slab = self.some_slab(pick)
        if not 0 < length <= slab.length:
            self.refused(self.allocator.shrink_slab, slab, length)
            return
        kept = self.allocator.shrink_slab(slab, length)
        assert kept == Slab(slab.base, length)
        self.slabs.remove(slab)
        self.slabs.add(kept)
        self.forget(range(kept.end, slab.end))

    @rule(base=st.integers(0, 50), length=st.integers(0, 20))
    def foreign_slab(self, base, length):
        slab = Slab(base, length)
        if slab in self.slabs:
            return
        self.refused(self.allocator.free_slab, slab)
        self.refused(self.allocator.split_slab, slab, 1)
        self.refused(self.allocator.shrink_slab, slab, 1)

    @rule(n=st.integers(0, 20))
    def alloc_cold(self, n):
        enough = n <= len(self.free_cold())
        assert self.allocator.can_alloc_cold(n) == enough
        slots = self.allocator.alloc_cold(n)
        if not enough:
            assert slots is None
            return
        got = set(slots.tolist())
        assert len(got) == n
        assert got <= self.free_cold()
        self.cold |= got
        self.write(slots)

    @precondition(lambda self: self.cold)
    @rule(data=st.data())
    def free_some_cold(self, data):
        slots = data.draw(
            st.lists(st.sampled_from(sorted(self.cold)), unique=True, min_size=1, max_size=12)
        )
        self.refused(self.allocator.free_cold, [*slots, slots[0]])
        self.allocator.free_cold(slots)
        self.cold -= set(slots)
        self.forget(slots)
        for slot in slots:
            self.waiting.pop(slot, None)
        self.refused(self.allocator.free_cold, slots[:1])

    @rule(slot=st.integers(-2, 52))
    def foreign_cold(self, slot):
        if slot not in self.cold:
            self.refused(self.allocator.free_cold, [slot, *sorted(self.cold)[:2]])

    @precondition(lambda self: self.target is None)
    @rule(hot=st.integers(0, 47))
    def begin_move(self, hot):
        hot = min(hot, self.size - 1)
        before = pickle.dumps(self.allocator)
        plan = self.allocator.plan_move(hot)
        assert pickle.dumps(self.allocator) == before
        in_the_way = sorted(slot for slot in self.cold if slot <= hot)
        above = sorted(slot for slot in self.free_cold() if slot > hot)
        assert plan.src.tolist() == in_the_way
        assert plan.shortfall_tokens == max(0, len(in_the_way) - len(above))
        assert list(plan.blockers) == sorted(
            (slab for slab in self.slabs if slab.end - 1 > hot), key=lambda slab: slab.base
        )
        if not plan.feasible:
            self.refused(self.allocator.begin_move, plan)
            return
        assert plan.dst.tolist() == above[: len(in_the_way)]
        self.allocator.begin_move(plan)
        self.target = hot
        self.waiting = dict(zip(plan.src.tolist(), plan.dst.tolist(), strict=True))
        self.refused(self.allocator.plan_move, hot)
        self.refused(self.allocator.begin_move, plan)

    @precondition(lambda self: self.target is not None)
    @rule(max_tokens=st.integers(1, 8))
    def move_a_piece(self, max_tokens):
        src, dst = (slots.tolist() for slots in self.allocator.next_piece(max_tokens))
        assert src == sorted(self.waiting)[:max_tokens]
        assert dst == [self.waiting[slot] for slot in src]
        self.kv[dst] = self.kv[src]
        self.kv[src] = 0
        for old, new in zip(src, dst, strict=True):
            self.marks[new] = self.marks.pop(old)
            del self.waiting[old]
        self.cold = self.cold - set(src) | set(dst)

    @precondition(lambda self: self.target is not None)
    @rule()
    def finish_move(self):
        lo, hi = sorted((self.hot, self.target))
        region = set(range(lo + 1, hi + 1))
        done = not region & (self.cold | self.owned_hot())
        assert self.allocator.can_finish_move() == done
        if not done:
            self.refused(self.allocator.finish_move)
            return
        self.allocator.finish_move()
        self.hot, self.target = self.target, None

    @precondition(lambda self: self.target is not None)
    @rule()
    def abort_move(self):
        self.allocator.abort_move()
        self.target, self.waiting = None, {}

    @precondition(lambda self: self.target is None)
    @rule()
    def nothing_to_move(self):
        assert not self.allocator.can_finish_move()
        self.refused(self.allocator.next_piece, 1)
        self.refused(self.allocator.finish_move)
        self.refused(self.allocator.abort_move)

    @invariant()
    def agrees_with_the_model(self):
        allocator, stats = self.allocator, self.allocator.stats()
        allocator.check_integrity()
        runs = self.hot_runs()
        assert allocator.hot_tokens == self.hot
        assert stats.hot_used == len(self.owned_hot())
        assert stats.hot_free == len(self.free_hot())
        assert stats.largest_free_run == max((length for _, length in runs), default=0)
        assert (stats.free_runs, stats.slabs) == (len(runs), len(self.slabs))
        assert stats.cold_used == len(self.cold)
        assert stats.cold_free == len(self.free_cold())
        assert all(allocator.owns(slab) for slab in self.slabs)
        assert (
            stats.hot_used + stats.hot_free + stats.cold_used + stats.cold_free + stats.fenced
            == self.size
        )

    @invariant()
    def keeps_every_mark(self):
        assert {slot: int(self.kv[slot]) for slot in self.marks} == self.marks
        assert set(self.marks) == self.cold | self.owned_hot()


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(("size", "hot"), [(10, 10), (10, -1), (0, 0), (2**31, 5)])
def test_sizes_out_of_range(size, hot):
    with pytest.raises(ValueError, match="hot_tokens must be"):
        HotColdAllocator(size, hot)


def test_unknown_fit():
    with pytest.raises(ValueError, match="fit must be 'first' or 'best'"):
        HotColdAllocator(10, 5, "worst")


@pytest.mark.parametrize("n", [0, -4])
def test_slabs_need_tokens(n):
    allocator = HotColdAllocator(10, 5)
    assert not allocator.can_reserve(n)
    with pytest.raises(ValueError, match="n must be positive"):
        allocator.reserve_slab(n)


def test_first_and_best_fit_differ():
    bases = {}
    for fit in ("first", "best"):
        allocator = HotColdAllocator(30, 20, fit)
        slabs = [allocator.reserve_slab(n) for n in (6, 2, 3, 9)]
        allocator.free_slab(slabs[0])
        allocator.free_slab(slabs[2])
        bases[fit] = allocator.reserve_slab(3).base
    assert bases == {"first": 1, "best": 9}


def test_an_empty_hot_side_is_a_miss_not_an_error():
    allocator = HotColdAllocator(10, 0)
    assert allocator.reserve_slab(1) is None
    assert sorted(allocator.alloc_cold(10).tolist()) == list(range(1, 11))


def test_a_lost_slab_is_named():
    allocator = HotColdAllocator(10, 5)
    allocator.reserve_slab(2)
    allocator.hot_used -= 1
    with pytest.raises(IntegrityError, match="hot_used"):
        allocator.check_integrity()


def test_a_lost_cold_slot_is_named():
    allocator = HotColdAllocator(10, 5)
    allocator.alloc_cold(2)
    allocator._pool.release([6])
    with pytest.raises(IntegrityError, match="== size_tokens must hold"):
        allocator.check_integrity()
