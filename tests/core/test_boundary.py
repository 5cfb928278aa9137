"""Moves of the boundary under random loads: bounded, and every live token is where tables say."""

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

from granikv.core.admission import PaperAdmission, PrefixView
from granikv.core.allocator import HotColdAllocator, Slab
from granikv.core.boundary import Boundary
from granikv.core.directory import SlabDirectory

PICK = st.integers(0, 10**6)
SIZE = 60


def view(node: int, length: int) -> PrefixView:
    return PrefixView(node, length, 1, 1, 0.0, 0.0, 0.0, hinted=False)


class Tree:
    """Nodes in COLD or HOT without parents, and what was written for each of them.

    KV are marks. Readers of a HOT node read its slab as this table has it, not the directory's.
    """

    def __init__(self, hot_tokens: int, budget_tokens: int) -> None:
        self.allocator = HotColdAllocator(SIZE, hot_tokens)
        self.directory = SlabDirectory(self.allocator, PaperAdmission())
        self.boundary = Boundary(self.allocator, self.directory, self, budget_tokens)
        self.kv = np.zeros(SIZE + 1, np.int64)
        self.cold: dict[int, np.ndarray] = {}
        self.hot: dict[int, Slab] = {}
        self.locked: set[int] = set()
        self.marks: dict[int, list[int]] = {}
        self.last = 0

    def new_marks(self, slots: np.ndarray) -> int:
        self.last += 1
        self.marks[self.last] = [self.last * 1000 + i for i in range(len(slots))]
        self.kv[slots] = self.marks[self.last]
        return self.last

    def new_cold(self, length: int) -> int | None:
        slots = self.allocator.alloc_cold(length)
        if slots is None:
            return None
        node = self.new_marks(slots)
        self.cold[node] = slots
        return node

    def new_hot(self, length: int) -> int | None:
        reservation = self.directory.reserve(view(self.last + 1, length))
        if reservation is None:
            return None
        node = self.new_marks(self.directory.take(reservation, length))
        self.hot[node] = self.directory.bind(node, reservation, length)
        return node

    def lock(self, node: int) -> None:
        self.locked.add(node)
        if node in self.hot:
            self.directory.lock(node)

    def unlock(self, node: int) -> None:
        self.locked.remove(node)
        if node in self.hot:
            self.directory.unlock(node)

    def split_hot(self, node: int, left: int) -> None:
        slab = self.hot[node]
        self.last += 1
        self.directory.split(node, self.last, left)
        self.hot[self.last], self.hot[node] = (
            Slab(slab.base, left),
            Slab(slab.base + left, slab.length - left),
        )
        self.marks[self.last], self.marks[node] = self.marks[node][:left], self.marks[node][left:]
        if node in self.locked:
            self.locked.add(self.last)

    def drop(self, node: int) -> None:
        if node in self.cold:
            self.allocator.free_cold(self.cold.pop(node))
        else:
            self.evict_hot(node)

    def read(self, node: int) -> list[int]:
        slots = self.cold[node] if node in self.cold else self.hot[node].slots()
        return self.kv[slots].tolist()

    # what `Holders` asks for

    @property
    def evictable_tokens(self) -> int:
        return sum(len(slots) for node, slots in self.cold.items() if node not in self.locked)

    def ensure_cold(self, tokens: int) -> bool:
        for node in sorted(set(self.cold) - self.locked):
            if self.allocator.cold_free >= tokens:
                break
            self.allocator.free_cold(self.cold.pop(node))
        return self.allocator.cold_free >= tokens

    def is_hot_cached(self, node_id: int) -> bool:
        return node_id in self.hot

    def evict_hot(self, node_id: int) -> None:
        assert node_id not in self.locked
        self.directory.evict(node_id)
        del self.hot[node_id]

    def move_cold(self, src: np.ndarray, dst: np.ndarray) -> None:
        self.kv[dst] = self.kv[src]
        moved = np.arange(SIZE + 1, dtype=np.int32)
        moved[src] = dst
        for node in self.cold:
            self.cold[node] = moved[self.cold[node]]

    def copy_slab(self, src: np.ndarray, dst: np.ndarray) -> None:
        self.kv[dst] = self.kv[src]

    def move_slab(self, node_id: int, old: Slab, new: Slab) -> None:
        assert self.hot[node_id] == old
        self.hot[node_id] = new


class BoundaryMachine(RuleBasedStateMachine):
    """A server that goes on serving while its boundary moves."""

    @initialize(
        hot=st.integers(10, 45),
        budget=st.integers(1, 12),
        slabs=st.lists(st.integers(1, 8), min_size=4, max_size=16),
        runs=st.lists(st.integers(1, 8), max_size=8),
        fate=st.lists(st.sampled_from(["held", "cached", "gone"]), min_size=24, max_size=24),
    )
    def start(self, hot, budget, slabs, runs, fate):
        """A pool with gaps: some prefixes are held, some cached, some have left."""
        self.tree, self.budget = Tree(hot, budget), budget
        nodes = [self.tree.new_hot(n) for n in slabs] + [self.tree.new_cold(n) for n in runs]
        made = [node for node in nodes if node is not None]
        for node, what in zip(made, fate, strict=False):
            if what == "held":
                self.tree.lock(node)
            elif what == "gone":
                self.tree.drop(node)

    def some(self, nodes, pick):
        return sorted(nodes)[pick % len(nodes)] if nodes else None

    @rule(length=st.integers(1, 12), locked=st.booleans())
    def prefill_cold(self, length, locked):
        node = self.tree.new_cold(length)
        if node is not None and locked:
            self.tree.lock(node)

    @rule(length=st.integers(1, 12), locked=st.booleans())
    def prefill_hot(self, length, locked):
        node = self.tree.new_hot(length)
        if node is not None and locked:
            self.tree.lock(node)

    @rule(pick=PICK)
    def end_a_request(self, pick):
        node = self.some(self.tree.locked, pick)
        if node is not None:
            self.tree.unlock(node)

    @rule(pick=PICK, tokens=st.integers(1, 30))
    def evict(self, pick, tokens):
        self.tree.ensure_cold(tokens)
        node = self.some(set(self.tree.hot) - self.tree.locked, pick)
        if node is not None:
            self.tree.evict_hot(node)

    @rule(pick=PICK, left=st.integers(1, 5))
    def split(self, pick, left):
        node = self.some(self.tree.hot, pick)
        if node is not None and left < self.tree.hot[node].length:
            self.tree.split_hot(node, left)

    @precondition(lambda self: not self.tree.boundary.is_moving)
    @rule(hot=st.integers(0, SIZE - 1), promised=st.integers(0, 20))
    def begin(self, hot, promised):
        tree = self.tree
        room = tree.allocator.cold_free + tree.evictable_tokens - promised
        locked = set(tree.locked)
        before = tree.allocator.hot_tokens
        began = tree.boundary.begin(hot, promised)
        assert began == (hot < before or hot - before <= room) or hot == before
        assert locked <= set(tree.cold) | set(tree.hot)
        if began:
            with pytest.raises(ValueError, match="only one move"):
                tree.boundary.begin(hot)

    @precondition(lambda self: self.has_gaps and not self.tree.boundary.is_moving)
    @rule()
    def compact(self):
        self.tree.boundary.compact()

    @property
    def has_gaps(self):
        return self.tree.allocator.largest_free_run < self.tree.allocator.hot_free

    @rule(steps=st.integers(1, 4))
    def steps(self, steps):
        tree = self.tree
        for _ in range(steps):
            locked_hot, before = tree.locked & set(tree.hot), tree.boundary.moved_tokens
            copied = tree.boundary.advance()
            assert 0 <= copied <= self.budget
            assert tree.boundary.moved_tokens - before == copied
            assert locked_hot <= set(tree.hot)  # no demotion
            self.all_is_where_tables_say()

    @rule()
    def finish(self):
        """Left alone, every move ends: nothing waits for a slab in use."""
        tree, most = self.tree, 2 * SIZE * SIZE
        while tree.boundary.is_moving and most:
            tree.boundary.advance()
            most -= 1
        assert not tree.boundary.is_moving

    @invariant()
    def all_is_where_tables_say(self):
        tree = self.tree
        tree.allocator.check_integrity()
        tree.directory.check_integrity()
        for node in (*tree.cold, *tree.hot):
            assert tree.read(node) == tree.marks[node]
        for node, slab in tree.hot.items():
            assert tree.directory.slab_of(node) == slab


TestBoundary = BoundaryMachine.TestCase
TestBoundary.settings = settings(max_examples=150, stateful_step_count=40)


def hot_tree(*lengths: int, hot_tokens: int = 30, budget: int = 4) -> tuple[Tree, list[int]]:
    """HOT nodes from slot 1 upwards, all locked."""
    tree = Tree(hot_tokens, budget)
    nodes = [tree.new_hot(length) for length in lengths]
    for node in nodes:
        tree.lock(node)
    return tree, nodes


def leave(tree: Tree, node: int) -> None:
    tree.unlock(node)
    tree.evict_hot(node)


def advance(tree: Tree) -> list[int]:
    """Tokens copied by each step until nothing moves; all is read as it was written."""
    copied = []
    while tree.boundary.is_moving:
        copied.append(tree.boundary.advance())
    for node in (*tree.cold, *tree.hot):
        assert tree.read(node) == tree.marks[node]
    return copied


def test_a_pool_in_one_piece_is_not_compacted():
    tree, _ = hot_tree(4, 8)
    assert not tree.boundary.compact()


def test_shrinking_carries_a_slab_in_use_into_a_gap_below():
    """Slabs of 10, 4 and 6 tokens; the first one leaves, and the last one fits there."""
    tree, (first, second, last) = hot_tree(10, 4, 6)
    leave(tree, first)
    assert tree.boundary.begin(14)
    assert advance(tree) == [4, 2]
    assert tree.allocator.hot_tokens == 14
    assert tree.hot[last] == Slab(1, 6)
    assert tree.hot[second] == Slab(11, 4)
    assert (tree.boundary.moves, tree.boundary.moved_tokens) == (1, 6)


def test_shrinking_ends_above_a_slab_in_use_that_fits_nowhere():
    tree, (first, second) = hot_tree(10, 12)
    leave(tree, first)
    assert tree.boundary.begin(5)
    assert advance(tree) == [0]
    assert tree.allocator.hot_tokens == 22
    assert tree.hot == {second: Slab(11, 12)}


def test_shrinking_keeps_an_idle_slab_that_fits_below_and_evicts_one_that_does_not():
    tree, (first, second, last) = hot_tree(6, 6, 10)
    leave(tree, first)
    tree.unlock(second)
    tree.unlock(last)
    assert tree.boundary.begin(6)
    assert advance(tree) == [4, 2]
    assert tree.hot == {second: Slab(1, 6)}
    assert tree.allocator.hot_tokens == 6


def test_shrinking_waits_for_no_prefill():
    tree, _ = hot_tree(5)
    reservation = tree.directory.reserve(view(99, 7))
    assert tree.boundary.begin(0)
    advance(tree)
    assert tree.allocator.hot_tokens == 12
    assert not tree.boundary.begin(0)
    tree.directory.release(reservation)
    assert tree.boundary.begin(0)


def test_compaction_makes_one_gap_of_two():
    """Gaps of 6 and 4 tokens before the free end; slabs of 4 and 8 in between."""
    tree, (first, small, gap, large) = hot_tree(6, 4, 4, 8, hot_tokens=22)
    leave(tree, first)
    leave(tree, gap)
    assert tree.allocator.largest_free_run == 6
    assert tree.boundary.compact()
    assert advance(tree) == [4, 0]
    assert tree.hot == {small: Slab(1, 4), large: Slab(15, 8)}
    assert tree.allocator.largest_free_run == 10


def test_a_slab_that_is_evicted_while_it_is_copied_leaves_no_copy():
    tree, (first, second) = hot_tree(10, 8)
    leave(tree, first)
    assert tree.boundary.begin(9)
    tree.boundary.advance()
    tree.unlock(second)
    tree.evict_hot(second)
    assert advance(tree) == [0]
    assert tree.allocator.hot_tokens == 9
    assert tree.allocator.hot_used == 0


def test_growth_needs_room_for_what_is_in_its_way():
    tree = Tree(10, 100)
    held = tree.new_cold(30)
    tree.lock(held)
    cached = tree.new_cold(15)
    assert not tree.boundary.begin(31)
    assert tree.boundary.begin(30)
    advance(tree)
    assert tree.allocator.hot_tokens == 30
    assert tree.read(held) == tree.marks[held]
    assert cached not in tree.cold


def test_a_budget_must_be_positive():
    with pytest.raises(ValueError, match="budget_tokens must be positive"):
        Tree(10, 0)
