"""Prefixes that are being prefilled straight into slabs: from a reservation to HOT nodes.

SGLang inserts what a step has computed when it caches a request. The part that lies in a slab is
put into the tree before that and counts as cached from then on, so that SGLang inserts, and frees
as duplicates, COLD slots alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from granikv.core.allocator import Slots
from granikv.core.directory import Reservation

if TYPE_CHECKING:
    from granikv.sglang_plugin.radix_cache import GraniRadixCache
from granikv.sglang_plugin.tree_nodes import HotMove

# For the directory alone: SGLang counts its nodes from 0 upwards.
UNBORN_NODE = -1


@dataclass(frozen=True, slots=True)
class Filling:
    """A prefix that one request is filling into a slab.

    Attributes:
        req: SGLang's.
        reservation: of the slab.
        start: the prefix's first token in the slab; all before it are HOT.
    """

    req: Any
    reservation: Reservation
    start: int

    @property
    def cached(self) -> int:
        """Token up to which the tree has it."""
        return self.start + self.reservation.bound

    @property
    def filled(self) -> int:
        """Token up to which the request's row has it."""
        return self.start + self.reservation.filled

    @property
    def end(self) -> int:
        """Token up to which the slab is reserved."""
        return self.start + self.reservation.view.length


class InPlacePrefills:
    """The prefixes that requests are filling into slabs of a tree, one per request at most."""

    def __init__(self, tree: "GraniRadixCache") -> None:
        self._tree = tree
        self._open: dict[int, Filling] = {}
        self._taken_over: list[HotMove] = []

    @property
    def kept_tokens(self) -> int:
        """COLD slots that only rows still have."""
        return sum(len(move.src) for move in self._taken_over)

    @property
    def uncached_tokens(self) -> int:
        """Filled slots that requests hold beside the tree."""
        return sum(filling.filled - filling.cached for filling in self._open.values())

    def begin(self, req: Any, start: int, reservation: Reservation) -> None:
        """A request is going to fill its tokens from `start` on into `reservation`."""
        self._open[id(req)] = Filling(req, reservation, start)

    def is_filled_by_another(self, req: Any, start: int, end: int) -> bool:
        """Whether tokens `start .. end` of a request are being filled, or the first of them."""
        return any(
            filling.end > start
            and filling.req.extra_key == req.extra_key
            and _agree(filling.req.origin_input_ids, req.origin_input_ids, min(filling.end, end))
            for filling in self._open.values()
        )

    def take(self, req: Any, count: int) -> Slots:
        """HOT slots for the first of a request's next `count` tokens; often none."""
        filling = self._open.get(id(req))
        if filling is None:
            return np.empty(0, dtype=np.int32)
        count = min(count, filling.end - filling.filled)
        return self._tree.directory.take(filling.reservation, count)

    def cache(self, req: Any, chunked: bool) -> None:
        """Make HOT nodes of what a request has filled.

        Tokens that another request has cached meanwhile hold the same KV: if they are COLD, ours
        take their place (see `free_taken_over`), else ours are freed.
        """
        filling = self._open.get(id(req))
        if filling is None or filling.filled == filling.cached:
            return
        tree, end, at = self._tree, filling.filled, filling.cached
        key = RadixKey(req.origin_input_ids[:end], req.extra_key)
        for node in self._found_below(req.last_node, key):
            if tree.is_hot_cached(node.id):
                self._discard(filling.reservation, len(node.key))
                place = (req.req_pool_idx, slice(at, at + len(node.key)))
                tree.req_to_token_pool.write(place, node.value)
            else:
                self._taken_over.append(tree.take_over(node, at, filling.reservation))
            at += len(node.key)
        if at < end:
            row = tree.req_to_token_pool.req_to_token[req.req_pool_idx, :end]
            priority = getattr(req, "priority", 0) or 0
            value = row.to(dtype=torch.int64, copy=True)
            new = tree.insert(InsertParams(key, value, chunked=chunked, priority=priority))
            tree.attach(new.last_device_node, filling.reservation)
        req.cache_protected_len = end
        if filling.reservation.slab is None:
            del self._open[id(req)]

    def drop(self, req: Any) -> None:
        """A request leaves: what it has not cached of its slab is freed, here and not by SGLang."""
        filling = self._open.pop(id(req), None)
        if filling is not None:
            req.cache_protected_len = max(req.cache_protected_len, filling.filled)
            self._tree.directory.release(filling.reservation)

    def free_taken_over(self, remap: Callable[["HotMove"], None]) -> None:
        """Free the COLD slots whose place was taken, after `remap` has taken them from all rows."""
        moves, self._taken_over = self._taken_over, []
        for move in moves:
            remap(move)
            self._tree.token_to_kv_pool_allocator.core.free_cold(move.src)

    def clear(self) -> None:
        """Forget all, after the directory has."""
        self._open.clear()
        self._taken_over.clear()

    def _found_below(self, top: TreeNode, key: RadixKey) -> list[TreeNode]:
        """Nodes that cache `key` below `top`, from the top; none goes on beyond its end."""
        node = self._tree.match_prefix(MatchPrefixParams(key=key)).last_device_node
        found = []
        while node is not top:
            found.append(node)
            node = node.parent
        return found[::-1]

    def _discard(self, reservation: Reservation, count: int) -> None:
        directory = self._tree.directory
        directory.bind(UNBORN_NODE, reservation, count)
        directory.evict(UNBORN_NODE)


def _agree(left: Any, right: Any, count: int) -> bool:
    return bool(left[:count] == right[:count])
