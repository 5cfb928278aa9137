"""SlabDirectory against a model that knows which marks each node's KV must hold."""

import pickle
from dataclasses import replace

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

from granikv.core.admission import PaperAdmission, PrefixView, SharedAdmission, ValueAdmission
from granikv.core.allocator import HotColdAllocator, Slab
from granikv.core.directory import SlabDirectory
from granikv.core.errors import IntegrityError

PICK = st.integers(0, 10**6)
POLICIES = (PaperAdmission(), SharedAdmission(1, 1), ValueAdmission(min_tokens=1))


def view(node=1, length=4, live=2, now=0.0, hinted=False):
    return PrefixView(node, length, live, 1, now, now, now, hinted)


class DirectoryMachine(RuleBasedStateMachine):
    """Nodes live in COLD or HOT; whatever moves, each must still read its own marks in order."""

    @initialize(
        size=st.integers(8, 60),
        hot=st.integers(0, 40),
        policy=st.sampled_from(POLICIES),
        fit=st.sampled_from(["first", "best"]),
    )
    def start(self, size, hot, policy, fit):
        self.allocator = HotColdAllocator(size, min(hot, size - 1), fit)
        self.directory = SlabDirectory(self.allocator, policy)
        self.kv = np.zeros(size + 1, np.int64)
        self.hot: dict[int, list[int]] = {}
        self.locks: dict[int, int] = {}
        self.past: dict[int, tuple[int, float]] = {}
        self.cold: dict[int, tuple[np.ndarray, list[int]]] = {}
        self.filling: list[list] = []
        self.relocation = None
        self.next_node, self.next_mark, self.now_s = 0, 1, 0.0
        self.expected = dict.fromkeys(("evictions", "relocated_tokens"), 0)
        self.missed: dict[str, int] = {}
        self.missed_tokens = 0

    def new_view(self, length, live) -> PrefixView:
        self.next_node += 1
        self.now_s += 1.0
        return view(self.next_node, length, live, self.now_s)

    def write(self, slots) -> list[int]:
        marks = list(range(self.next_mark, self.next_mark + len(slots)))
        self.next_mark += len(slots)
        self.kv[slots] = marks
        return marks

    def refused(self, call, *arguments) -> None:
        before = pickle.dumps((self.allocator, vars(self.directory)))
        with pytest.raises(ValueError, match="must"):
            call(*arguments)
        assert pickle.dumps((self.allocator, vars(self.directory))) == before

    def some_hot(self, pick) -> int:
        return sorted(self.hot)[pick % len(self.hot)]

    def attach(self, node, marks, locks, now_s) -> None:
        self.hot[node], self.locks[node], self.past[node] = marks, locks, (1, now_s)

    @rule(length=st.integers(1, 24), live=st.integers(1, 4), want_room=st.booleans())
    def reserve(self, length, live, want_room):
        wanted = self.new_view(length, live)
        before = pickle.dumps((self.allocator, vars(self.directory)))
        self.directory.wants(wanted)
        assert pickle.dumps((self.allocator, vars(self.directory))) == before
        if want_room and not self.make_room(wanted):
            return
        fits = self.allocator.can_reserve(length)
        reservation = self.directory.reserve(wanted)
        assert (reservation is not None) == fits
        if reservation is not None:
            self.filling.append([reservation, []])

    def make_room(self, wanted) -> bool:
        """Evict what the directory names; afterwards the prefix must fit."""
        fits = self.allocator.can_reserve(wanted.length)
        victims = self.directory.victims(wanted)
        if victims is None:
            if wanted.length > self.allocator.hot_tokens:
                reason = "too_long"
            elif wanted.length > self.allocator.hot_free:
                reason = "no_room"
            else:
                reason = "fragmented"
            self.missed[reason] = self.missed.get(reason, 0) + 1
            self.missed_tokens += wanted.length
            return False
        assert (victims == []) == fits
        for node in victims:
            self.evict(node)
        assert self.allocator.can_reserve(wanted.length)
        return True

    @precondition(lambda self: self.filling)
    @rule(pick=PICK, n=st.integers(0, 12))
    def fill(self, pick, n):
        reservation, marks = self.filling[pick % len(self.filling)]
        left = reservation.view.length - reservation.filled
        if n > left:
            self.refused(self.directory.take, reservation, n)
            return
        slots = self.directory.take(reservation, n)
        assert slots.dtype == np.int32
        assert len(slots) == n
        marks += self.write(slots)

    @precondition(lambda self: self.filling)
    @rule(pick=PICK, n=st.integers(0, 12), locks=st.integers(0, 2))
    def bind(self, pick, n, locks):
        index = pick % len(self.filling)
        reservation, marks = self.filling[index]
        self.next_node += 1
        if not 0 < n <= len(marks):
            self.refused(self.directory.bind, self.next_node, reservation, n)
            return
        for node in self.hot:
            self.refused(self.directory.bind, node, reservation, n)
        slab = self.directory.bind(self.next_node, reservation, n, locks)
        assert slab.length == n
        self.attach(self.next_node, marks[:n], locks, reservation.view.last_use_s)
        del marks[:n]
        if reservation.bound == reservation.view.length:
            self.filling.pop(index)
            self.refused(self.directory.take, reservation, 0)
            self.directory.release(reservation)

    @precondition(lambda self: self.filling)
    @rule(pick=PICK)
    def release(self, pick):
        reservation, _ = self.filling.pop(pick % len(self.filling))
        self.directory.release(reservation)
        self.directory.release(reservation)
        self.refused(self.directory.take, reservation, 0)
        self.refused(self.directory.bind, -1, reservation, 1)

    @rule(length=st.integers(1, 12))
    def prefill_cold(self, length):
        slots = self.allocator.alloc_cold(length)
        if slots is not None:
            self.next_node += 1
            self.cold[self.next_node] = (slots, self.write(slots))

    @precondition(lambda self: self.cold)
    @rule(pick=PICK, live=st.integers(1, 4), want_room=st.booleans())
    def promote(self, pick, live, want_room):
        node = sorted(self.cold)[pick % len(self.cold)]
        slots, marks = self.cold[node]
        wanted = replace(self.new_view(len(slots), live), node=node)
        if want_room and not self.make_room(wanted):
            return
        fits = self.allocator.can_reserve(len(slots))
        reservation = self.directory.reserve(wanted)
        assert (reservation is not None) == fits
        if reservation is None:
            return
        dst = self.directory.take(reservation, len(slots))
        self.allocator.free_cold(slots)
        for other in self.hot:
            self.refused(self.directory.bind, other, reservation, len(slots))
        self.directory.bind(node, reservation, len(slots), locks=live)
        self.kv[dst] = self.kv[slots]
        del self.cold[node]
        self.attach(node, marks, live, wanted.last_use_s)

    @precondition(lambda self: self.hot)
    @rule(pick=PICK, left=st.integers(0, 12))
    def split(self, pick, left):
        node = self.some_hot(pick)
        self.next_node += 1
        marks = self.hot[node]
        self.refused(self.directory.split, node, node, left)
        if not 0 < left < len(marks):
            self.refused(self.directory.split, node, self.next_node, left)
            return
        self.directory.split(node, self.next_node, left)
        self.hot[node], self.hot[self.next_node] = marks[left:], marks[:left]
        self.locks[self.next_node], self.past[self.next_node] = self.locks[node], self.past[node]
        upper, lower = self.directory.slab_of(self.next_node), self.directory.slab_of(node)
        assert upper.end == lower.base

    @precondition(lambda self: self.hot)
    @rule(pick=PICK, up=st.booleans())
    def lock(self, pick, up):
        node = self.some_hot(pick)
        if up:
            self.directory.lock(node)
            self.locks[node] += 1
        elif self.locks[node]:
            self.directory.unlock(node)
            self.locks[node] -= 1
        else:
            self.refused(self.directory.unlock, node)

    @precondition(lambda self: self.hot)
    @rule(pick=PICK)
    def touch(self, pick):
        node = self.some_hot(pick)
        self.now_s += 1.0
        self.directory.touch(node, self.now_s)
        self.past[node] = (self.past[node][0] + 1, self.now_s)

    @precondition(lambda self: self.hot)
    @rule(pick=PICK)
    def evict_some(self, pick):
        self.evict(self.some_hot(pick))

    def evict(self, node):
        if self.locks[node]:
            self.refused(self.directory.evict, node)
            return
        self.directory.evict(node)
        for of_node in (self.hot, self.locks, self.past):
            del of_node[node]
        self.expected["evictions"] += 1

    @precondition(lambda self: self.hot and self.relocation is None)
    @rule(pick=PICK, below=st.none() | st.integers(1, 40), compact=st.booleans())
    def begin_relocation(self, pick, below, compact):
        node = self.some_hot(pick)
        old = self.directory.slab_of(node)
        below = old.base if compact else below
        self.relocation = self.directory.begin_relocation(node, below)
        if self.relocation is None:
            assert below is not None or not self.allocator.can_reserve(old.length)
            return
        assert self.relocation.old == self.directory.slab_of(node) == old
        assert below is None or self.relocation.new.end <= below

    @precondition(lambda self: self.relocation is not None)
    @rule(max_tokens=st.integers(1, 10))
    def copy_a_piece(self, max_tokens):
        src, dst = self.relocation.next_piece(max_tokens)
        assert (src.dtype, dst.dtype) == (np.int32, np.int32)
        assert not set(src.tolist()) & set(dst.tolist())
        assert len(src) == max_tokens or self.relocation.is_copied
        self.kv[dst] = self.kv[src]

    @precondition(lambda self: self.relocation is not None)
    @rule()
    def end_relocation(self):
        relocation, self.relocation = self.relocation, None
        slab = self.directory.slab_of(relocation.node)
        was_current = self.directory.is_current(relocation)
        assert was_current == (slab == relocation.old)
        assert self.directory.end_relocation(relocation) == (was_current and relocation.is_copied)
        self.refused(self.directory.end_relocation, relocation)
        if was_current and relocation.is_copied:
            assert self.directory.slab_of(relocation.node) == relocation.new
            self.expected["relocated_tokens"] += relocation.new.length

    @precondition(lambda self: self.allocator.move is None)
    @rule(hot=st.integers(0, 59))
    def begin_move(self, hot):
        plan = self.allocator.plan_move(min(hot, self.allocator.size_tokens - 1))
        if plan.feasible:
            self.allocator.begin_move(plan)

    @precondition(lambda self: self.allocator.move is not None)
    @rule(max_tokens=st.integers(1, 10))
    def move_a_piece(self, max_tokens):
        src, dst = self.allocator.next_piece(max_tokens)
        self.kv[dst] = self.kv[src]
        moved = dict(zip(src.tolist(), dst.tolist(), strict=True))
        for node, (slots, marks) in self.cold.items():
            now = np.array([moved.get(slot, slot) for slot in slots.tolist()], np.int32)
            self.cold[node] = (now, marks)
        for node, locked in self.directory.blocked_by(self.allocator.move):
            assert self.directory.slab_of(node).end > self.allocator.move.new_hot_tokens + 1
            assert locked == (self.locks[node] > 0)
        is_all = not self.filling and self.relocation is None
        if is_all and not self.directory.blocked_by(self.allocator.move):
            assert self.allocator.can_finish_move() == (not self.cold_in_the_way())

    def cold_in_the_way(self) -> bool:
        boundary = self.allocator.move.new_hot_tokens
        return any(int(slots.min()) <= boundary for slots, _ in self.cold.values())

    @precondition(lambda self: self.allocator.can_finish_move())
    @rule()
    def finish_move(self):
        self.allocator.finish_move()

    @precondition(lambda self: self.allocator.move is not None)
    @rule()
    def abort_move(self):
        self.allocator.abort_move()

    @precondition(lambda self: len(self.hot) > 2)
    @rule()
    def clear(self):
        self.directory.clear()
        for reservation, _ in self.filling:
            self.refused(self.directory.take, reservation, 0)
        if self.relocation is not None:
            self.refused(self.directory.end_relocation, self.relocation)
        self.relocation = None
        self.filling.clear()
        for of_node in (self.hot, self.locks, self.past):
            of_node.clear()
        assert self.allocator.hot_used == 0

    @rule()
    def strangers(self):
        for call in (self.directory.lock, self.directory.unlock, self.directory.evict):
            self.refused(call, -1)
        self.refused(self.directory.touch, -1, 0.0)
        self.refused(self.directory.split, -1, -2, 1)
        self.refused(self.directory.begin_relocation, -1)
        assert self.directory.slab_of(-1) is None

    @invariant()
    def every_node_reads_its_marks(self):
        self.allocator.check_integrity()
        self.directory.check_integrity()
        for node, marks in self.hot.items():
            assert self.kv[self.directory.slab_of(node).slots()].tolist() == marks
            assert self.directory.locks_of(node) == self.locks[node]
        for slots, marks in self.cold.values():
            assert self.kv[slots].tolist() == marks
        for reservation, marks in self.filling:
            start = reservation.slab.base
            assert self.kv[start : start + len(marks)].tolist() == marks

    @invariant()
    def idle_slabs_are_described_by_the_pool(self):
        idle = self.directory.idle(self.now_s)
        assert [slab.node for slab in idle] == sorted(
            (node for node in self.hot if not self.locks[node]),
            key=lambda node: self.directory.slab_of(node).base,
        )
        free = {slot for base, n in self.allocator._runs for slot in range(base, base + n)}
        for slab in idle:
            assert self.directory.slab_of(slab.node) == Slab(slab.base, slab.length)
            assert (slab.hits, slab.last_use_s) == self.past[slab.node]
            assert (slab.live_requests, slab.now_s) == (0, self.now_s)
            before, after = slab.base - 1, slab.base + slab.length
            while before in free:
                before -= 1
            while after in free:
                after += 1
            assert slab.gap_before == slab.base - 1 - before
            assert slab.gap_after == after - slab.base - slab.length

    @invariant()
    def counts_what_happened(self):
        assert {name: getattr(self.directory, name) for name in self.expected} == self.expected
        assert dict(self.directory.misses) == self.missed
        assert self.directory.hot_miss_tokens == self.missed_tokens


TestDirectoryMachine = DirectoryMachine.TestCase
TestDirectoryMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class Offers:
    """A policy that offers a fixed list, sensible or not."""

    def __init__(self, *nodes: int) -> None:
        self.nodes = list(nodes)

    def wants_slab(self, view):
        return True

    def victims(self, view, idle):
        return self.nodes


def filled(admission, *lengths, hot=20, size=40) -> SlabDirectory:
    """Nodes 1, 2, ... with slabs of these lengths, unlocked."""
    directory = SlabDirectory(HotColdAllocator(size, hot), admission)
    for node, length in enumerate(lengths, start=1):
        reservation = directory.reserve(view(node, length))
        directory.take(reservation, length)
        directory.bind(node, reservation, length)
    return directory


def test_wants_asks_the_policy_once_per_prefix():
    directory = filled(PaperAdmission(), 5)
    assert not directory.wants(view(1, 5))
    assert directory.wants(view(2, 5))
    assert not directory.wants(view(2, 5, live=1))
    assert directory.wants(view(2, 39)), "a larger HOT could hold it"
    assert not directory.wants(view(2, 40)), "no HOT can hold it"
    assert not directory.wants(view(2, 0))


@pytest.mark.parametrize(
    ("lengths", "locked", "length", "reason"),
    [
        ((), (), 21, "too_long"),
        ((10, 5), (1, 2), 6, "no_room"),
        ((2, 8, 2), (2,), 11, "fragmented"),
    ],
)
def test_misses_by_reason(lengths, locked, length, reason):
    directory = filled(SharedAdmission(1, 1), *lengths)
    for node in locked:
        directory.lock(node)
    if reason == "fragmented":
        directory.evict(1)
        directory.evict(3)
        reservation = directory.reserve(view(9, 2))
        directory.take(reservation, 2)
        length = 11
    assert directory.victims(view(9, length)) is None
    if reason == "fragmented":
        assert directory.misses == {"no_room": 1}
        directory.release(reservation)
        assert directory.victims(view(9, length)) is None
        assert directory.misses == {"no_room": 1, "fragmented": 1}
        assert directory.hot_miss_tokens == 22
        return
    assert directory.misses == {reason: 1}
    assert directory.hot_miss_tokens == length


@pytest.mark.parametrize("nodes", [(1, 1), (2,), (1, 7), (3,), (1,)])
def test_an_offer_that_makes_no_run_is_a_miss(nodes):
    directory = filled(Offers(*nodes), 8, 6, 6)
    directory.lock(2)
    assert directory.victims(view(9, 10)) is None
    assert directory.misses == {"no_room": 1}


def test_an_offer_counts_gaps_and_neighbours():
    directory = filled(Offers(3, 1), 4, 6, 4)
    directory.evict(2)
    assert directory.victims(view(9, 20)) == [3, 1]


def test_while_hot_shrinks_only_slabs_below_the_new_boundary_give_room():
    directory = filled(SharedAdmission(1, 1), 8, 12)
    allocator = directory._allocator
    allocator.begin_move(allocator.plan_move(10))
    assert directory.blocked_by(allocator.move) == [(2, False)]
    assert directory.victims(view(9, 8)) == [1]
    assert directory.victims(view(9, 12)) is None


def test_while_hot_shrinks_a_slab_across_the_new_boundary_gives_no_room():
    directory = filled(SharedAdmission(1, 1), 6, 12)
    allocator = directory._allocator
    allocator.begin_move(allocator.plan_move(10))
    assert directory.victims(view(9, 8)) is None
    assert directory.misses == {"no_room": 1}


def test_growth_has_no_blockers():
    directory = filled(SharedAdmission(1, 1), 8)
    plan = directory._allocator.plan_move(25)
    assert directory.blocked_by(plan) == []


def test_a_slab_that_ends_at_the_new_boundary_blocks_nothing():
    directory = filled(SharedAdmission(1, 1), 10)
    directory.lock(1)
    allocator = directory._allocator
    assert directory.blocked_by(allocator.plan_move(10)) == []
    assert directory.blocked_by(allocator.plan_move(9)) == [(1, True)]


def test_slabs_by_falling_address_and_the_highest_reserved_slot():
    """Slabs 1..8 and 9..12, then a reservation of 13..17."""
    directory = filled(SharedAdmission(1, 1), 8, 4)
    assert directory.by_falling_address() == [(2, Slab(9, 4)), (1, Slab(1, 8))]
    assert directory.highest_reserved_slot() == 0
    reservation = directory.reserve(view(9, 5))
    assert directory.highest_reserved_slot() == 17
    directory.release(reservation)
    assert directory.highest_reserved_slot() == 0


def test_chunked_prefill_of_nested_nodes():
    directory = SlabDirectory(HotColdAllocator(40, 20), PaperAdmission())
    reservation = directory.reserve(view(1, 12))
    assert directory.take(reservation, 5).tolist() == [1, 2, 3, 4, 5]
    assert directory.bind(1, reservation, 5) == Slab(1, 5)
    assert directory.take(reservation, 3).tolist() == [6, 7, 8]
    with pytest.raises(ValueError, match=r"1\.\.3"):
        directory.bind(2, reservation, 4)
    assert directory.bind(2, reservation, 3) == Slab(6, 3)
    assert (reservation.filled, reservation.bound) == (8, 8)
    directory.release(reservation)
    assert directory._allocator.hot_used == 8
    directory.split(1, 3, 2)
    assert (directory.slab_of(3), directory.slab_of(1)) == (Slab(1, 2), Slab(3, 3))


def test_locks_cannot_start_negative():
    directory = SlabDirectory(HotColdAllocator(40, 20), PaperAdmission())
    reservation = directory.reserve(view(1, 4))
    directory.take(reservation, 4)
    with pytest.raises(ValueError, match="locks must not be negative"):
        directory.bind(1, reservation, 4, locks=-1)


def test_a_slab_taken_behind_its_back_is_named():
    directory = filled(PaperAdmission(), 5)
    directory._allocator.free_slab(Slab(1, 5))
    with pytest.raises(IntegrityError, match="must know every slab"):
        directory.check_integrity()


def test_a_slab_that_belongs_to_nobody_is_named():
    directory = filled(PaperAdmission(), 5)
    directory._allocator.reserve_slab(3)
    with pytest.raises(IntegrityError, match="== hot_used must hold"):
        directory.check_integrity()
