"""Promotions in a running server: between two steps, KV is copied and every holder remapped.

Rows and prefix indices are rewritten on the schedule stream, which SGLang has ordered behind the
reads of the step that is running. KV is copied on the forward stream: behind that step, which still
reads the old slots, and ahead of the next, which reads the new ones and may write the old.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from granikv.sglang_plugin.radix_cache import GraniRadixCache, HotMove


def promote_ready(scheduler: Any, *_: Any, **__: Any) -> None:
    """Before `Scheduler.get_next_batch_to_run`: promote what prompts have shown to be shared.

    Args:
        scheduler: SGLang's, whose tree is a `GraniRadixCache` or not ours to touch.
    """
    tree = scheduler.tree_cache
    if not isinstance(tree, GraniRadixCache):
        return
    requests: list[Any] | None = None
    for node in tree.take_candidates():
        moves = tree.promote(node)
        if not moves:
            continue
        requests = list(live_requests(scheduler)) if requests is None else requests
        for move in moves:
            src, dst = (tree.token_to_kv_pool_allocator.to_device(x) for x in (move.src, move.dst))
            remap(tree, move, dst, requests)
            _copy_behind_the_running_step(scheduler, src, dst)


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
    for req in requests:
        if req.req_pool_idx is None or not tree.holds(req.last_node, move.node):
            continue
        tree.req_to_token_pool.write((req.req_pool_idx, slice(move.start, end)), dst)
        req.prefix_indices[move.start : end] = dst[: len(req.prefix_indices) - move.start]


def copy_kv(pool: Any, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy K and V of slots, in every layer; `src` and `dst` have no slot in common."""
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[dst] = buffer[src]


def _copy_behind_the_running_step(scheduler: Any, src: torch.Tensor, dst: torch.Tensor) -> None:
    stream = scheduler.forward_stream
    with scheduler.forward_stream_ctx:
        stream.wait_stream(scheduler.schedule_stream)
        copy_kv(scheduler.tree_cache.token_to_kv_pool_allocator.get_kvcache(), src, dst)
    if src.is_cuda:  # made on the schedule stream, whose allocator must not reuse them yet
        src.record_stream(stream)
        dst.record_stream(stream)
