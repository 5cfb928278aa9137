"""PrefixIndex against a plain model: a dictionary of token tuples."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from prefix_model import PrefixModel, Tokens, tokens_of
from sim_support import prompt

from granikv.core.admission import PrefixView, make_admission
from granikv.core.allocator import HotColdAllocator
from granikv.core.directory import Reservation, SlabDirectory
from granikv.core.errors import IntegrityError
from granikv.core.groups import RowGroups
from granikv.sim.prefix_index import PrefixIndex
from granikv.sim.radix_node import Cursor, Node
from granikv.traces.request import Run


@dataclass
class _Holder:
    """A request: what it reads, how much of it is cached, the node that it holds."""

    runs: tuple[Run, ...]
    cursor: Cursor
    node: Node
    reservation: Reservation | None = None
    hot_left: int = 0

    @property
    def tokens(self) -> Tokens:
        return tokens_of(self.runs)


_RUNS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=3).map(
    lambda runs: prompt(*runs)
)


class PrefixIndexMachine(RuleBasedStateMachine):
    """Requests come, prefill in parts, leave their answer and go, between evictions and moves to
    HOT.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocator = HotColdAllocator(90, 30)
        self.directory = SlabDirectory(self.allocator, make_admission("paper"))
        self.groups = RowGroups()
        self.index = PrefixIndex(self.allocator, self.directory, self.groups)
        self.model = PrefixModel()
        self.holders: list[_Holder] = []
        self.free_cold = 60

    @rule(runs=_RUNS, limit=st.integers(0, 30))
    def match(self, runs: tuple[Run, ...], limit: int) -> None:
        tokens = tokens_of(runs)[:limit]
        cursor, path = self.index.match(runs, limit)
        expected = self.model.match(tokens)
        assert cursor.depth == (len(expected[-1]) if expected else 0)
        assert [node.length for node in path] == [self.model.nodes[end].length for end in expected]
        assert cursor.node is (path[-1] if path else self.index.root)

    @precondition(lambda self: len(self.holders) < 3)
    @rule(runs=_RUNS, hot_tokens=st.integers(0, 12))
    def begin(self, runs: tuple[Run, ...], hot_tokens: int) -> None:
        self._begin(runs, hot_tokens)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), wanted=st.integers(1, 9))
    def prefill(self, data: st.DataObject, wanted: int) -> None:
        self._prefill(data.draw(st.sampled_from(self.holders)), wanted)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), answer=st.integers(0, 4), segment=st.integers(1, 4))
    def end(self, data: st.DataObject, answer: int, segment: int) -> None:
        self._end(data.draw(st.sampled_from(self.holders)), answer, segment)

    @rule(runs=_RUNS, answer=st.integers(0, 4), segment=st.integers(1, 4))
    def serve(self, runs: tuple[Run, ...], answer: int, segment: int) -> None:
        """A whole life without interruption: it leaves its tokens for the others."""
        holder = self._begin(runs, 0)
        self._prefill(holder, len(holder.tokens))
        self._end(holder, answer, segment)

    def _begin(self, runs: tuple[Run, ...], hot_tokens: int) -> _Holder:
        """A request is admitted; below HOT or the root its next tokens may get a slab."""
        tokens = tokens_of(runs)
        cursor, path = self.index.match(runs, len(tokens) - 1)
        expected = self.model.match(tokens[:-1])
        held = expected[-1] if expected else ()
        self.index.lock(cursor.node)
        self.model.lock(held, 1)
        holder = _Holder(runs, cursor, cursor.node)
        length = min(hot_tokens, len(tokens) - cursor.depth)
        if length and all(node.is_hot for node in path):
            holder.reservation = self.directory.reserve(_view(0, length))
            holder.hot_left = length if holder.reservation else 0
        self.holders.append(holder)
        return holder

    def _prefill(self, holder: _Holder, wanted: int) -> None:
        """The next tokens get slots, HOT first, and are cached; the request moves its lock down."""
        tokens, depth = holder.tokens, holder.cursor.depth
        count = min(wanted, len(tokens) - depth)
        hot = min(count, holder.hot_left)
        if not count or not self._ensure(count - hot):
            return
        cold_slots = self.allocator.alloc_cold(count - hot)
        assert cold_slots is not None
        hot_slots: list[int] = []
        if hot and holder.reservation is not None:
            hot_slots = self.directory.take(holder.reservation, hot).tolist()
        self.index.insert(holder.cursor, holder.runs, cold_slots, holder.reservation, hot)
        freed = self.model.insert(tokens, depth, hot_slots, is_hot=True) if hot else []
        if count > hot:
            cold = cold_slots.tolist()
            freed += self.model.insert(tokens, depth + hot, cold, is_hot=False)
        self.free_cold += len(freed) - (count - hot)
        holder.hot_left -= hot
        assert holder.cursor.depth == depth + count
        self.index.lock(holder.cursor.node, holder.node)
        holder.node = holder.cursor.node
        self.model.lock(tokens[: depth + count], 1)
        self.model.lock(tokens[:depth], -1)
        if not holder.hot_left and holder.reservation is not None:
            self.directory.release(holder.reservation)
            holder.reservation = None

    def _end(self, holder: _Holder, answer: int, segment: int) -> None:
        """A request goes; an answer to a whole prompt is cached below it."""
        tokens, depth = holder.tokens, holder.cursor.depth
        if holder.reservation is not None:
            self.directory.release(holder.reservation)
        if answer and depth == len(tokens) and self._ensure(answer):
            slots = self.allocator.alloc_cold(answer)
            assert slots is not None
            self.index.append_leaf(holder.node, (segment, 0, answer), slots)
            said = (*tokens, *((segment, place) for place in range(answer)))
            freed = self.model.insert(said, depth, slots.tolist(), is_hot=False)
            self.free_cold += len(freed) - answer
        self.index.refresh(holder.node)
        self.model.refresh(tokens[:depth])
        self.index.unlock(holder.node)
        self.model.lock(tokens[:depth], -1)
        self.holders.remove(holder)

    @rule(more=st.integers(1, 9))
    def evict(self, more: int) -> None:
        self._ensure(self.free_cold + more)

    def _ensure(self, tokens: int) -> bool:
        """Least recently used leaves go until the tokens are free, and no others."""
        enough = self.index.ensure_cold(tokens)
        while self.free_cold < tokens and (victim := self.model.next_victim()) is not None:
            self.free_cold += self.model.nodes.pop(victim).length
        assert enough == (self.free_cold >= tokens)
        return enough

    @rule(runs=_RUNS)
    def promote(self, runs: tuple[Run, ...]) -> None:
        """The COLD part of a cached path moves into one slab, as placement does it."""
        tokens = tokens_of(runs)
        _, path = self.index.match(runs, len(tokens))
        ends = self.model.match(tokens)
        chain = [(node, end) for node, end in zip(path, ends, strict=True) if not node.is_hot]
        reservation = self.directory.reserve(_view(0, sum(node.length for node, _ in chain) or 1))
        if reservation is None:
            return
        slab = reservation.slab
        assert slab is not None
        place = slab.base
        for node, end in chain:
            entry = self.model.nodes[end]
            self.index.make_hot(node, reservation)
            self.free_cold += entry.length
            entry.is_hot, entry.slots = True, list(range(place, place + entry.length))
            place += entry.length
        self.directory.release(reservation)

    @rule(data=st.data())
    def evict_hot(self, data: st.DataObject) -> None:
        """An idle HOT node goes with all that is cached below it."""
        idle = self.directory.idle(0.0)
        if not idle:
            return
        slab = data.draw(st.sampled_from(idle))
        top = next(
            end for end, e in self.model.nodes.items() if e.is_hot and e.slots[0] == slab.base
        )
        self.index.evict_hot(slab.node)
        for end in [end for end in self.model.nodes if end[: len(top)] == top]:
            entry = self.model.nodes.pop(end)
            self.free_cold += 0 if entry.is_hot else entry.length

    @invariant()
    def equals_the_model(self) -> None:
        found: dict[Tokens, tuple[list[int], bool, int]] = {}
        ends: dict[int, Tokens] = {id(self.index.root): ()}
        stack = [self.index.root]
        while stack:
            parent = stack.pop()
            for node in parent.children.values():
                own = tuple((s, p) for s, start, n in node.runs for p in range(start, start + n))
                end = ends[id(node)] = ends[id(parent)] + own
                base = self.index.base_of(node)
                hot = list(range(base, base + node.length))
                slots = hot if node.slots is None else np.asarray(node.slots).tolist()
                found[end] = (slots, node.is_hot, node.lock_ref)
                stack.append(node)
        expected = {end: (e.slots, e.is_hot, e.locks) for end, e in self.model.nodes.items()}
        assert found == expected
        assert self.index.evictable_tokens == self.model.evictable()
        assert self.allocator.cold_free == self.free_cold

    @invariant()
    def is_sound(self) -> None:
        self.index.check_integrity()
        self.directory.check_integrity()
        self.allocator.check_integrity()


def _view(node: int, length: int) -> PrefixView:
    return PrefixView(node, length, 1, 1, 0.0, 0.0, 0.0)


PrefixIndexMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50)
TestPrefixIndexMachine = PrefixIndexMachine.TestCase


def _index(cold_tokens: int = 100) -> PrefixIndex:
    allocator = HotColdAllocator(cold_tokens, 0)
    return PrefixIndex(allocator, SlabDirectory(allocator, make_admission("paper")), RowGroups())


def _cache(index: PrefixIndex, *runs: tuple[int, int]) -> Node:
    """Cache a prompt that nobody holds; returns its last node."""
    wanted = prompt(*runs)
    length = sum(run.length for run in wanted)
    cursor, _ = index.match(wanted, length)
    slots = index.allocator.alloc_cold(length - cursor.depth)
    assert slots is not None
    index.insert(cursor, wanted, slots)
    return cursor.node


def test_prompts_share_what_the_request_type_says() -> None:
    """Equal streams share the shorter run and then part, unless both runs end there."""
    index = _index()
    _cache(index, (1, 10), (2, 5))
    for runs, shared in [
        (((1, 10), (2, 5)), 15),
        (((1, 10), (2, 9)), 15),
        (((1, 10), (3, 5)), 10),
        (((1, 12), (2, 5)), 10),
        (((1, 7), (2, 5)), 7),
        (((2, 5), (1, 10)), 0),
    ]:
        assert index.match(prompt(*runs), 100)[0].depth == shared


def test_eviction_takes_the_least_recently_used_leaf_first() -> None:
    index = _index()
    _cache(index, (1, 20), (2, 10))
    _cache(index, (1, 20), (3, 10))
    _cache(index, (4, 10))
    index.match(prompt((1, 20), (2, 10)), 30)  # now (3) is the oldest, then (4), then (2), then (1)
    order = [((3, 10), 60), ((4, 10), 70), ((2, 10), 80), ((1, 20), 90)]
    for (segment, _), wanted in order:
        assert index.ensure_cold(wanted)
        left = {node.runs[0][0] for node in index.nodes()}
        assert segment not in left
    assert list(index.nodes()) == []


def test_a_held_node_and_its_ancestors_stay() -> None:
    index = _index(40)
    leaf = _cache(index, (1, 10), (2, 10))
    _cache(index, (3, 20))
    index.lock(leaf)
    assert not index.ensure_cold(30)
    assert index.match(prompt((1, 10), (2, 10)), 20)[0].depth == 20
    assert index.match(prompt((3, 20)), 20)[0].depth == 0
    index.unlock(leaf)
    assert index.ensure_cold(40)


def test_a_lock_too_few_is_a_bug() -> None:
    index = _index()
    leaf = _cache(index, (1, 10))
    with pytest.raises(IntegrityError, match="unlocked more often"):
        index.unlock(leaf)
