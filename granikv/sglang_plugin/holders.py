"""ServerHolders: whoever holds slots of a live server, for `granikv.core.boundary`."""

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from granikv.core.allocator import Slab, Slots
from granikv.sglang_plugin.promotion import (
    copy_behind_the_running_step,
    live_requests,
    remap,
    wait_for_the_running_step,
    with_rows,
)
from granikv.sglang_plugin.radix_cache import GraniRadixCache


class ServerHolders:
    """The radix tree and the rows of a scheduler, between two steps.

    Slots of COLD are held by nodes, by rows, and by what a prompt in chunks has cached so far;
    queued requests hold none: they are matched again when they are scheduled.

    Args:
        scheduler: SGLang's, whose tree is a `GraniRadixCache`.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._tree: GraniRadixCache = scheduler.tree_cache
        self._allocator = self._tree.token_to_kv_pool_allocator

    @property
    def evictable_tokens(self) -> int:
        """Cached COLD tokens that no request holds."""
        return int(self._tree.evictable_size())

    def ensure_cold(self, tokens: int) -> bool:
        """Evict cached COLD tokens until so many slots are free; False when they cannot be."""
        core = self._allocator.core
        if tokens > core.cold_free:
            self._tree.evict(EvictParams(num_tokens=tokens - core.cold_free))
        return bool(tokens <= core.cold_free)

    def is_hot_cached(self, node_id: int) -> bool:
        """Whether the node is HOT and still in the tree."""
        return self._tree.is_hot_cached(node_id)

    def evict_hot(self, node_id: int) -> None:
        """Drop an unlocked HOT node with everything cached below it."""
        self._tree.evict_hot(node_id)

    def move_cold(self, src: Slots, dst: Slots) -> None:
        """Copy KV from `src` to `dst`; whoever holds a slot of `src` holds `dst` now."""
        core, move = self._allocator.core, self._allocator.core.move
        wait_for_the_running_step(self._scheduler)
        old, new = self._allocator.to_device(src), self._allocator.to_device(dst)
        moved = torch.arange(core.size_tokens + 1, device=old.device)
        moved[old] = new
        self._tree.remap_cold(moved, move.old_hot_tokens + 1, move.new_hot_tokens + 1)
        self._remap_rows(moved)
        copy_behind_the_running_step(self._scheduler, old, new)

    def copy_slab(self, src: Slots, dst: Slots) -> None:
        """Copy KV of a part of a slab; its readers stay on `src` for now."""
        to_device = self._allocator.to_device
        copy_behind_the_running_step(self._scheduler, to_device(src), to_device(dst))

    def move_slab(self, node_id: int, old: Slab, new: Slab) -> None:
        """The node's KV has been copied from `old` to `new`; all its readers read it there now."""
        wait_for_the_running_step(self._scheduler)
        move = self._tree.move_slab(node_id, old, new)
        to = self._allocator.to_device(move.dst)
        remap(self._tree, move, to, live_requests(self._scheduler))

    def _remap_rows(self, moved: torch.Tensor) -> None:
        """Every slot of every live row; what is behind a row's end is nobody's."""
        table = self._tree.req_to_token_pool.req_to_token
        reqs = with_rows(live_requests(self._scheduler))
        if not reqs:
            return
        rows = torch.tensor([req.req_pool_idx for req in reqs], device=table.device)
        # A step that has not been processed has one more token in the row than the request knows.
        end = max(len(req.origin_input_ids) + len(req.output_ids) for req in reqs) + 2
        slots = table[rows, :end].long()
        table[rows, :end] = moved[slots].to(table.dtype)
        chunked = self._scheduler.chunked_req
        if chunked is not None:
            chunked.prefix_indices = moved[chunked.prefix_indices]
