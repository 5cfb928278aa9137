"""The radix tree with HOT nodes, on the real SGLang package, against SGLang's own tree."""

from array import array
from contextlib import nullcontext
from types import SimpleNamespace

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
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402

from granikv.core.admission import PaperAdmission, SharedAdmission  # noqa: E402
from granikv.sglang_plugin.allocator import HotColdTokenAllocator  # noqa: E402
from granikv.sglang_plugin.promotion import promote_ready  # noqa: E402
from granikv.sglang_plugin.radix_cache import GraniRadixCache  # noqa: E402

ROWS, CONTEXT = 8, 64
PICK = st.integers(0, 10**6)
# Few tokens and few lengths, so that prompts share prefixes, split nodes and contain each other.
PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=24)


class Server:
    """What of SGLang's scheduler touches the tree: admit, extend, decode, finish, abort, evict."""

    def __init__(self, allocator, make_tree):
        self.allocator = allocator
        self.rows = ReqToTokenPool(ROWS, CONTEXT, "cpu", False)
        self.tree = make_tree(CacheInitParams(False, self.rows, allocator, 1))
        self.running = []
        self.free_rows = list(range(ROWS))

    def take(self, count):
        """Slots after eviction, as SGLang's `alloc_token_slots`; None when they cannot be had."""
        missing = count - self.allocator.available_size()
        if missing > 0:
            self.tree.evict(EvictParams(num_tokens=missing))
        return self.allocator.alloc(count)

    def admit(self, prompt, chunk):
        """Match, lock, and prefill the prompt in chunks; False when there is no room."""
        key = RadixKey(array("q", prompt[:-1]))
        matched = self.tree.match_prefix(MatchPrefixParams(key=key))
        req = SimpleNamespace(
            origin_input_ids=array("q", prompt),
            output_ids=array("q"),
            extra_key=None,
            priority=0,
            req_pool_idx=self.free_rows[-1],
            prefix_indices=matched.device_indices,
            cache_protected_len=len(matched.device_indices),
            last_node=matched.last_device_node,
            filled=len(matched.device_indices),
        )
        req.get_fill_ids = lambda: req.origin_input_ids[: req.filled]
        self.tree.inc_lock_ref(req.last_node)
        self.rows.write((req.req_pool_idx, slice(0, req.filled)), req.prefix_indices)
        begun = req.filled
        while req.filled < len(prompt):
            count = min(chunk, len(prompt) - req.filled)
            slots = self.take(count)
            if slots is None:
                self.abandon(req, begun)
                return False
            self.write(req, req.filled, slots)
            req.filled += count
            self.tree.cache_unfinished_req(req, chunked=req.filled < len(prompt))
        self.free_rows.pop()
        self.running.append(req)
        return True

    def abandon(self, req, begun):
        """A prefill that found no room: what it cached stays in the tree."""
        self.tree.dec_lock_ref(req.last_node)

    def decode(self, req, token):
        """One more token, whose KV is written in this step; False when there is no room."""
        end = len(req.origin_input_ids) + len(req.output_ids)
        slots = self.take(1) if end < CONTEXT else None
        if slots is None:
            return False
        req.output_ids.append(token)
        self.write(req, end, slots)
        return True

    def write(self, req, start, slots):
        self.rows.write((req.req_pool_idx, slice(start, start + len(slots))), slots)

    def finish(self, req, is_insert):
        """Give the row's tokens to the tree, or free them."""
        end = len(req.origin_input_ids) + len(req.output_ids)
        self.tree.cache_finished_req(req, is_insert, kv_len_to_handle=end)
        self.running.remove(req)
        self.free_rows.append(req.req_pool_idx)

    def uncached(self):
        """Tokens that requests hold beside the tree."""
        ends = (len(r.origin_input_ids) + len(r.output_ids) for r in self.running)
        return sum(ends) - sum(req.cache_protected_len for req in self.running)


class MarkedServer(Server):
    """A server whose KV are marks: every slot says which tokens up to it were written there."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.kv = torch.zeros(self.allocator.size + 1, dtype=torch.int64)
        self.other_kv = self.kv.clone()
        pool = SimpleNamespace(k_buffer=[self.kv, self.other_kv], v_buffer=[])
        self.allocator._kvcache = pool
        stream = SimpleNamespace(wait_stream=lambda _: None)
        self.scheduler = SimpleNamespace(
            tree_cache=self.tree,
            token_to_kv_pool_allocator=self.allocator,
            enable_overlap=True,
            running_batch=SimpleNamespace(reqs=self.running),
            last_batch=None,
            chunked_req=None,
            forward_stream=stream,
            schedule_stream=stream,
            forward_stream_ctx=nullcontext(),
        )

    def write(self, req, start, slots):
        super().write(req, start, slots)
        tokens = list(req.origin_input_ids) + list(req.output_ids)
        for i, slot in enumerate(slots.tolist()):
            self.kv[slot] = self.other_kv[slot] = mark(tokens[: start + i + 1])

    def promote(self):
        """What the plugin does before every step."""
        promote_ready(self.scheduler)


def mark(tokens):
    return hash(tuple(tokens)) >> 1 | 1


class TreeMachine(RuleBasedStateMachine):
    """Whatever is promoted, split, evicted or aborted, every request reads its own tokens."""

    @initialize(
        size=st.integers(50, 120),
        hot=st.integers(0, 40),
        policy=st.sampled_from([PaperAdmission(), SharedAdmission(1, 1), SharedAdmission(2, 2)]),
    )
    def start(self, size, hot, policy):
        self.now_s = 0.0
        allocator = HotColdTokenAllocator(
            size, torch.int64, "cpu", None, False, hot_tokens=hot, admission=policy
        )
        self.server = MarkedServer(
            allocator, lambda params: GraniRadixCache(params, now_s=lambda: self.now_s)
        )

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
        assert self.server.allocator.core.hot_used == 0

    @invariant()
    def every_request_reads_its_own_tokens(self):
        for req in self.server.running:
            tokens = list(req.origin_input_ids) + list(req.output_ids)
            row = self.server.rows.req_to_token[req.req_pool_idx]
            for i in range(len(tokens)):
                assert self.server.kv[row[i]] == mark(tokens[: i + 1])
            assert torch.equal(self.server.kv[row.long()], self.server.other_kv[row.long()])
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
        assert hot == self.server.allocator.core.hot_used
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
