"""SGLang's radix tree with HOT nodes: their tokens lie in slabs, everything else is as in SGLang.

HOT nodes form a top part of the tree (see `granikv.core.placement`), so an unlocked COLD node
never hides a HOT one below it and every unlocked COLD token can be evicted. A HOT node's `value`
holds its slab's slots, so matching, and whoever reads slots, needs no special case.

Sizes that the scheduler sees: `evictable_size` counts COLD tokens alone, for only these become
slots that `alloc` can give; `protected_size` counts all of HOT beside locked COLD tokens, so that
SGLang's own leak check (free + evictable + protected + held by requests == size) stays exact.
"""

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, TreeNode

from granikv.core.allocator import Slab
from granikv.core.directory import Reservation, SlabDirectory
from granikv.core.placement import promote, promote_fitting
from granikv.sglang_plugin.allocator import HotColdTokenAllocator, to_host
from granikv.sglang_plugin.in_place import InPlacePrefills
from granikv.sglang_plugin.region import RegionNodes
from granikv.sglang_plugin.tree_nodes import HotMove, Member, Use

if TYPE_CHECKING:
    from granikv.sglang_plugin.repartition import LiveRepartitioner


class GraniRadixCache(RadixCache):  # type: ignore[misc,unused-ignore]
    """Radix cache for a `HotColdTokenAllocator`.

    Args:
        params: SGLang's.
        now_s: the clock of admission policies.

    Attributes:
        now_s: the clock.
        prefills: what is being prefilled into slabs.
        paths_version: another number whenever a request's last node may have become another one.
        hot_version: another number whenever a node's HOT path may have become another one.
        promotions: nodes that were copied from COLD into slabs so far.
        promoted_tokens: of those nodes.
        evicted_nodes: dropped for their room so far, HOT or COLD.
        repartitioner: moves the boundary; None before there is a scheduler.

    Raises:
        TypeError: the allocator is another one.
        ValueError: a parameter that HOT nodes do not go with.
    """

    def __init__(
        self, params: CacheInitParams, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        allocator = params.token_to_kv_pool_allocator
        if not isinstance(allocator, HotColdTokenAllocator):
            raise TypeError(
                "the granikv radix cache needs the granikv allocator, got "
                f"{type(allocator).__name__}: GraniKV's plugin is not loaded in this process"
            )
        if params.disable or params.is_eagle or params.page_size != 1:
            raise ValueError(
                "the granikv radix cache needs --page-size 1, no --disable-radix-cache and no "
                "speculative decoding"
            )
        self.now_s = now_s
        self._hot: dict[int, TreeNode] = {}
        self._uses: dict[int, Use] = {}
        self._moves: list[HotMove] = []
        self._candidates: dict[int, Any] = {}
        self.prefills = InPlacePrefills(self)
        self.paths_version = 0
        self.hot_version = 0
        self.promotions = 0
        self.promoted_tokens = 0
        self.evicted_nodes = 0
        self.repartitioner: LiveRepartitioner | None = None
        self._region: RegionNodes | None = None
        super().__init__(params)

    @property
    def directory(self) -> SlabDirectory:
        """Of the slabs."""
        return self.token_to_kv_pool_allocator.directory

    def reset(self) -> None:
        """Forget everything that is cached."""
        super().reset()
        self.hot_version += 1
        self.directory.clear()
        self._hot.clear()
        self._uses.clear()
        self._moves.clear()
        self._candidates.clear()
        self._region = None
        self.prefills.clear()

    def protected_size(self) -> int:
        """Tokens that neither a request alone nor the free list nor eviction accounts for."""
        core = self.token_to_kv_pool_allocator.core
        hot = core.hot_used + core.hot_free + core.fenced - self.prefills.uncached_tokens
        return int(self.protected_size_) + hot + self.prefills.kept_tokens

    # ------------------------------------------------------------------ uses

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        """As SGLang's; a prompt that is complete counts as a use of its whole path."""
        self.prefills.cache(req, chunked)
        super().cache_unfinished_req(req, chunked)
        self.paths_version += 1
        if not chunked:
            self.count_use(req)

    def count_use(self, req: Any) -> None:
        """A request has run on its path, which is looked at before the next step."""
        now_s = self.now_s()
        for node in self.path(req.last_node):
            use = self._uses.get(node.id)
            self._uses[node.id] = (
                Use(1, now_s, now_s)
                if use is None
                else replace(use, hits=use.hits + 1, last_s=now_s)
            )
            if use is not None and node.id in self._hot:  # a new node's slab has its first use
                self.directory.touch(node.id, now_s)
        self._candidates[id(req)] = req

    def cache_finished_req(
        self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int
    ) -> None:
        """As SGLang's, for a request that ends, is aborted or retracted."""
        self._candidates.pop(id(req), None)
        if is_insert and not self.disable_finished_insert:
            self.prefills.cache(req, chunked=False)
        self.prefills.drop(req)
        super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle)

    def take_candidates(self) -> list[TreeNode]:
        """Ends of the paths that have been used since the last call and are still held."""
        nodes = {req.last_node.id: req.last_node for req in self._candidates.values()}
        self._candidates.clear()
        return list(nodes.values())

    def holds(self, last_node: TreeNode, node: TreeNode) -> bool:
        """Whether the path down to `last_node` goes through `node`."""
        while last_node is not self.root_node:
            if last_node is node:
                return True
            last_node = last_node.parent
        return False

    def hot_end(self, last_node: TreeNode) -> TreeNode | None:
        """The lowest HOT node on the path down to `last_node`."""
        while last_node is not self.root_node:
            if last_node.id in self._hot:
                return last_node
            last_node = last_node.parent
        return None

    def hot_path(self, node_id: int) -> list[tuple[int, int, int]]:
        """(node, first slot, tokens) of the HOT nodes down to a HOT node, from the top."""
        path = self.path(self._hot[node_id])
        return [(node.id, self.base_of(node), len(node.key)) for node in path]

    def base_of(self, node: TreeNode) -> int:
        """First slot of a HOT node, 0 for a COLD one."""
        slab = self.directory.slab_of(node.id)
        return 0 if slab is None else slab.base

    def path(self, node: TreeNode) -> list[TreeNode]:
        """From below the root down to `node`."""
        path = []
        while node is not self.root_node:
            path.append(node)
            node = node.parent
        return path[::-1]

    # ------------------------------------------------------------------ locking and splitting

    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        """One more request holds the path down to `node`; `delta` counts COLD tokens."""
        delta = 0
        while node is not self.root_node:
            if node.lock_ref == 0:
                if node.id in self._hot:
                    self.directory.lock(node.id)
                else:
                    delta -= len(node.key)
            node.lock_ref += 1
            self._update_leaf_status(node)
            node = node.parent
        self.evictable_size_ += delta
        self.protected_size_ -= delta
        return IncLockRefResult(delta=delta)

    def dec_lock_ref(
        self, node: TreeNode, params: DecLockRefParams | None = None
    ) -> DecLockRefResult:
        """One request less holds the path down to `node`; `delta` counts COLD tokens."""
        delta = 0
        while node is not self.root_node:
            if node.lock_ref == 1:
                if node.id in self._hot:
                    self.directory.unlock(node.id)
                else:
                    delta += len(node.key)
            node.lock_ref -= 1
            self._update_leaf_status(node)
            node = node.parent
        self.evictable_size_ += delta
        self.protected_size_ -= delta
        return DecLockRefResult(delta=delta)

    def _split_node(self, key: Any, child: TreeNode, split_len: int) -> TreeNode:
        upper = super()._split_node(key, child, split_len)
        if child.id in self._hot:
            self.hot_version += 1
            self.directory.split(child.id, upper.id, split_len)
            self._hot[upper.id] = upper
        elif self._region is not None:
            self._region.add(upper)
        if child.id in self._uses:
            self._uses[upper.id] = self._uses[child.id]
        return upper

    def _insert_helper(self, *arguments: Any, **named: Any) -> tuple[int, TreeNode]:
        length, node = super()._insert_helper(*arguments, **named)
        if self._region is not None and node is not self.root_node and node.id not in self._hot:
            self._region.add(node)
        return length, node

    # ------------------------------------------------------------------ evicting

    def evict(self, params: EvictParams) -> EvictResult:
        """Evict COLD leaves in SGLang's order until `num_tokens` COLD slots are free."""
        begin_s = time.perf_counter()
        priority = self.eviction_strategy.get_priority
        heap = [
            (priority(leaf), leaf) for leaf in self.evictable_leaves if leaf.id not in self._hot
        ]
        heapq.heapify(heap)
        evicted = 0
        with self.token_to_kv_pool_allocator.grouped():
            while heap and evicted < params.num_tokens:
                _, leaf = heapq.heappop(heap)
                parent = leaf.parent
                evicted += len(leaf.key)
                self._drop(leaf)
                if parent in self.evictable_leaves and parent.id not in self._hot:
                    heapq.heappush(heap, (priority(parent), parent))
        self.update_eviction_metrics(evicted, begin_s)
        return EvictResult(num_tokens_evicted=evicted)

    def is_hot_cached(self, node_id: int) -> bool:
        """Whether the node is HOT and in the tree."""
        return node_id in self._hot

    def evict_hot(self, node_id: int) -> None:
        """Drop an unlocked HOT node with everything cached below it."""
        below = [self._hot[node_id]]
        for node in below:
            below.extend(node.children.values())
        for node in reversed(below):
            self._drop(node)

    def _drop(self, leaf: TreeNode) -> None:
        """Free a leaf's slots and take it out of the tree."""
        if leaf.id in self._hot:
            self.directory.evict(leaf.id)
        else:
            self.token_to_kv_pool_allocator.free_segment(leaf.value, start_pos=0)
        self.evicted_nodes += 1
        self._delete_leaf(leaf)
        self._record_remove_event(leaf)

    def _delete_leaf(self, node: TreeNode) -> None:
        super()._delete_leaf(node)
        self._uses.pop(node.id, None)
        if self._region is not None:
            self._region.discard(node)
        if self._hot.pop(node.id, None) is not None:
            self.hot_version += 1
            self.evictable_size_ += len(node.key)  # a HOT node was not counted

    # ------------------------------------------------------------------ placement

    def promote(self, node: TreeNode, *, is_asked_for: bool = True) -> list[HotMove]:
        """Move what admission wants of the path down to `node` into one slab; often nothing.

        Where no request asks for it, free HOT alone is used, and no miss is counted. KV is to be
        copied. The freed COLD slots may be given to somebody else as soon as the
        allocator is called again: copy and remap before that.
        """
        chain, start, now_s = [], 0, self.now_s()
        for member in self.path(node):
            if member.id not in self._hot:
                use = self._uses.get(member.id, Use(1, now_s, now_s))
                chain.append(Member(member, start, use))
            start += len(member.key)
        place = promote if is_asked_for else promote_fitting
        place(self.directory, self, chain, now_s)
        moves, self._moves = self._moves, []
        return moves

    def make_hot(self, member: Member, reservation: Reservation) -> None:
        """Give a COLD node the next slots of `reservation`."""
        node, allocator = member.node, self.token_to_kv_pool_allocator
        src = to_host(node.value)
        dst = self.directory.take(reservation, member.length)
        self.promotions += 1
        self.promoted_tokens += member.length
        allocator.core.free_cold(src)
        self.attach(node, reservation)
        node.value = allocator.to_device(dst)
        self._moves.append(HotMove(node, member.start, src, dst))

    def take_over(self, node: TreeNode, start: int, reservation: Reservation) -> HotMove:
        """Give a COLD node slots of `reservation` that hold its KV already.

        Its COLD slots stay in use: rows have them, and KV, until they are remapped.
        """
        src = to_host(node.value)
        dst = self.attach(node, reservation).slots()
        node.value = self.token_to_kv_pool_allocator.to_device(dst)
        return HotMove(node, start, src, dst)

    def attach(self, node: TreeNode, reservation: Reservation) -> Slab:
        """Count a COLD node as HOT: the next filled slots of `reservation` are its own."""
        length = len(node.key)
        if node.lock_ref:
            self.protected_size_ -= length
        else:
            self.evictable_size_ -= length
        self._hot[node.id] = node
        self.hot_version += 1
        if self._region is not None:
            self._region.discard(node)
        return self.directory.bind(node.id, reservation, length, locks=1 if node.lock_ref else 0)

    def remap_cold(self, moved: torch.Tensor, lo: int, hi: int) -> None:
        """Follow slots out of `[lo, hi)`, which HOT takes over; `moved` as in `RegionNodes`."""
        if self._region is None or self._region.bounds != (lo, hi):
            self._region = RegionNodes(self._cold_nodes(), lo, hi)
        self._region.remap(moved)

    def end_region(self) -> None:
        """HOT has grown."""
        self._region = None

    def move_slab(self, node_id: int, old: Slab, new: Slab) -> HotMove:
        """Let a HOT node have the slots that its KV has been copied to."""
        node = self._hot[node_id]
        node.value = self.token_to_kv_pool_allocator.to_device(new.slots())
        self.hot_version += 1
        start = sum(len(above.key) for above in self.path(node)) - len(node.key)
        return HotMove(node, start, old.slots(), new.slots())

    def _cold_nodes(self) -> Iterator[TreeNode]:
        stack = list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.id not in self._hot:
                yield node

    def is_hot_path(self, node: TreeNode) -> bool:
        """Whether all down to `node` is HOT; the empty path is."""
        return node is self.root_node or node.id in self._hot

    def hot_nodes(self) -> Iterator[TreeNode]:
        """All HOT nodes."""
        return iter(self._hot.values())
