"""RowGroups against a recount of every row over a tree."""

import pickle

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

from granikv.core.errors import IntegrityError
from granikv.core.groups import RowGroups
from granikv.core.step import Segment

PICK = st.integers(0, 10**6)


class GroupsMachine(RuleBasedStateMachine):
    """A tree of `node: [parent, length, base]` and one leaf per row, recounted after every step."""

    @initialize(max_segments=st.integers(1, 6))
    def start(self, max_segments):
        self.max_segments = max_segments
        self.groups = RowGroups(max_segments)
        self.tree: dict[int, list] = {}
        self.leaves: list[int] = []
        self.next_node = 0
        self.next_base = 1

    def path(self, node) -> list[int]:
        nodes = []
        while node is not None:
            nodes.append(node)
            node = self.tree[node][0]
        return nodes[::-1]

    def rows(self, node) -> int:
        return sum(node in self.path(leaf) for leaf in self.leaves)

    def recount(self) -> list[Segment]:
        """Segments from the definition: one per shared node, then merge until nothing merges."""
        pieces = [[n, n, *self.tree[n][:0:-1], self.rows(n)] for n in self.tree if self.rows(n) > 1]
        merged = True
        while merged:
            merged = False
            for upper in pieces:
                for lower in pieces:
                    head, _, base, length, rows = lower
                    follows = base == upper[2] + upper[3] if base and upper[2] else base == upper[2]
                    if self.tree[head][0] == upper[1] and rows == upper[4] and follows:
                        upper[1], upper[3] = lower[1], upper[3] + length
                        pieces.remove(lower)
                        merged = True
                        break
                if merged:
                    break
        hot = sorted((p for p in pieces if p[2]), key=lambda p: (p[2], p[0]))
        cold = sorted((p for p in pieces if not p[2]), key=lambda p: (-p[3], p[0]))
        ordered = hot + cold
        kept = sorted(ordered, key=lambda p: -p[3] * p[4])[: self.max_segments]
        return [Segment(p[2], p[3], p[4]) for p in ordered if p in kept]

    def some_node(self, pick) -> int:
        return sorted(self.tree)[pick % len(self.tree)]

    def refused(self, call, *arguments) -> None:
        before = pickle.dumps(self.groups)
        with pytest.raises(ValueError, match="must"):
            call(*arguments)
        assert pickle.dumps(self.groups) == before

    @rule(pick=PICK, length=st.integers(1, 9), place=st.sampled_from(["cold", "next", "new"]))
    def grow_tree(self, pick, length, place):
        parent = self.some_node(pick) if self.tree and pick % 4 else None
        base = 0
        if place == "next" and parent is not None and self.tree[parent][2]:
            base = self.tree[parent][2] + self.tree[parent][1]
        elif place == "new":
            base = self.next_base
            self.next_base += 100
        self.tree[self.next_node] = [parent, length, base]
        self.next_node += 1

    @precondition(lambda self: self.tree)
    @rule(pick=PICK)
    def join(self, pick):
        leaf = self.some_node(pick)
        path = [(node, *self.tree[node][1:]) for node in self.path(leaf)]
        last = path[-1]
        if self.rows(leaf):
            self.refused(self.groups.join, [*path[:-1], (leaf, last[1] + 1, last[2])])
            self.refused(self.groups.join, [*path[:-1], (leaf, last[1], last[2] + 1)])
            self.refused(self.groups.join, [(999, 1, 0), *path])
        self.refused(self.groups.join, [*path, (777, 0, 0)])
        self.refused(self.groups.join, [*path, (777, 1, 0), (777, 1, 0)])
        self.refused(self.groups.join, [*path, last])
        self.groups.join(path)
        self.leaves.append(leaf)

    @precondition(lambda self: self.leaves)
    @rule(pick=PICK)
    def leave(self, pick):
        leaf = self.leaves.pop(pick % len(self.leaves))
        path = self.path(leaf)
        self.refused(self.groups.leave, [*path, 888])
        if len(path) > 1:
            self.refused(self.groups.leave, path[1:])
        self.groups.leave(path)

    @precondition(lambda self: self.tree)
    @rule(pick=PICK, left=st.integers(0, 9))
    def split(self, pick, left):
        node = self.some_node(pick)
        parent, length, base = self.tree[node]
        if not 0 < left < length:
            if self.rows(node):
                self.refused(self.groups.split, node, self.next_node, left)
            return
        if self.rows(node):
            self.refused(self.groups.split, node, node, left)
        upper = self.next_node
        self.next_node += 1
        self.groups.split(node, upper, left)
        self.tree[upper] = [parent, left, base]
        self.tree[node] = [upper, length - left, base + left if base else 0]

    @precondition(lambda self: self.tree)
    @rule(pick=PICK, place=st.sampled_from(["cold", "new", "after parent"]))
    def place(self, pick, place):
        node = self.some_node(pick)
        parent = self.tree[node][0]
        base = 0
        if place == "new":
            base, self.next_base = self.next_base, self.next_base + 100
        elif place == "after parent" and parent is not None and self.tree[parent][2]:
            base = self.tree[parent][2] + self.tree[parent][1]
        self.groups.place(node, base)
        self.tree[node][2] = base
        self.refused(self.groups.place, node, -1)

    @invariant()
    def agrees_with_a_recount(self):
        self.groups.check_integrity()
        expected = self.recount()
        assert list(self.groups.segments()) == expected
        assert self.groups.segments() is self.groups.segments()
        assert self.groups.shared_tokens == sum(s.rows * s.length for s in expected)
        assert all(self.groups.rows_of(node) == self.rows(node) for node in self.tree)


TestGroupsMachine = GroupsMachine.TestCase
TestGroupsMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_nested_prefixes_by_hand():
    groups = RowGroups()
    system, tools, tenant = (1, 100, 1), (2, 50, 101), (3, 30, 151)
    groups.join([system, tools, tenant, (4, 7, 0)])
    assert groups.segments() == ()
    groups.join([system, tools, tenant])
    assert groups.segments() == (Segment(1, 180, 2),)
    groups.join([system, (5, 60, 0)])
    assert groups.segments() == (Segment(1, 100, 3), Segment(101, 80, 2))
    assert groups.shared_tokens == 460
    groups.place(3, 0)
    assert groups.segments() == (Segment(1, 100, 3), Segment(101, 50, 2), Segment(0, 30, 2))
    groups.leave([1, 5])
    assert groups.segments() == (Segment(1, 150, 2), Segment(0, 30, 2))


def test_a_private_arrival_keeps_the_tuple():
    groups = RowGroups()
    for _ in range(2):
        groups.join([(1, 100, 1)])
    before = groups.segments()
    groups.join([(2, 10, 0)])
    groups.split(2, 3, 4)
    groups.place(3, 500)
    groups.leave([3, 2])
    assert groups.segments() is before


def test_the_largest_segments_stay_when_there_are_too_many():
    groups = RowGroups(max_segments=2)
    for node, length, rows in ((1, 10, 2), (2, 6, 5), (3, 50, 2)):
        for _ in range(rows):
            groups.join([(node, length, 0)])
    assert groups.segments() == (Segment(0, 50, 2), Segment(0, 6, 5))
    assert groups.shared_tokens == 130


def test_nodes_without_rows_are_ignored():
    groups = RowGroups()
    groups.split(1, 2, 5)
    groups.place(1, 7)
    assert groups.rows_of(1) == 0
    assert groups.rows_of(2) == 0


def test_max_segments_must_be_positive():
    with pytest.raises(ValueError, match="max_segments must be positive"):
        RowGroups(0)


def test_a_lost_row_is_named():
    groups = RowGroups()
    for _ in range(3):
        groups.join([(1, 10, 0), (2, 5, 0)])
    groups._nodes[1].rows -= 1
    with pytest.raises(IntegrityError, match="children of 1"):
        groups.check_integrity()
