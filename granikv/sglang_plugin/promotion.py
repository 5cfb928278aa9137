"""Moves in a running server: between two steps, KV is copied and every holder remapped.

Our kernels read rows while a step runs, not only before it as SGLang's do. So rows are rewritten
behind the step that is running: it must not read slots that KV has not been copied to. KV is copied
on the stream of the steps, which is the scheduler's own where steps do not overlap: behind that
step, and ahead of the next, which reads the new slots and may write the old.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch

from granikv.sglang_plugin.radix_cache import GraniRadixCache
from granikv.sglang_plugin.tree_nodes import HotMove


def promote_ready(scheduler: Any, *_: Any, **__: Any) -> None:
    """Before `Scheduler.get_next_batch_to_run`: promote what prompts have shown to be shared.

    Remaps as well what a prefill in place has taken over since.

    Args:
        scheduler: SGLang's, whose tree is a `GraniRadixCache` or not ours to touch.
    """
    tree = scheduler.tree_cache
    if not isinstance(tree, GraniRadixCache):
        return
    to_device = tree.token_to_kv_pool_allocator.to_device
    live = cache(lambda: list(live_requests(scheduler)))  # most steps move nothing
    tree.prefills.free_taken_over(lambda move: remap(tree, move, to_device(move.dst), live()))
    for node in tree.take_candidates():
        for move in tree.promote(node):
            _carry_out(scheduler, move, live())


def promote_read(scheduler: Any) -> None:
    """Promote what rows read in common in COLD, as far as free HOT has room for it.

    Otherwise a prefix waits for its next request, which may itself wait for want of COLD.

    Args:
        scheduler: SGLang's, whose tree is a `GraniRadixCache`.
    """
    tree: GraniRadixCache = scheduler.tree_cache
    live = cache(lambda: list(live_requests(scheduler)))
    ends = {req.last_node.id: req.last_node for req in with_rows(scheduler.running_batch.reqs)}
    for node in ends.values():
        for move in tree.promote(node, is_asked_for=False):
            _carry_out(scheduler, move, live())


def _carry_out(scheduler: Any, move: HotMove, requests: Iterable[Any]) -> None:
    """Remap a node's holders, and copy its KV."""
    tree: GraniRadixCache = scheduler.tree_cache
    to_device = tree.token_to_kv_pool_allocator.to_device
    wait_for_the_running_step(scheduler)
    src, dst = to_device(move.src), to_device(move.dst)
    remap(tree, move, dst, requests)
    copy_behind_the_running_step(scheduler, src, dst)


def with_rows(requests: Iterable[Any]) -> list[Any]:
    """Those that have a row: one that has ended is in the batch for one step more, and has none."""
    return [req for req in requests if req.req_pool_idx is not None]


def live_requests(scheduler: Any) -> Iterator[Any]:
    """Everybody who holds a path of the tree and a row: running, just prefilled, or in chunks."""
    seen = set()
    for batch in (scheduler.running_batch, scheduler.last_batch):
        for req in batch.reqs if batch is not None else ():
            if id(req) not in seen:
                seen.add(id(req))
                yield req
    chunked = scheduler.chunked_req
    if chunked is not None and id(chunked) not in seen:
        yield chunked


def remap(tree: GraniRadixCache, move: HotMove, dst: torch.Tensor, requests: Iterable[Any]) -> None:
    """Let every request whose path goes through the node hold the new slots.

    Queued requests hold nothing: they are matched again when they are scheduled.
    """
    end = move.start + len(dst)
    for req in with_rows(requests):
        if not tree.holds(req.last_node, move.node):
            continue
        tree.req_to_token_pool.write((req.req_pool_idx, slice(move.start, end)), dst)
        req.prefix_indices[move.start : end] = dst[: len(req.prefix_indices) - move.start]


def wait_for_the_running_step(scheduler: Any) -> None:
    """Let what is done to rows from here on be done behind the step that reads them."""
    if scheduler.enable_overlap:
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)


def copy_kv(pool: Any, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy K and V of slots, in every layer; `src` and `dst` have no slot in common."""
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[dst] = buffer[src]


def bytes_per_slot(pool: Any) -> int:
    """KV of one token on this rank, in all layers."""
    return sum(buffer[0].nbytes for buffer in (*pool.k_buffer, *pool.v_buffer))


def copy_behind_the_running_step(scheduler: Any, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy KV of slots behind what runs and ahead of what comes; as `copy_kv`."""
    pool, stream = scheduler.token_to_kv_pool_allocator.get_kvcache(), scheduler.forward_stream
    if not scheduler.enable_overlap:
        copy_kv(pool, src, dst)
        return
    with scheduler.forward_stream_ctx:
        stream.wait_stream(scheduler.schedule_stream)
        copy_kv(pool, src, dst)
    if src.is_cuda:  # made on the schedule stream, whose allocator must not reuse them yet
        src.record_stream(stream)
        dst.record_stream(stream)
