"""The radix tree with HOT nodes, on the real SGLang package, against SGLang's own tree."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang.srt.mem_cache.radix_cache", reason="needs sglang 0.5.17")

from hypothesis import settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import (  # noqa: E402
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache  # noqa: E402
from tree_support import (  # noqa: E402
    PICK,
    PROMPT,
    ROWS,
    ErasingHolders,
    MarkedServer,
    Server,
    mark,
)

from granikv.core.admission import PaperAdmission, SharedAdmission  # noqa: E402
from granikv.core.boundary import Boundary  # noqa: E402
from granikv.sglang_plugin.allocator import HotColdTokenAllocator  # noqa: E402
from granikv.sglang_plugin.radix_cache import GraniRadixCache  # noqa: E402


class TreeMachine(RuleBasedStateMachine):
    """Whatever is promoted, split, evicted, aborted or moved with the boundary, every request reads
    its own tokens.
    """

    @initialize(
        size=st.integers(50, 120),
        hot=st.integers(0, 40),
        policy=st.sampled_from([PaperAdmission(), SharedAdmission(1, 1), SharedAdmission(2, 2)]),
        budget=st.integers(1, 20),
        first=st.lists(st.tuples(PROMPT, st.sampled_from(["runs", "cached"])), max_size=12),
    )
    def start(self, size, hot, policy, budget, first):
        self.now_s, self.budget = 0.0, budget
        allocator = HotColdTokenAllocator(
            size, torch.int64, "cpu", None, False, hot_tokens=hot, admission=policy
        )
        self.server = MarkedServer(
            allocator, lambda params: GraniRadixCache(params, now_s=lambda: self.now_s)
        )
        self.make_boundary()
        for prompt, fate in first:
            if len(self.server.running) < ROWS and self.server.admit(prompt, chunk=9):
                self.server.promote()
                if fate == "cached":
                    self.server.finish(self.server.running[-1], is_insert=True)

    def make_boundary(self):
        core, directory = self.server.allocator.core, self.server.allocator.directory
        self.boundary = Boundary(core, directory, ErasingHolders(self.server), self.budget)

    @precondition(lambda self: not self.boundary.is_moving)
    @rule(hot=st.integers(0, 49))
    def begin_move(self, hot):
        self.boundary.begin(hot)

    @precondition(lambda self: not self.boundary.is_moving)
    @rule()
    def compact(self):
        self.boundary.compact()

    @precondition(lambda self: self.boundary.is_moving)
    @rule(steps=st.integers(1, 3))
    def move(self, steps):
        """Of running requests, only a prompt in chunks looks at its `prefix_indices` again."""
        scheduler = self.server.scheduler
        scheduler.chunked_req = self.server.running[-1] if self.some_run else None
        for _ in range(steps):
            assert self.boundary.advance() <= self.budget
            if not self.boundary.is_moving:
                self.server.tree.end_region()
        for req in self.server.running[:-1]:
            req.is_stale = True
        scheduler.chunked_req = None

    @property
    def some_run(self):
        return bool(self.server.running)

    def pick(self, pick):
        return self.server.running[pick % len(self.server.running)]

    @precondition(lambda self: len(self.server.running) < ROWS)
    @rule(prompt=PROMPT, chunk=st.integers(1, 30))
    def admit(self, prompt, chunk):
        self.now_s += 1.0
        self.server.admit(prompt, chunk)

    @precondition(lambda self: self.some_run)
    @rule(pick=PICK, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def decode(self, pick, tokens):
        for token in tokens:
            self.server.decode(self.pick(pick), token)

    @precondition(lambda self: self.some_run)
    @rule(pick=PICK, is_insert=st.booleans())
    def finish(self, pick, is_insert):
        self.server.finish(self.pick(pick), is_insert)

    @rule()
    def promote(self):
        self.now_s += 1.0
        self.server.promote()

    @precondition(lambda self: self.server.tree.evictable_leaves)
    @rule(count=st.integers(1, 30))
    def evict(self, count):
        tree, before = self.server.tree, self.server.allocator.available_size()
        possible = tree.evictable_size()
        tree.evict(EvictParams(num_tokens=count))
        gained = self.server.allocator.available_size() - before
        assert gained >= min(count, possible), "every evictable token can be evicted"

    @property
    def idle_hot(self):
        return [node for node in self.server.tree.hot_nodes() if not node.lock_ref]

    @precondition(lambda self: self.idle_hot)
    @rule(pick=PICK)
    def evict_hot(self, pick):
        """What making room for another slab does to an idle one."""
        gone = self.idle_hot[pick % len(self.idle_hot)].id
        self.server.tree.evict_hot(gone)
        assert not self.server.tree.is_hot_cached(gone)

    @precondition(lambda self: self.idle_hot and not self.some_run)
    @rule()
    def flush(self):
        self.server.tree.reset()
        self.server.allocator.clear()
        self.make_boundary()
        assert self.server.allocator.core.hot_used == 0

    @invariant()
    def every_request_reads_its_own_tokens(self):
        self.server.check_rows()
        for req in self.server.running:
            row = self.server.rows.req_to_token[req.req_pool_idx]
            assert torch.equal(self.server.kv[row.long()], self.server.other_kv[row.long()])
            if not hasattr(req, "is_stale"):
                assert req.prefix_indices.tolist() == row[: len(req.prefix_indices)].tolist()

    @invariant()
    def every_cached_token_is_where_the_tree_says(self):
        tree = self.server.tree
        stack = [(tree.root_node, [])]
        seen, ids, evictable, protected, hot = set(), set(), 0, 0, 0
        while stack:
            node, above = stack.pop()
            path = above + list(node.key.token_ids)
            ids.add(node.id)
            slots = [] if node is tree.root_node else node.value.tolist()
            for i, slot in enumerate(slots):
                assert self.server.kv[slot] == mark(path[: len(above) + i + 1])
            assert seen.isdisjoint(slots)
            seen.update(slots)
            if node.id in tree._hot:
                assert node.parent is tree.root_node or node.parent.id in tree._hot
                slab = tree.directory.slab_of(node.id)
                assert slots == list(range(slab.base, slab.end))
                hot += len(slots)
            elif node.lock_ref:
                protected += len(slots)
            else:
                evictable += len(slots)
            stack.extend((child, path) for child in node.children.values())
        assert evictable == tree.evictable_size()
        assert protected == tree.protected_size_
        copies = sum(relocation.new.length for relocation in tree.directory._relocations)
        assert hot + copies == self.server.allocator.core.hot_used
        assert set(tree._uses) <= ids

    @invariant()
    def nothing_leaks(self):
        """SGLang's own check of its pool."""
        allocator, tree = self.server.allocator, self.server.tree
        held = allocator.available_size() + tree.evictable_size() + tree.protected_size()
        assert held + self.server.uncached() == allocator.size
        allocator.core.check_integrity()
        allocator.directory.check_integrity()


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class TwinMachine(RuleBasedStateMachine):
    """Without a HOT pool, our tree answers every call as SGLang's own does."""

    @initialize(size=st.integers(20, 90))
    def start(self, size):
        ours = HotColdTokenAllocator(
            size, torch.int64, "cpu", None, False, hot_tokens=0, admission=PaperAdmission()
        )
        theirs = TokenToKVPoolAllocator(size, torch.int64, "cpu", None, False)
        self.twins = (Server(ours, GraniRadixCache), Server(theirs, RadixCache))

    def both(self, call):
        first, second = (call(server) for server in self.twins)
        assert first == second
        return first

    @precondition(lambda self: len(self.twins[0].running) < ROWS)
    @rule(prompt=PROMPT, chunk=st.integers(1, 30))
    def admit(self, prompt, chunk):
        self.both(lambda server: server.admit(prompt, chunk))

    @precondition(lambda self: self.twins[0].running)
    @rule(pick=PICK, token=st.integers(0, 1))
    def decode(self, pick, token):
        at = pick % len(self.twins[0].running)
        self.both(lambda server: server.decode(server.running[at], token))

    @precondition(lambda self: self.twins[0].running)
    @rule(pick=PICK, is_insert=st.booleans())
    def finish(self, pick, is_insert):
        at = pick % len(self.twins[0].running)
        self.both(lambda server: server.finish(server.running[at], is_insert))

    @rule(count=st.integers(1, 30))
    def evict(self, count):
        params = EvictParams(num_tokens=count)
        self.both(lambda server: server.tree.evict(params).num_tokens_evicted)

    @invariant()
    def sizes_agree(self):
        def sizes(server):
            tree = server.tree
            cached = tree.evictable_size(), tree.protected_size(), tree.total_size()
            return server.allocator.available_size(), *cached

        self.both(sizes)

    @invariant()
    def prompts_match_alike(self):
        def matched(server):
            return [req.cache_protected_len for req in server.running]

        self.both(matched)


TestTwin = TwinMachine.TestCase
TestTwin.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_another_allocator_is_refused():
    allocator = TokenToKVPoolAllocator(8, torch.int64, "cpu", None, False)
    with pytest.raises(TypeError, match="plugin is not loaded"):
        GraniRadixCache(CacheInitParams(False, None, allocator, 1))


def test_an_idle_hot_prefix_gives_way_to_a_shared_one():
    """Two requests share a prefix, leave, and two others want the same room."""
    allocator = HotColdTokenAllocator(
        60, torch.int64, "cpu", None, False, hot_tokens=12, admission=SharedAdmission(4, 2)
    )
    server = MarkedServer(allocator, GraniRadixCache)
    for first in (1, 2):
        for last in (7, 8):
            assert server.admit([first] * 10 + [last], 30)
        server.promote()
        assert allocator.core.hot_used == 10
        hot = {node.key.token_ids[0] for node in server.tree.hot_nodes()}
        assert hot == {first}
        for req in list(server.running):
            server.finish(req, True)
    assert allocator.directory.evictions == 1


def test_cold_pressure_leaves_an_older_idle_slab_alone():
    """Its slots would not help: what the scheduler asks for is COLD."""
    allocator = HotColdTokenAllocator(
        40, torch.int64, "cpu", None, False, hot_tokens=8, admission=SharedAdmission(4, 1)
    )
    server = MarkedServer(allocator, GraniRadixCache)
    assert server.admit([1] * 8, 30)
    server.promote()
    server.finish(server.running[0], True)
    for first in (2, 3):
        assert server.admit([first] * 8, 30)
        server.finish(server.running[0], True)
    free, tree = allocator.available_size(), server.tree
    assert tree.evict(EvictParams(num_tokens=free + 1)).num_tokens_evicted == 16
    assert allocator.available_size() == free + 16
    assert [len(node.key) for node in tree.hot_nodes()] == [8]
    assert server.admit([1] * 8 + [4] * 5, 30)
    server.finish(server.running[0], True)
    tree.evict(EvictParams(num_tokens=1000))
    assert allocator.available_size() == 32
    assert [len(node.key) for node in tree.hot_nodes()] == [8]


def test_a_request_that_has_ended_is_no_candidate():
    """Its path may be evicted before the next step looks at it."""
    allocator = HotColdTokenAllocator(
        40, torch.int64, "cpu", None, False, hot_tokens=8, admission=PaperAdmission()
    )
    server = MarkedServer(allocator, GraniRadixCache)
    for first in (1, 2):
        assert server.admit([first] * 8, 30)
    server.finish(server.running[0], True)
    ends = server.tree.take_candidates()
    assert ends == [server.running[0].last_node]
    assert server.tree.take_candidates() == []
