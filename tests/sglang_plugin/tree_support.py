"""Servers that touch the radix tree as SGLang's scheduler does, without a model."""

from array import array
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey

from granikv.sglang_plugin.holders import ServerHolders
from granikv.sglang_plugin.promotion import promote_ready

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
        self.scheduler = scheduler_of(self.tree, self.running)

    def write(self, req, start, slots):
        super().write(req, start, slots)
        tokens = list(req.origin_input_ids) + list(req.output_ids)
        for i, slot in enumerate(slots.tolist()):
            self.kv[slot] = self.other_kv[slot] = mark(tokens[: start + i + 1])

    def check_rows(self):
        """Every running request reads its own tokens."""
        for req in self.running:
            tokens = list(req.origin_input_ids) + list(req.output_ids)
            row = self.rows.req_to_token[req.req_pool_idx]
            for i in range(len(tokens)):
                assert self.kv[row[i]] == mark(tokens[: i + 1])

    def check_tree(self):
        """Every cached token is where its node says."""
        stack = [(node, []) for node in self.tree.root_node.children.values()]
        while stack:
            node, above = stack.pop()
            path = above + list(node.key.token_ids)
            for i, slot in enumerate(node.value.tolist()):
                assert self.kv[slot] == mark(path[: len(above) + i + 1])
            stack.extend((child, path) for child in node.children.values())

    def promote(self):
        """What the plugin does before every step."""
        promote_ready(self.scheduler)


class ErasingHolders(ServerHolders):
    """Whoever holds slots of a marked server; what has moved leaves nothing behind to be read."""

    def __init__(self, server):
        super().__init__(server.scheduler)
        self.server = server

    def move_cold(self, src, dst):
        super().move_cold(src, dst)
        self.erase(src)

    def move_slab(self, node_id, old, new):
        super().move_slab(node_id, old, new)
        self.erase(old.slots())

    def erase(self, slots):
        self.server.kv[slots] = self.server.other_kv[slots] = 0


def scheduler_of(tree, running):
    """What the plugin looks at of a scheduler whose steps overlap, on a device without streams."""
    stream = SimpleNamespace(wait_stream=lambda _: None)
    return SimpleNamespace(
        tree_cache=tree,
        token_to_kv_pool_allocator=tree.token_to_kv_pool_allocator,
        enable_overlap=True,
        running_batch=SimpleNamespace(reqs=running, seq_lens_cpu=None),
        waiting_queue=[],
        last_batch=None,
        chunked_req=None,
        forward_stream=stream,
        schedule_stream=stream,
        forward_stream_ctx=nullcontext(),
    )


def mark(tokens):
    """A number for what KV of these tokens would be."""
    return hash(tuple(tokens)) >> 1 | 1


def record_streams(scheduler):
    """Give a scheduler streams; what happens, in order, and a wrapper that notes calls in it with
    the stream that they are on.
    """
    found, current = [], ["schedule"]

    class Stream(SimpleNamespace):
        def wait_stream(self, other):
            found.append(f"{self.name} waits for {other.name}")

    class OnForward:
        def __enter__(self):
            current[0] = "forward"

        def __exit__(self, *_):
            current[0] = "schedule"

    def noted(name, call):
        def wrapped(*arguments):
            found.append(f"{name} on {current[0]}")
            return call(*arguments)

        return wrapped

    scheduler.forward_stream = Stream(name="forward")
    scheduler.schedule_stream = Stream(name="schedule")
    scheduler.forward_stream_ctx = OnForward()
    return found, noted
