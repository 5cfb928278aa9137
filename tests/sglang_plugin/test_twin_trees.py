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
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from tree_support import PICK, scheduler_of  # noqa: E402

from granikv.core.admission import SharedAdmission, makes_run  # noqa: E402
from granikv.core.allocator import HotColdAllocator  # noqa: E402
from granikv.core.boundary import Boundary  # noqa: E402
from granikv.core.directory import SlabDirectory  # noqa: E402
from granikv.core.groups import RowGroups  # noqa: E402
from granikv.core.placement import promote  # noqa: E402
from granikv.sglang_plugin import prefill  # noqa: E402
from granikv.sglang_plugin.allocator import HotColdTokenAllocator  # noqa: E402
from granikv.sglang_plugin.holders import ServerHolders  # noqa: E402
from granikv.sglang_plugin.radix_cache import GraniRadixCache  # noqa: E402
from granikv.sim.config import ServerConfig  # noqa: E402
from granikv.sim.decode_batch import DecodeBatch  # noqa: E402
from granikv.sim.holders import PoolHolders  # noqa: E402
from granikv.sim.placement import HotPlacement  # noqa: E402
from granikv.sim.prefix_index import PrefixIndex  # noqa: E402
from granikv.sim.requests import RequestState  # noqa: E402
from granikv.sim.scheduler import PrefillItem, Scheduler  # noqa: E402
from granikv.traces.request import Request, Run  # noqa: E402

PROMPT = st.lists(st.integers(0, 1), min_size=2, max_size=24)


class Simulated:
    """The simulator's index; a prompt's token is a run of its own."""

    def __init__(self, size, hot, admission):
        self.core = HotColdAllocator(size, hot)
        self.directory = SlabDirectory(self.core, admission)
        self.index = PrefixIndex(self.core, self.directory, RowGroups())
        self.placement = HotPlacement(self.directory, self.index)
        config = ServerConfig(size_tokens=size)
        self.scheduler = Scheduler(config, self.index, DecodeBatch(), self.placement)
        self.asked = None

    def admit(self, prompt, now_s):
        runs = tuple(Run(token, 1) for token in prompt)
        cursor, _ = self.index.match(runs, len(prompt) - 1)
        before = cursor.node
        self.index.lock(before)
        missing = len(prompt) - cursor.depth
        if not self.index.ensure_cold(missing):
            self.index.unlock(before)
            return None
        self.index.insert(cursor, runs, self.core.alloc_cold(missing))
        after = cursor.node
        if after is not before:
            self.index.lock(after, before)
        self.index.refresh(after)
        self.index.count_use(after.path(), now_s)
        return after

    def promote(self, node, now_s):
        chain = [member for member in node.path() if not member.is_hot]
        return promote(self.directory, self.index, chain, now_s)

    def begin(self, prompt, hint, now_s):
        """A request whose declared prefix is placed at its first chunk, below what is HOT."""
        runs = tuple(Run(token, 1) for token in prompt)
        state = RequestState(Request(0, 0.0, runs, 1, prefix_tokens=hint), 0)
        state.cursor, _ = self.index.match(runs, len(prompt) - 1)
        state.last_node = state.cursor.node
        self.index.lock(state.last_node)
        return state

    def depth(self, state):
        return state.cursor.depth

    def fill(self, state, count, now_s):
        depth = self.depth(state)
        path = state.last_node.path()
        if state is not self.asked and all(node.is_hot for node in path):
            self.placement.admit(state, path, now_s)
        self.asked = state
        item = PrefillItem(state, depth, count, depth + count < state.fill_tokens)
        self.scheduler.take_slots([item])
        return item

    def cache(self, item, now_s):
        self.scheduler.cache(item, now_s)
        return None if item.truncated else item.state.last_node

    def give_up(self, state):
        self.scheduler._chunked = state
        self.scheduler.drop_chunked()

    def leave(self, node):
        self.index.unlock(node)

    def evict(self, count):
        self.index.ensure_cold(self.core.cold_free + count)

    def evictable(self):
        return self.index.evictable_tokens

    def holders(self):
        """Whoever holds slots; nothing decodes here."""
        pools = SimpleNamespace(allocator=self.core, index=self.index, groups=self.index.groups)
        pools.remap = self.index.remap
        return PoolHolders(pools)

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
        self.rows = ReqToTokenPool(2, 64, "cpu", False)
        params = CacheInitParams(False, self.rows, self.allocator, 1)
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

    def begin(self, prompt, hint, now_s):
        matched = self.match(prompt[:-1])
        self.tree.inc_lock_ref(matched.last_device_node)
        req = SimpleNamespace(
            rid="0",
            origin_input_ids=array("q", prompt),
            output_ids=array("q"),
            extra_key=None,
            req_pool_idx=1,
            sampling_params=SimpleNamespace(custom_params={prefill.HINT: hint}),
            prefix_indices=matched.device_indices,
            cache_protected_len=len(matched.device_indices),
            last_node=matched.last_device_node,
            kv=None,
        )
        req.get_fill_ids = lambda: req.origin_input_ids[: req.end]
        return req

    def depth(self, req):
        return len(req.prefix_indices)

    def fill(self, req, count, now_s):
        self.now_s = now_s
        start = len(req.prefix_indices)
        req.end = start + count
        batch = SimpleNamespace(
            tree_cache=self.tree,
            reqs=[req],
            prefix_lens=[start],
            extend_lens=[count],
            extend_num_tokens=count,
        )
        self.rows.write((1, slice(0, start)), req.prefix_indices)
        self.rows.write((1, slice(start, req.end)), prefill.alloc_for_extend(self.alloc, batch))
        req.kv = "allocated"
        return req

    def alloc(self, batch):
        shortfall = batch.extend_num_tokens - self.core.cold_free
        if shortfall > 0:
            self.tree.evict(EvictParams(num_tokens=shortfall))
        return self.allocator.alloc(batch.extend_num_tokens)

    def cache(self, req, now_s):
        self.now_s = now_s
        chunked = req.end < len(req.origin_input_ids)
        self.tree.cache_unfinished_req(req, chunked=chunked)
        self.tree.prefills.free_taken_over(lambda _: None)
        return None if chunked else req.last_node

    def give_up(self, req):
        self.tree.cache_finished_req(req, False, kv_len_to_handle=req.cache_protected_len)

    def leave(self, node):
        self.tree.dec_lock_ref(node)

    def evict(self, count):
        self.tree.evict(EvictParams(num_tokens=count))

    def evictable(self):
        return self.tree.evictable_size()

    def holders(self):
        """Whoever holds slots, beside a prompt that is being prefilled no row."""
        self.allocator._kvcache = SimpleNamespace(k_buffer=[], v_buffer=[])
        return ServerHolders(scheduler_of(self.tree, []))

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


class FirstIdle(SharedAdmission):
    """Displaces by address: the twins count the uses of a path at different times."""

    def victims(self, view, idle):
        for start in range(len(idle)):
            for end in range(start + 1, len(idle) + 1):
                nodes = [slab.node for slab in idle[start:end]]
                if makes_run(nodes, idle, view.length):
                    return nodes
        return []


class TwinTrees(RuleBasedStateMachine):
    """Every operation on both; then both are compared."""

    @initialize(
        size=st.integers(40, 120),
        hot=st.integers(0, 30),
        min_live=st.integers(1, 3),
        budget=st.integers(1, 20),
    )
    def start(self, size, hot, min_live, budget):
        policy = FirstIdle(min_tokens=2, min_live=min_live)
        self.twins = (Simulated(size, hot, policy), Served(size, hot, policy))
        self.boundaries = tuple(
            Boundary(twin.core, twin.directory, twin.holders(), budget) for twin in self.twins
        )
        self.running = []
        self.filling = self.filled = None
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

    @precondition(lambda self: self.filling is None)
    @rule(prompt=PROMPT, hint=st.integers(0, 24))
    def begin(self, prompt, hint):
        """A request that declares its prefix is going to be prefilled in chunks."""
        hint = min(hint, len(prompt))
        self.filling = self.both(lambda twin, _: twin.begin(prompt, hint, self.now_s))
        self.missing = len(prompt) - self.twins[0].depth(self.filling[0])

    @precondition(lambda self: self.filling and not self.filled)
    @rule(count=st.integers(1, 24))
    def fill(self, count):
        simulated = self.twins[0]
        count = min(count, self.missing, simulated.core.cold_free + simulated.evictable())
        if count:
            request = self.filling
            self.filled = self.both(lambda twin, i: twin.fill(request[i], count, self.now_s))
            self.missing -= count

    @precondition(lambda self: self.filled)
    @rule()
    def cache(self):
        filled, self.filled = self.filled, None
        first, second = self.both(lambda twin, i: twin.cache(filled[i], self.now_s))
        assert (first is None) == (second is None) == (self.missing > 0)
        if first is not None:
            self.running.append((first, second))
            self.filling = None

    @rule(prompt=PROMPT, shorter=st.integers(0, 8), count=st.integers(1, 24))
    def share_while_filling(self, prompt, shorter, count):
        """Somebody caches the same tokens in COLD between a chunk's start and its end."""
        if self.filling is None:
            self.begin(prompt, max(len(prompt) - shorter // 2, 0))
        if not self.filled:
            self.fill(count)
        same = list(self.filling[1].origin_input_ids)
        self.admit(same[: max(len(same) - shorter, 2)])

    @precondition(lambda self: self.filling and not self.filled)
    @rule()
    def give_up(self):
        request, self.filling = self.filling, None
        self.both(lambda twin, i: twin.give_up(request[i]))

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

    @precondition(lambda self: not self.boundaries[0].is_moving)
    @rule(hot=st.integers(0, 39))
    def begin_move(self, hot):
        first, second = (boundary.begin(hot) for boundary in self.boundaries)
        assert first == second

    @precondition(lambda self: not self.boundaries[0].is_moving)
    @rule()
    def compact(self):
        first, second = (boundary.compact() for boundary in self.boundaries)
        assert first == second

    @precondition(lambda self: self.boundaries[0].is_moving and not self.filled)
    @rule()
    def move(self):
        first, second = (boundary.advance() for boundary in self.boundaries)
        assert first == second

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
