"""One SlabDirectory under two prefix indexes: the simulator's and SGLang's, on the same requests.

Both must place, split, displace and evict the same prefixes, down to the slots of every slab: what
the simulator predicts for a policy is what the server then does.
"""

from array import array
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
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402

from granikv.core.admission import SharedAdmission  # noqa: E402
from granikv.core.allocator import HotColdAllocator  # noqa: E402
from granikv.core.directory import SlabDirectory  # noqa: E402
from granikv.core.groups import RowGroups  # noqa: E402
from granikv.core.placement import promote  # noqa: E402
from granikv.sglang_plugin.allocator import HotColdTokenAllocator  # noqa: E402
from granikv.sglang_plugin.radix_cache import GraniRadixCache  # noqa: E402
from granikv.sim.prefix_index import PrefixIndex  # noqa: E402
from granikv.traces.request import Run  # noqa: E402

PICK = st.integers(0, 10**6)
PROMPT = st.lists(st.integers(0, 1), min_size=2, max_size=24)


class Simulated:
    """The simulator's index; a prompt's token is a run of its own."""

    def __init__(self, size, hot, admission):
        self.core = HotColdAllocator(size, hot)
        self.directory = SlabDirectory(self.core, admission)
        self.index = PrefixIndex(self.core, self.directory, RowGroups())

    def admit(self, prompt, now_s):
        runs = tuple(Run(token, 1) for token in prompt)
        cursor, _ = self.index.match(runs, len(prompt) - 1)
        before = cursor.node
        self.index.lock(before)
        missing = len(prompt) - cursor.depth
        if not self.index.ensure_cold(missing):
            self.index.unlock(before)
            return None
        self.index.insert(cursor, runs, self.core.alloc_cold(missing), now_s)
        after = cursor.node
        if after is not before:
            self.index.lock(after, before)
        self.index.refresh(after)
        self.index.count_use(after.path(), now_s)
        return after

    def promote(self, node, now_s):
        chain = [member for member in node.path() if not member.is_hot]
        return promote(self.directory, self.index, chain, now_s)

    def leave(self, node):
        self.index.unlock(node)

    def evict(self, count):
        self.index.ensure_cold(self.core.cold_free + count)

    def evictable(self):
        return self.index.evictable_tokens

    def nodes(self):
        found = {}
        stack = [((), child) for child in self.index.root.children.values()]
        while stack:
            above, node = stack.pop()
            path = above + tuple(segment for segment, _, _ in node.runs)
            slab = self.directory.slab_of(node.node_id)
            found[path] = (slab.base, slab.length) if node.is_hot else node.length
            stack += [(path, child) for child in node.children.values()]
        return found


class Served:
    """SGLang's tree with the plugin's additions, driven as its scheduler drives it."""

    def __init__(self, size, hot, admission):
        self.allocator = HotColdTokenAllocator(
            size, torch.int64, "cpu", None, False, hot_tokens=hot, admission=admission
        )
        self.now_s = 0.0
        params = CacheInitParams(False, None, self.allocator, 1)
        self.tree = GraniRadixCache(params, now_s=lambda: self.now_s)

    @property
    def core(self):
        return self.allocator.core

    @property
    def directory(self):
        return self.allocator.directory

    def match(self, tokens):
        return self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))

    def admit(self, prompt, now_s):
        self.now_s = now_s
        matched = self.match(prompt[:-1])
        cached = matched.device_indices
        self.tree.inc_lock_ref(matched.last_device_node)
        missing = len(prompt) - len(cached)
        shortfall = missing - self.core.cold_free
        if shortfall > 0:
            self.tree.evict(EvictParams(num_tokens=shortfall))
        slots = self.allocator.alloc(missing)
        if slots is None:
            self.tree.dec_lock_ref(matched.last_device_node)
            return None
        row = torch.cat([cached, slots])
        key = RadixKey(array("q", prompt))
        known = self.tree.insert(InsertParams(key=key, value=row)).prefix_len
        self.allocator.free(row[len(cached) : known])
        node = self.match(prompt).last_device_node
        self.tree.dec_lock_ref(matched.last_device_node)
        self.tree.inc_lock_ref(node)
        self.tree.count_use(SimpleNamespace(last_node=node))
        return node

    def promote(self, node, now_s):
        self.now_s = now_s
        return sum(len(move.src) for move in self.tree.promote(node))

    def leave(self, node):
        self.tree.dec_lock_ref(node)

    def evict(self, count):
        self.tree.evict(EvictParams(num_tokens=count))

    def evictable(self):
        return self.tree.evictable_size()

    def nodes(self):
        found = {}
        stack = [((), child) for child in self.tree.root_node.children.values()]
        while stack:
            above, node = stack.pop()
            path = above + tuple(node.key.token_ids)
            slab = self.directory.slab_of(node.id)
            found[path] = (slab.base, slab.length) if slab else len(node.key)
            stack += [(path, child) for child in node.children.values()]
        return found


class TwinTrees(RuleBasedStateMachine):
    """Every operation on both; then both are compared."""

    @initialize(size=st.integers(40, 120), hot=st.integers(0, 30), min_live=st.integers(1, 3))
    def start(self, size, hot, min_live):
        policy = SharedAdmission(min_tokens=2, min_live=min_live)
        self.twins = (Simulated(size, hot, policy), Served(size, hot, policy))
        self.running = []
        self.now_s = 0.0

    def both(self, call):
        self.now_s += 1.0
        first, second = (call(twin, i) for i, twin in enumerate(self.twins))
        return first, second

    @rule(prompt=PROMPT)
    def admit(self, prompt):
        first, second = self.both(lambda twin, _: twin.admit(prompt, self.now_s))
        assert (first is None) == (second is None)
        if first is not None:
            self.running.append((first, second))

    @precondition(lambda self: self.running)
    @rule(pick=PICK)
    def promote(self, pick):
        nodes = self.running[pick % len(self.running)]
        first, second = self.both(lambda twin, i: twin.promote(nodes[i], self.now_s))
        assert first == second

    @precondition(lambda self: self.running)
    @rule(pick=PICK)
    def leave(self, pick):
        nodes = self.running.pop(pick % len(self.running))
        self.both(lambda twin, i: twin.leave(nodes[i]))

    @rule(prompt=PROMPT, sharers=st.integers(1, 3), stays=st.booleans())
    def share(self, prompt, sharers, stays):
        """Some requests with one prompt, of which the tree makes what it wants; they may stay."""
        before = len(self.running)
        for _ in range(sharers):
            self.admit(prompt)
        if len(self.running) > before:
            self.promote(before)
        while not stays and len(self.running) > before:
            self.leave(before)

    @precondition(lambda self: self.twins[0].evictable())
    @rule(count=st.integers(1, 8))
    def evict(self, count):
        self.both(lambda twin, _: twin.evict(count))

    @invariant()
    def both_hold_the_same(self):
        simulated, served = self.twins
        assert simulated.nodes() == served.nodes()
        assert simulated.evictable() == served.evictable()
        assert simulated.core.stats() == served.core.stats()
        for name in ("misses", "hot_miss_tokens", "evictions"):
            assert getattr(simulated.directory, name) == getattr(served.directory, name)


TestTwinTrees = TwinTrees.TestCase
TestTwinTrees.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
