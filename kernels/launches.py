"""Kernels of a decode step: one launch for all of it, or prefix, private and merge passes.

All are persistent: the grid is fixed, the work comes from device memory (`planner.plan_step`), and
blocks of unlike cost take their work from a counter.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from granikv.kernels.tiles import (
    merge_parts,
    merge_row,
    prefix_tile,
    private_tile,
    store_part,
    store_result,
)


@triton.jit
def _prefix_work(
    q, k, v, part_out, part_lse, items, members, entry_part, slots, width, work, scale_log2, q_row,
    k_row, v_row,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, COLD: tl.constexpr,
):  # fmt: skip
    o, o_lse, _, q_head, part, live = prefix_tile(
        q, k, v, items, members, entry_part, slots, width, work // HKV, work % HKV, scale_log2,
        q_row, k_row, v_row, HQ // HKV, D, DP, BM, BN, COLD,
    )  # fmt: skip
    store_part(part_out, part_lse, o, o_lse, part, q_head, live, HQ, D, DP)


@triton.jit
def prefix_pass(
    q, k, v, part_out, part_lse, items, counts, members, entry_part, scale_log2, q_row, k_row,
    v_row,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All dense tiles, on as many blocks as the plan says; writes parts."""
    if EARLY:
        gdc_wait()
    if PDL:
        gdc_launch_dependents()
    blocks = tl.load(counts + 3)
    todo = tl.where(tl.program_id(0) < blocks, tl.load(counts) * HKV, 0)
    for work in range(tl.program_id(0), todo, blocks):
        _prefix_work(
            q, k, v, part_out, part_lse, items, members, entry_part, items, 0, work, scale_log2,
            q_row, k_row, v_row, HQ, HKV, D, DP, BM, BN, False,
        )  # fmt: skip


@triton.jit
def _private_work(
    q, k, v, out, lse, part_out, part_lse, items, private_slots, work, scale_log2, q_row, k_row,
    v_row, out_row, lse_row, lse_head, width,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr,
    BN: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    o, o_lse, row, q_head, part, live, direct = private_tile(
        q, k, v, items, private_slots, work // HKV, work % HKV, scale_log2, q_row, k_row, v_row,
        width, HQ // HKV, GP, D, DP, BN,
    )  # fmt: skip
    if direct:
        store_result(out, lse, o, o_lse, row, q_head, live, out_row, lse_row, lse_head, D, DP, LSE)
    else:
        store_part(part_out, part_lse, o, o_lse, part, q_head, live, HQ, D, DP)


@triton.jit
def private_pass(
    q, k, v, out, lse, part_out, part_lse, private_items, cascade_items, counts, members,
    entry_part, queue, private_slots, scale_log2, q_row, k_row, v_row, out_row, lse_row, lse_head,
    width,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr,
    CASCADE_BM: tl.constexpr, BN: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """All memory-bound tiles: cascade tiles, the longer ones, then private tiles.

    Writes results of rows that have one part, and parts of all others. `queue` is set back by the
    merge.
    """
    n_cascade = tl.load(counts + 1) * HKV
    todo = n_cascade + tl.load(counts + 2) * HKV
    work = tl.atomic_add(queue, 1, sem="relaxed")
    while work < todo:
        if work < n_cascade:
            _prefix_work(
                q, k, v, part_out, part_lse, cascade_items, members, entry_part, private_slots,
                width, work, scale_log2, q_row, k_row, v_row, HQ, HKV, D, DP, CASCADE_BM, BN, True,
            )  # fmt: skip
        else:
            _private_work(
                q, k, v, out, lse, part_out, part_lse, private_items, private_slots,
                work - n_cascade, scale_log2, q_row, k_row, v_row, out_row, lse_row, lse_head,
                width, HQ, HKV, D, DP, GP, BN, LSE,
            )  # fmt: skip
        work = tl.atomic_add(queue, 1, sem="relaxed")


@triton.jit
def merge_pass(
    out, lse, part_out, part_lse, row_part, row_parts, queue, out_row, lse_row, lse_head,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr,
    LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Results of all rows with several parts; grid `(rows, num_kv_heads)`.

    Sets back the counter of the memory-bound pass for the next layer.
    """
    if PDL:
        gdc_wait()
    row, head = tl.program_id(0), tl.program_id(1)
    if row + head == 0:
        tl.store(queue, 0)
    first = tl.load(row_part + row)
    count = tl.load(row_parts + row)
    if count > 0:
        g = tl.arange(0, GP)
        live = g < HQ // HKV
        q_head = head * (HQ // HKV) + g
        o, o_lse = merge_row(part_out, part_lse, first, count, q_head, live, HQ, GP, D, DP)
        store_result(out, lse, o, o_lse, row, q_head, live, out_row, lse_row, lse_head, D, DP, LSE)


@triton.jit
def _publish(
    out, lse, part_out, part_lse, arrivals, row_part, row_parts, o, o_lse, row, q_head, part, live,
    out_row, lse_row, lse_head,
    HQ: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Write a tile's parts; whoever brings the last part of a (row, query head) merges them all."""
    store_part(part_out, part_lse, o, o_lse, part, q_head, live, HQ, D, DP)
    tl.debug_barrier()
    count = tl.load(row_parts + row + tl.zeros([M], tl.int32), live, other=0)
    counter = arrivals + row * HQ + q_head
    arrived = tl.atomic_add(counter, 1, mask=live, sem="acq_rel")
    last = live & (arrived == count - 1)
    if tl.max(last.to(tl.int32), 0) > 0:
        tl.debug_barrier()
        first = tl.load(row_part + row + tl.zeros([M], tl.int32), last, other=0)
        o, o_lse = merge_parts(part_out, part_lse, first, count, q_head, last, HQ, M, D, DP)
        store_result(out, lse, o, o_lse, row, q_head, last, out_row, lse_row, lse_head, D, DP, LSE)
        tl.store(counter, 0, last)  # ready for the next layer


@triton.jit
def _fused_prefix(
    q, k, v, out, lse, part_out, part_lse, items, members, entry_part, slots, width, row_part,
    row_parts, arrivals, work, scale_log2, q_row, k_row, v_row, out_row, lse_row, lse_head,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, LSE: tl.constexpr, COLD: tl.constexpr,
):  # fmt: skip
    o, o_lse, row, q_head, part, live = prefix_tile(
        q, k, v, items, members, entry_part, slots, width, work // HKV, work % HKV, scale_log2,
        q_row, k_row, v_row, HQ // HKV, D, DP, BM, BN, COLD,
    )  # fmt: skip
    _publish(
        out, lse, part_out, part_lse, arrivals, row_part, row_parts, o, o_lse, row, q_head, part,
        live, out_row, lse_row, lse_head, HQ, BM, D, DP, LSE,
    )  # fmt: skip


@triton.jit
def _fused_private(
    q, k, v, out, lse, part_out, part_lse, items, private_slots, row_part, row_parts, arrivals,
    work, scale_log2, q_row, k_row, v_row, out_row, lse_row, lse_head, width,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr,
    BN: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    o, o_lse, row, q_head, part, live, direct = private_tile(
        q, k, v, items, private_slots, work // HKV, work % HKV, scale_log2, q_row, k_row, v_row,
        width, HQ // HKV, GP, D, DP, BN,
    )  # fmt: skip
    if direct:
        store_result(out, lse, o, o_lse, row, q_head, live, out_row, lse_row, lse_head, D, DP, LSE)
    else:
        _publish(
            out, lse, part_out, part_lse, arrivals, row_part, row_parts, o, o_lse, row, q_head,
            part, live, out_row, lse_row, lse_head, HQ, GP, D, DP, LSE,
        )  # fmt: skip


@triton.jit
def fused_step(
    q, k, v, out, lse, part_out, part_lse, counts, dense_items, cascade_items, private_items,
    members, entry_part, row_part, row_parts, arrivals, queues, private_slots, scale_log2, q_row,
    k_row, v_row, out_row, lse_row, lse_head, width,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr,
    DENSE_BM: tl.constexpr, DENSE_BN: tl.constexpr, CASCADE_BM: tl.constexpr,
    CASCADE_BN: tl.constexpr, PRIVATE_BN: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """A whole layer in one launch.

    Every other block starts with private tiles, so that an SM with two blocks computes and loads at
    the same time; a block whose list is empty helps with the other. `queues [3]`: next prefix tile,
    next private tile, blocks that are done.
    """
    n_dense = tl.load(counts) * HKV
    n_prefix = n_dense + tl.load(counts + 1) * HKV
    n_private = tl.load(counts + 2) * HKV
    blocks = tl.num_programs(0)
    on_private = (tl.program_id(0) >= blocks // 2).to(tl.int32)
    lists = 2
    while lists > 0:
        work = tl.atomic_add(queues + on_private, 1, sem="relaxed")
        if work >= tl.where(on_private == 1, n_private, n_prefix):
            on_private = 1 - on_private
            lists -= 1
        elif on_private == 1:
            _fused_private(
                q, k, v, out, lse, part_out, part_lse, private_items, private_slots, row_part,
                row_parts, arrivals, work, scale_log2, q_row, k_row, v_row, out_row, lse_row,
                lse_head, width, HQ, HKV, D, DP, GP, PRIVATE_BN, LSE,
            )  # fmt: skip
        elif work < n_dense:
            _fused_prefix(
                q, k, v, out, lse, part_out, part_lse, dense_items, members, entry_part,
                private_slots, width, row_part, row_parts, arrivals, work, scale_log2, q_row, k_row,
                v_row, out_row, lse_row, lse_head, HQ, HKV, D, DP, DENSE_BM, DENSE_BN, LSE, False,
            )  # fmt: skip
        else:
            _fused_prefix(
                q, k, v, out, lse, part_out, part_lse, cascade_items, members, entry_part,
                private_slots, width, row_part, row_parts, arrivals, work - n_dense, scale_log2,
                q_row, k_row, v_row, out_row, lse_row, lse_head, HQ, HKV, D, DP, CASCADE_BM,
                CASCADE_BN, LSE, True,
            )  # fmt: skip
    if tl.atomic_add(queues + 2, 1, sem="acq_rel") == blocks - 1:
        tl.store(queues, 0)
        tl.store(queues + 1, 0)
        tl.store(queues + 2, 0)
