"""row_tables against what its arrays mean: every row reads its own path, and shares what it can."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from granikv.core.groups import RowGroups
from granikv.core.row_tables import row_tables
from granikv.core.step import Segment


class Tree:
    """HOT nodes `0 .. n - 1`: parent, first slot and tokens of each."""

    def __init__(self, parents, lengths, gaps):
        self.parents, self.nodes, slot = parents, [], 1
        for length, gap in zip(lengths, gaps, strict=True):
            slot += gap
            self.nodes.append((slot, length))
            slot += length

    def path_of(self, node):
        path = []
        while node is not None:
            path.append((node, *self.nodes[node]))
            node = self.parents[node]
        return path[::-1]

    def slots_of(self, node):
        if node is None:
            return []
        return [base + i for _, base, length in self.path_of(node) for i in range(length)]


@st.composite
def trees(draw):
    count = draw(st.integers(1, 12))
    # Without a gap, a node made right after its parent follows it in the slots.
    parents = [draw(st.sampled_from([None, *range(i), *[i - 1] * (i > 0)])) for i in range(count)]
    lengths = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    gaps = draw(st.lists(st.sampled_from([0, 0, 3]), min_size=count, max_size=count))
    return Tree(parents, lengths, gaps)


@st.composite
def steps(draw):
    tree = draw(trees())
    ends = draw(st.lists(st.sampled_from([None, *range(len(tree.nodes))]), max_size=20))
    return tree, ends


@settings(max_examples=400)
@given(steps(), st.integers(1, 4), st.integers(1, 8))
def test_every_row_reads_the_top_of_its_path(step, levels, max_segments):
    tree, ends = step
    tables = row_tables(ends, tree.path_of, levels, max_segments)
    assert tables.base.shape == tables.length.shape == tables.group.shape == (len(ends), levels)
    assert len(tables.segments) <= max_segments
    counted = [0] * len(tables.segments)
    for row, end in enumerate(ends):
        read = []
        for level in range(levels):
            base, length = tables.base[row, level], tables.length[row, level]
            if length:
                group = tables.group[row, level]
                counted[group] += 1
                assert tables.segments[group][:2] == (base, length)
                read += range(base, base + length)
        assert len(read) == tables.shared_tokens[row]
        assert read == tree.slots_of(end)[: len(read)]
    assert counted == [segment.rows for segment in tables.segments]
    assert all(rows >= 2 for rows in counted)


@settings(max_examples=300)
@given(steps())
def test_without_limits_the_segments_are_those_of_the_simulator(step):
    tree, ends = step
    groups = RowGroups()
    for end in ends:
        if end is not None:
            groups.join([(node, length, base) for node, base, length in tree.path_of(end)])
    tables = row_tables(ends, tree.path_of, levels=12)
    assert tables.segments == groups.segments()
    assert tables.shared_tokens.sum() == groups.shared_tokens


def test_what_saves_most_stays_and_nothing_hangs_below_a_gap():
    """A short node above a long one: without the upper one the lower one is out of reach."""
    tree = Tree([None, 0, None], [2, 100, 50], [0, 3, 3])
    ends = [1, 1, 0, 2, 2]
    everything = row_tables(ends, tree.path_of)
    assert everything.segments == (Segment(1, 2, 3), Segment(6, 100, 2), Segment(109, 50, 2))
    two = row_tables(ends, tree.path_of, max_segments=2)
    assert two.segments == (Segment(109, 50, 2),)
    np.testing.assert_array_equal(two.shared_tokens, [0, 0, 0, 50, 50])


def test_limits_must_be_positive():
    for limits in ({"levels": 0}, {"max_segments": 0}):
        with pytest.raises(ValueError, match="must be positive"):
            row_tables([], lambda _: [], **limits)


def test_cold_nodes_of_one_row_make_one_segment():
    """Slots of row 5 for a prefix in two nodes, then a slab, then slots of row 7 for two rows."""
    top = [(1, -6, 30), (2, -6, 12), (3, 400, 50)]
    paths = {3: top, 4: [*top, (4, -8, 9)]}
    tables = row_tables([3, 4, 4], paths.__getitem__)
    assert tables.base.tolist() == [[-6, 400, 0, 0], [-6, 400, -8, 0], [-6, 400, -8, 0]]
    assert tables.length.tolist() == [[42, 50, 0, 0], [42, 50, 9, 0], [42, 50, 9, 0]]
    assert tables.shared_tokens.tolist() == [92, 101, 101]
    assert sorted(map(tuple, tables.segments)) == [(0, 9, 2), (0, 42, 3), (400, 50, 3)]
