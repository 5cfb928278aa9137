"""Placement of a declared prefix while it is prefilled: its tokens get HOT slots, without a copy.

As in the simulator (`granikv.sim.placement`), a prefix is placed when the request that declares it
is prefilled for the first time, if all that is cached of it is HOT. What cannot be placed, or is
not wanted, is prefilled into COLD and may be promoted later.
"""

import logging
from collections.abc import Callable
from typing import Any

from granikv.core.placement import reserve_declared
from granikv.sglang_plugin.in_place import UNBORN_NODE
from granikv.sglang_plugin.radix_cache import GraniRadixCache

# Of `custom_params` of a request's sampling parameters: its leading tokens that others share.
HINT = "granikv_prefix_tokens"

logger = logging.getLogger(__name__)


def alloc_for_extend(original: Callable[..., Any], batch: Any) -> Any:
    """Around `sglang.srt.mem_cache.allocation.alloc_for_extend`: HOT slots for wanted prefixes.

    The scheduler has budgeted COLD slots for all tokens of the batch; this only takes fewer.

    Args:
        original: SGLang's; evicts, allocates and writes rows for `batch.extend_num_tokens`.
        batch: a `ScheduleBatch` whose requests hold their matched paths.
    """
    tree = batch.tree_cache
    if not isinstance(tree, GraniRadixCache):
        return original(batch)
    parts = []
    for req, start, count in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
        _reserve(tree, req, start)
        hot = tree.prefills.take(req, count)
        parts.append((hot, count - len(hot)))
    tokens = batch.extend_num_tokens
    batch.extend_num_tokens = sum(cold_tokens for _, cold_tokens in parts)
    try:
        with tree.token_to_kv_pool_allocator.mixing(parts):
            return original(batch)
    finally:
        batch.extend_num_tokens = tokens


def shared_prefix_tokens(req: Any) -> int:
    """Leading tokens of its prompt that a request declares as shared, 0 for none."""
    params = req.sampling_params.custom_params
    hint = params.get(HINT, 0) if isinstance(params, dict) else 0
    if type(hint) is not int or hint < 0:
        logger.warning(
            "request %s: %s must be a number of tokens, got %r; its prefix is not placed while it"
            " is prefilled",
            req.rid,
            HINT,
            hint,
        )
        return 0
    return min(hint, len(req.origin_input_ids))


def _reserve(tree: GraniRadixCache, req: Any, start: int) -> None:
    """Reserve a slab for a request's declared prefix from `start` on, where that is wanted."""
    is_later_chunk = req.kv is not None
    if is_later_chunk or not tree.is_hot_path(req.last_node):
        return
    end = shared_prefix_tokens(req)
    if end <= start or tree.prefills.is_filled_by_another(req, start, end):
        return
    reservation = reserve_declared(tree.directory, tree, UNBORN_NODE, end - start, tree.now_s())
    if reservation is not None:
        tree.prefills.begin(req, start, reservation)
