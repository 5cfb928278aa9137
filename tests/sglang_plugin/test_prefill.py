"""Placement while a prompt is prefilled, through SGLang's own `alloc_for_extend` and tree."""

import subprocess
import sys
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
from sglang.srt.mem_cache import allocation  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from tree_support import CONTEXT, PICK, PROMPT, ROWS, mark, scheduler_of  # noqa: E402

from granikv.core.admission import PaperAdmission, SharedAdmission, ValueAdmission  # noqa: E402
from granikv.sglang_plugin import prefill  # noqa: E402
from granikv.sglang_plugin.allocator import HotColdTokenAllocator  # noqa: E402
from granikv.sglang_plugin.promotion import promote_ready  # noqa: E402
from granikv.sglang_plugin.radix_cache import GraniRadixCache  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def rows_without_triton():
    """SGLang asks the running server which kernel writes rows."""
    original = allocation.get_exec
    kernel = SimpleNamespace(attention_backend="torch_native")
    allocation.get_exec = lambda: SimpleNamespace(kernel=kernel)
    yield
    allocation.get_exec = original


class Server:
    """SGLang's overlapped scheduler: a batch is resolved after the next one is launched.

    KV are marks: a slot says which tokens up to it were written there.
    """

    def __init__(self, size, hot, admission, now_s=lambda: 0.0):
        self.allocator = HotColdTokenAllocator(
            size, torch.int64, "cpu", None, False, hot_tokens=hot, admission=admission
        )
        self.rows = ReqToTokenPool(ROWS, CONTEXT, "cpu", False)
        self.tree = GraniRadixCache(CacheInitParams(False, self.rows, self.allocator, 1), now_s)
        self.kv = torch.zeros(size + 1, dtype=torch.int64)
        self.allocator._kvcache = SimpleNamespace(k_buffer=[self.kv], v_buffer=[])
        self.live = []  # with a row
        self.launched = []  # batches, oldest first
        self.chunked = None
        self.scheduler = scheduler_of(self.tree, self.live)

    @property
    def room(self):
        return self.allocator.available_size() + self.tree.evictable_size()

    def launch(self, prompts, chunk=1000):
        """Prefill the next chunk, and new `(prompt, hint)` while `chunk` tokens and COLD last."""
        self.promote()
        reqs, tokens = [], 0
        if self.chunked is not None:
            if self.chunked.extend_end > len(self.chunked.prefix_indices):
                self.tree.cache_unfinished_req(self.chunked, chunked=True)
            wanted = len(self.chunked.origin_input_ids) - len(self.chunked.prefix_indices)
            tokens = min(chunk, wanted, self.room)
            if not tokens:
                return []
            reqs.append(self.extend(self.chunked, tokens))
            if tokens == wanted:
                self.chunked = None
        for prompt, hint in prompts:
            if self.chunked is not None or len(self.live) == ROWS or tokens == chunk:
                break
            req = self.match(prompt, hint)
            wanted = len(prompt) - len(req.prefix_indices)
            take = min(wanted, chunk - tokens)
            if take + tokens > self.room:
                self.tree.dec_lock_ref(req.last_node)
                break
            tokens += take
            self.live.append(req)
            reqs.append(self.extend(req, take))
            if take < wanted:
                self.chunked = req
        if reqs:
            self.allocate(reqs)
        return reqs

    def match(self, prompt, hint):
        key = RadixKey(array("q", prompt[:-1]))
        matched = self.tree.match_prefix(MatchPrefixParams(key=key))
        req = SimpleNamespace(
            rid=str(len(self.live)),
            origin_input_ids=array("q", prompt),
            output_ids=array("q"),
            extra_key=None,
            priority=0,
            sampling_params=SimpleNamespace(custom_params=hint and {prefill.HINT: hint}),
            req_pool_idx=None,
            kv=None,
            kv_committed_len=0,
            inflight_middle_chunks=0,
            prefix_indices=matched.device_indices,
            cache_protected_len=len(matched.device_indices),
            last_node=matched.last_device_node,
            extend_end=0,
        )
        req.get_fill_ids = lambda: req.origin_input_ids[: req.extend_end]
        self.tree.inc_lock_ref(req.last_node)
        return req

    def extend(self, req, count):
        req.extend_end = len(req.prefix_indices) + count
        req.kv_committed_len = req.extend_end
        return req

    def allocate(self, reqs):
        starts = [len(req.prefix_indices) for req in reqs]
        ends = [req.extend_end for req in reqs]
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        batch = SimpleNamespace(
            reqs=reqs,
            device="cpu",
            tree_cache=self.tree,
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=self.rows,
            prefix_lens=starts,
            extend_lens=counts,
            seq_lens=torch.tensor(ends),
            seq_lens_cpu=torch.tensor(ends),
            extend_num_tokens=sum(counts),
            maybe_evict_swa=lambda: None,
            is_dllm=lambda: False,
        )
        slots, *_ = prefill.alloc_for_extend(allocation.alloc_for_extend, batch)
        assert batch.extend_num_tokens == len(slots) == sum(counts)
        rows = [self.row(req)[start:] for req, start in zip(reqs, starts, strict=True)]
        assert slots.tolist() == torch.cat(rows).tolist()
        for req, start in zip(reqs, starts, strict=True):
            self.write(req, start)
        if any(req is self.chunked for req in reqs):
            self.chunked.inflight_middle_chunks += 1
        self.launched.append(reqs)

    def row(self, req):
        return self.rows.req_to_token[req.req_pool_idx, : req.kv.kv_allocated_len]

    def write(self, req, start):
        tokens = list(req.origin_input_ids) + list(req.output_ids)
        for i, slot in enumerate(self.row(req)[start:].tolist(), start):
            self.kv[slot] = mark(tokens[: i + 1])

    def resolve(self, ends=lambda req: False):
        """The oldest batch's results: prompts that are complete are cached, or end at once."""
        for req in self.launched.pop(0):
            if req.kv is None:
                continue
            if req.inflight_middle_chunks:
                req.inflight_middle_chunks -= 1
            elif ends(req):
                self.finish(req, True)
            else:
                self.tree.cache_unfinished_req(req)

    def run(self, prompt, hint=None, chunk=1000):
        """Prefill one prompt to its end."""
        reqs = [*self.launch([(prompt, hint)], chunk)]
        while self.launched:
            if self.chunked is not None:
                self.launch([], chunk)
            self.resolve()
        return reqs[0] if reqs else None

    def decode(self, req, token):
        """One more token; False when there is no room."""
        if self.room < 1 or req.kv.kv_allocated_len == CONTEXT:
            return False
        self.tree.evict(EvictParams(num_tokens=1 - self.allocator.available_size()))
        end = req.kv.kv_allocated_len
        self.rows.write((req.req_pool_idx, slice(end, end + 1)), self.allocator.alloc(1))
        req.output_ids.append(token)
        req.kv.kv_allocated_len = req.kv_committed_len = end + 1
        self.write(req, end)
        return True

    def finish(self, req, is_insert):
        """As `release_kv_cache`."""
        self.tree.cache_finished_req(req, is_insert, kv_len_to_handle=req.kv_committed_len)
        self.rows.free(req)
        req.kv = None
        self.live.remove(req)

    def abort_chunked(self):
        """As `process_pending_chunked_abort`, while its last chunk may still be computed."""
        req, self.chunked = self.chunked, None
        self.finish(req, False)

    def promote(self):
        """What the plugin does before every step."""
        promote_ready(self.scheduler)

    def complete(self):
        """Requests whose prompt is cached."""
        waiting = [req for batch in self.launched for req in batch]
        return [
            req
            for req in self.live
            if req is not self.chunked and not any(req is x for x in waiting)
        ]

    def check(self):
        """Every slot has one owner, every request reads its own tokens."""
        allocator, tree = self.allocator, self.tree
        owned = []
        for req in self.live:
            row, tokens = self.row(req), list(req.origin_input_ids) + list(req.output_ids)
            for i, slot in enumerate(row.tolist()):
                assert self.kv[slot] == mark(tokens[: i + 1])
            owned += row[req.cache_protected_len :].tolist()
        uncached = len(owned)
        stack, evictable, protected, hot = [(tree.root_node, [])], 0, 0, 0
        while stack:
            node, above = stack.pop()
            path = above + list(node.key.token_ids)
            slots = [] if node is tree.root_node else node.value.tolist()
            assert len(slots) == len(node.key)
            for i, slot in enumerate(slots):
                assert self.kv[slot] == mark(path[: len(above) + i + 1])
            owned += slots
            if node.id in tree._hot:
                assert tree.is_hot_path(node.parent)
                slab = tree.directory.slab_of(node.id)
                assert slots == list(range(slab.base, slab.end))
                assert tree.directory.locks_of(node.id) == min(node.lock_ref, 1)
                hot += len(slots)
            else:
                assert all(slot > allocator.core.hot_tokens for slot in slots)
                protected += len(slots) if node.lock_ref else 0
                evictable += 0 if node.lock_ref else len(slots)
            stack.extend((child, path) for child in node.children.values())
        kept = [slot for move in tree.prefills._taken_over for slot in move.src.tolist()]
        owned += kept
        assert len(set(owned)) == len(owned)
        assert (evictable, protected) == (tree.evictable_size(), tree.protected_size_)
        # SGLang's own check of its pool.
        total = allocator.available_size() + tree.evictable_size() + tree.protected_size()
        assert total + uncached == allocator.size
        reserved = sum(filling.end - filling.cached for filling in tree.prefills._open.values())
        assert hot + reserved == allocator.core.hot_used
        in_cold = sum(slot > allocator.core.hot_tokens for slot in owned)
        assert in_cold == allocator.core.cold_used
        allocator.core.check_integrity()
        allocator.directory.check_integrity()


class PrefillMachine(RuleBasedStateMachine):
    """Whatever is filled, duplicated, taken over, aborted or evicted, no slot is lost or shared."""

    @initialize(
        size=st.integers(50, 140),
        hot=st.integers(0, 48),
        policy=st.sampled_from(
            [
                PaperAdmission(),
                SharedAdmission(min_tokens=1, min_live=2),
                ValueAdmission(min_tokens=2, hysteresis=1.0),
            ]
        ),
    )
    def start(self, size, hot, policy):
        self.now_s = 0.0
        self.server = Server(size, hot, policy, lambda: self.now_s)

    def pick(self, pick):
        complete = self.server.complete()
        return complete[pick % len(complete)]

    @precondition(lambda self: len(self.server.launched) < 2)
    @rule(
        prompts=st.lists(st.tuples(PROMPT, st.none() | st.integers(1, 24)), max_size=3),
        chunk=st.integers(1, 30),
        twice=st.booleans(),
    )
    def launch(self, prompts, chunk, twice):
        self.now_s += 1.0
        self.server.launch(prompts * (2 if twice else 1), chunk)

    @precondition(lambda self: self.server.launched)
    @rule(ends=st.integers(0, 7))
    def resolve(self, ends):
        self.server.resolve(lambda req: ends >> req.req_pool_idx % 3 & 1)

    @precondition(lambda self: self.server.chunked is not None)
    @rule()
    def abort_chunked(self):
        self.server.abort_chunked()

    @precondition(lambda self: self.server.complete())
    @rule(pick=PICK, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def decode(self, pick, tokens):
        for token in tokens:
            self.server.decode(self.pick(pick), token)

    @precondition(lambda self: self.server.complete())
    @rule(pick=PICK, is_insert=st.booleans())
    def finish(self, pick, is_insert):
        """Finished, aborted, or retracted without insertion."""
        self.server.finish(self.pick(pick), is_insert)

    @rule()
    def promote(self):
        self.now_s += 1.0
        self.server.promote()
        assert not self.server.tree.prefills._taken_over

    @precondition(lambda self: self.server.tree.evictable_leaves)
    @rule(count=st.integers(1, 30))
    def evict(self, count):
        self.server.tree.evict(EvictParams(num_tokens=count))

    @property
    def idle_hot(self):
        return [node for node in self.server.tree.hot_nodes() if not node.lock_ref]

    @precondition(lambda self: self.idle_hot)
    @rule(pick=PICK)
    def evict_hot(self, pick):
        self.server.tree.evict_hot(self.idle_hot[pick % len(self.idle_hot)].id)

    @precondition(lambda self: not self.server.live and self.server.allocator.core.hot_used)
    @rule()
    def flush(self):
        self.server.launched.clear()
        self.server.tree.reset()
        self.server.allocator.clear()
        assert self.server.allocator.core.hot_used == 0

    @invariant()
    def nothing_is_lost(self):
        self.server.check()

    @invariant()
    def reservations_end_with_their_requests(self):
        open_reqs = [filling.req for filling in self.server.tree.prefills._open.values()]
        assert all(any(req is live for live in self.server.live) for req in open_reqs)


TestPrefill = PrefillMachine.TestCase
TestPrefill.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def slots(server, req):
    return server.row(req).tolist()


def make(hot=20, size=100, admission=None):
    return Server(size, hot, admission or PaperAdmission())


def test_a_declared_prefix_is_filled_in_place_chunk_by_chunk():
    server = make()
    req = server.run([1] * 18, hint=12, chunk=5)
    assert slots(server, req)[:12] == list(range(1, 13))
    assert server.allocator.core.cold_used == 6
    assert sum(len(node.key) for node in server.tree.hot_nodes()) == 12
    # One use: the directory does not count the request that made it twice.
    idle_after = server.finish(req, True) or server.tree.directory.idle(0.0)
    assert {slab.hits for slab in idle_after} == {1}
    again = server.run([1] * 12 + [2] * 3)
    assert slots(server, again)[:12] == list(range(1, 13))
    server.check()


def test_what_is_not_declared_or_not_wanted_stays_cold():
    server = make(admission=SharedAdmission(min_tokens=8))
    for prompt, hint in (([1] * 12, None), ([2] * 12, 7), ([3] * 6, 600), ([4] * 12, 0)):
        assert min(slots(server, server.run(prompt, hint))) > 20
    assert slots(server, server.run([5] * 12, hint=8))[:9] == [*range(1, 9), 63]


@pytest.mark.parametrize("hint", ["12", -3, 2.0, True])
def test_a_wrong_hint_is_named_and_places_nothing(hint, caplog):
    server = make()
    assert min(slots(server, server.run([1] * 12, hint=hint))) > 20
    assert f"must be a number of tokens, got {hint!r}" in caplog.text


def test_two_requests_of_one_batch_fill_it_once():
    server = make(hot=30)
    first, second = server.launch([([1] * 12 + [2], 12), ([1] * 12 + [3], 12)])
    assert min(slots(server, second)) > 30
    server.resolve()
    assert slots(server, first)[:12] == slots(server, second)[:12] == list(range(1, 13))
    assert server.allocator.core.cold_used == 2
    server.check()


def test_it_takes_over_what_another_has_cached_in_cold():
    """Rows that read the COLD copy keep it until they are remapped, before the next step."""
    server = make()
    other, filler = server.launch([([1] * 12 + [2], None), ([1] * 12 + [3], 12)])
    cold = slots(server, other)[:12]
    server.resolve()
    assert slots(server, filler)[:12] == list(range(1, 13))
    assert slots(server, other)[:12] == cold
    assert server.allocator.core.cold_used == 14
    server.check()
    server.promote()
    assert slots(server, other)[:12] == other.prefix_indices[:12].tolist() == list(range(1, 13))
    assert server.allocator.core.cold_used == 2
    server.check()


def test_a_later_chunk_reserves_nothing():
    """The other request of the batch has cached the rest of it meanwhile."""
    server = make(hot=30)
    _, chunked = server.launch([([1] * 12 + [2], 12), ([1] * 12 + [3], 12)], chunk=18)
    server.resolve()
    assert server.launch([]) == [chunked]
    assert slots(server, chunked)[:5] == list(range(1, 6))
    assert server.allocator.core.hot_used == 12
    server.resolve()
    assert slots(server, chunked)[:12] == list(range(1, 13))
    server.check()


def test_a_second_copy_of_what_is_hot_is_freed():
    """Two prefixes that part in the middle are filled at once: the first part is kept once."""
    server = make(hot=30)
    first, second = server.launch([([1] * 12, 12), ([1] * 6 + [2] * 6, 12)])
    assert slots(server, second) == list(range(13, 25))
    server.resolve()
    assert slots(server, first) == list(range(1, 13))
    assert slots(server, second) == [*range(1, 7), *range(19, 25)]
    assert server.allocator.core.hot_used == 18
    server.check()


def test_a_chunk_goes_on_below_what_was_promoted_meanwhile():
    server = make(hot=40)
    filler, *_ = server.launch([([1] * 12, 12)], chunk=4)
    server.launch([], chunk=4)
    server.resolve()
    # Somebody has cached the next tokens in COLD, and they have become HOT.
    other = server.match([1] * 10, None)
    server.live.append(other)
    server.allocate([server.extend(other, 6)])
    server.launched.insert(0, server.launched.pop())
    server.resolve()
    server.tree.count_use(other)
    server.promote()
    assert slots(server, other) == [*range(1, 5), *range(13, 19)]
    server.launch([], chunk=4)
    server.resolve()
    server.resolve()
    server.check()
    assert slots(server, filler) == [*range(1, 5), *range(13, 19), 11, 12]
    assert server.allocator.core.hot_used == 12


def test_an_abort_between_chunks_gives_the_rest_of_the_slab_back():
    server = make()
    server.launch([([1] * 12, 12)], chunk=5)
    server.launch([], chunk=5)
    assert server.allocator.core.hot_used == 12
    server.abort_chunked()
    assert server.allocator.core.hot_used == 5  # cached when the second chunk began
    server.check()
    server.resolve()
    server.resolve()
    assert [len(node.key) for node in server.tree.hot_nodes()] == [5]


@pytest.mark.parametrize("is_insert", [True, False])
def test_a_request_may_end_at_its_first_token(is_insert):
    server = make()
    (req,) = server.launch([([1] * 12, 9)])
    server.finish(req, is_insert)
    assert server.allocator.core.hot_used == (9 if is_insert else 0)
    assert server.allocator.core.cold_used == (3 if is_insert else 0)
    server.check()


def test_a_tree_that_keeps_nothing_of_finished_requests_keeps_no_slab():
    server = make()
    server.tree.disable_finished_insert = True
    (req,) = server.launch([([1] * 12, 9)])
    server.finish(req, True)
    assert (server.allocator.core.hot_used, server.allocator.core.cold_used) == (0, 0)


def test_a_second_slab_below_the_first():
    server = make()
    server.run([1] * 8 + [2], hint=8)
    nested = server.run([1] * 8 + [3] * 6 + [4], hint=14)
    assert slots(server, nested)[:14] == list(range(1, 15))
    assert sorted(len(node.key) for node in server.tree.hot_nodes()) == [6, 8]
    # Below a COLD node there is none.
    server.run([5] * 8)
    assert min(slots(server, server.run([5] * 8 + [6] * 4, hint=12))) > 20
    server.check()


def test_the_slab_is_split_where_a_shorter_prompt_ends():
    server = make()
    server.run([1] * 12, hint=12)
    short = server.run([1] * 5 + [2] * 3, hint=8)
    assert slots(server, short) == [*range(1, 6), *range(13, 16)]
    server.check()


def test_a_prefix_without_room_goes_to_cold_and_counts_as_a_miss():
    server = make(hot=10)
    held = server.run([1] * 9, hint=8)
    assert min(slots(server, server.run([2] * 9, hint=8))) > 10
    assert server.tree.directory.misses == {"no_room": 1}
    assert slots(server, held)[:8] == list(range(1, 9))
    server.check()


def test_an_idle_slab_gives_way():
    server = make(hot=10, admission=SharedAdmission(min_tokens=4))
    server.finish(server.run([1] * 9, hint=8), True)
    assert slots(server, server.run([2] * 9, hint=8))[:8] == list(range(1, 9))
    assert server.tree.directory.evictions == 1
    server.check()


def test_only_what_goes_to_cold_is_evicted_for():
    server = make(hot=20, size=60)
    server.finish(server.run([1] * 38), True)
    assert (server.allocator.available_size(), server.tree.evictable_size()) == (2, 38)
    assert server.run([2] * 14, hint=12) is not None
    assert server.tree.evictable_size() == 38


def test_trees_of_others_are_left_alone():
    batch = SimpleNamespace(tree_cache=None)
    assert prefill.alloc_for_extend(lambda got: got, batch) is batch


_HOOK = """
from sglang.srt.managers import schedule_batch
from sglang.srt.mem_cache import allocation
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from granikv.sglang_plugin.prefill import alloc_for_extend
HookRegistry.register(
    "sglang.srt.mem_cache.allocation.alloc_for_extend", alloc_for_extend, HookType.AROUND
)
HookRegistry.apply_hooks()
assert schedule_batch.alloc_for_extend is allocation.alloc_for_extend
print(hasattr(schedule_batch.alloc_for_extend, "__wrapped__"))
"""


def test_the_hook_takes_hold_where_batches_are_prepared():
    done = subprocess.run(
        [sys.executable, "-c", _HOOK], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["True"], done.stderr[-2000:]
