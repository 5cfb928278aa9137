"""The memory-bound tiles on a card, in Gluon: private tokens, paged segments and cascade tiles.

A block is one warp with 16 packed rows and a ring of stages that asynchronous copies fill from the
slots of the pool. Slots are read one block of tokens before their copies start. Several such blocks
on an SM load three times what an even share of the memory bandwidth is, so that a few SMs can keep
the memory busy while the others compute the dense tiles.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from granikv.kernels.planner import ITEM_WIDTH
from granikv.kernels.tiles import LN_2

_ROWS = gl.constexpr(16)  # of one matrix instruction
_MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))


@gluon.constexpr_function
def _load_layout(padded_dim):
    """16 bytes a thread, whole rows of a head."""
    threads = padded_dim // 8
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [1, 1], [1, 0])


@gluon.jit
def _slots(table, base, at, tokens):
    """Slots of a block's tokens: of the row's table, or consecutive from `base` if that is >= 0."""
    indirect = base < 0
    slot = gl.load(table + at, (at < tokens) & indirect, other=0)
    return gl.where(indirect, slot, base + at)


@gluon.jit
def _copy(
    k, v, slot, inside, k_smem, v_smem, k_row, v_row, offs_d, D: gl.constexpr, DP: gl.constexpr,
    SAME_ROW: gl.constexpr,
):  # fmt: skip
    """Start the copies of one block of tokens; what is not inside is filled with zeros."""
    # Both pools of an engine have one row stride; then one product serves both.
    k_at = slot.to(gl.int64) * k_row
    v_at = k_at if SAME_ROW else slot.to(gl.int64) * v_row
    seen = inside[:, None]
    if D != DP:
        seen = seen & (offs_d < D)[None, :]
    async_copy.async_copy_global_to_shared(k_smem, k + k_at[:, None] + offs_d[None, :], mask=seen)
    async_copy.async_copy_global_to_shared(v_smem, v + v_at[:, None] + offs_d[None, :], mask=seen)


@gluon.jit
def _attend(
    q, k, v, table, base, tokens, row, q_head, live, k_smem, v_smem, scale_log2, q_row, k_row,
    v_row, D: gl.constexpr, DP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    SAME_ROW: gl.constexpr,
):  # fmt: skip
    """16 packed rows over `tokens` slots of one kv head; normalised O `[16, DP]` and base-e LSE.

    `row`, `q_head`, `live`: `[16]` in the load layout's row slice; `k`, `v` point to the kv head.
    """
    Q_OPERAND: gl.constexpr = gl.DotOperandLayout(0, _MMA, 2)
    KV_OPERAND: gl.constexpr = gl.DotOperandLayout(1, _MMA, 2)
    LOAD: gl.constexpr = _load_layout(DP)
    dtype: gl.constexpr = k_smem.dtype

    offs_d = gl.arange(0, DP, gl.SliceLayout(0, LOAD))
    n = gl.arange(0, BN, gl.SliceLayout(1, LOAD))
    column = gl.arange(0, BN, gl.SliceLayout(0, _MMA))
    for i in gl.static_range(STAGES - 1):
        at = i * BN + n
        _copy(
            k, v, _slots(table, base, at, tokens), at < tokens, k_smem.index(i), v_smem.index(i),
            k_row, v_row, offs_d, D, DP, SAME_ROW,
        )  # fmt: skip
        async_copy.commit_group()
    ahead = (STAGES - 1) * BN + n
    slot = _slots(table, base, ahead, tokens)

    q_at = row.to(gl.int64) * q_row + q_head * D
    seen = live[:, None] & (offs_d < D)[None, :]
    queries = gl.load(q + q_at[:, None] + offs_d[None, :], seen, other=0.0)
    queries = gl.convert_layout(queries, Q_OPERAND)
    peak = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, _MMA))
    total = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, _MMA))
    acc = gl.zeros([_ROWS, DP], gl.float32, _MMA)
    for i in range((tokens + BN - 1) // BN):
        async_copy.wait_group(STAGES - 2)
        gl.thread_barrier()
        free = (i + STAGES - 1) % STAGES
        _copy(
            k, v, slot, ahead < tokens, k_smem.index(free), v_smem.index(free), k_row, v_row,
            offs_d, D, DP, SAME_ROW,
        )  # fmt: skip
        async_copy.commit_group()
        ahead += BN
        slot = _slots(table, base, ahead, tokens)

        stage = i % STAGES
        keys = k_smem.index(stage).permute((1, 0)).load(KV_OPERAND)
        scores = mma_v2(queries, keys, gl.zeros([_ROWS, BN], gl.float32, _MMA))
        scores = gl.where((i * BN + column < tokens)[None, :], scores * scale_log2, float("-inf"))
        higher = gl.maximum(peak, gl.max(scores, 1))
        shrink = gl.exp2(peak - higher)
        weights = gl.exp2(scores - higher[:, None])
        total = total * shrink + gl.sum(weights, 1)
        peak = higher
        values = v_smem.index(stage).load(KV_OPERAND)
        weights = gl.convert_layout(weights.to(dtype), Q_OPERAND)
        acc = mma_v2(weights, values, acc * shrink[:, None])
    async_copy.wait_group(0)
    gl.thread_barrier()

    some = total > 0
    sure = gl.where(some, total, 1.0)
    lse = gl.where(some, (peak + gl.log2(sure)) * LN_2, float("-inf"))
    return acc / sure[:, None], lse


@gluon.jit
def _private_tile(
    q, k, v, out, lse, part_out, part_lse, items, private_slots, work, k_smem, v_smem, scale_log2,
    q_row, k_row, v_row, out_row, lse_row, lse_head, width,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, SAME_ROW: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """One row over a chunk of its own slots or of a paged segment, one kv head."""
    GROUP: gl.constexpr = HQ // HKV
    LOAD: gl.constexpr = _load_layout(DP)
    item = items + work // HKV * ITEM_WIDTH
    head = work % HKV
    row = gl.load(item)
    base = gl.load(item + 1)
    skip = gl.load(item + 2)
    tokens = gl.load(item + 3)
    part = gl.load(item + 4)
    direct = gl.load(item + 5)
    m = gl.arange(0, _ROWS, gl.SliceLayout(1, LOAD))
    o, o_lse = _attend(
        q, k + head * D, v + head * D, private_slots + row.to(gl.int64) * width + skip, base,
        tokens, row + m * 0, head * GROUP + m, m < GROUP, k_smem, v_smem, scale_log2, q_row, k_row,
        v_row, D, DP, BN, STAGES, SAME_ROW,
    )  # fmt: skip
    m = gl.arange(0, _ROWS, gl.SliceLayout(1, _MMA))
    d = gl.arange(0, DP, gl.SliceLayout(0, _MMA))
    live = m < GROUP
    seen = live[:, None] & (d < D)[None, :]
    q_head = head * GROUP + m
    if direct != 0:
        at = row.to(gl.int64) * out_row + q_head * D
        gl.store(out + at[:, None] + d[None, :], o.to(out.dtype.element_ty), seen)
        if LSE:
            gl.store(lse + row.to(gl.int64) * lse_row + q_head * lse_head, o_lse, live)
    else:
        at = part.to(gl.int64) * HQ + q_head
        gl.store(part_out + at[:, None] * D + d[None, :], o, seen)
        gl.store(part_lse + at, o_lse, live)


@gluon.jit
def _cascade_tile(
    q, k, v, part_out, part_lse, items, members, entry_part, work, k_smem, v_smem, scale_log2,
    q_row, k_row, v_row,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, SAME_ROW: gl.constexpr,
):  # fmt: skip
    """Up to 16 packed rows of one group over a chunk of their segment, one kv head."""
    GROUP: gl.constexpr = HQ // HKV
    LOAD: gl.constexpr = _load_layout(DP)
    item = items + work // HKV * ITEM_WIDTH
    head = work % HKV
    first = gl.load(item)
    count = gl.load(item + 1)
    base = gl.load(item + 2)
    tokens = gl.load(item + 3)
    cut = gl.load(item + 5)
    m = gl.arange(0, _ROWS, gl.SliceLayout(1, LOAD))
    live = m // GROUP < count
    row = gl.load(members + first + m // GROUP, live, other=0) // 4
    o, o_lse = _attend(
        q, k + head * D, v + head * D, members, base, tokens, row, head * GROUP + m % GROUP, live,
        k_smem, v_smem, scale_log2, q_row, k_row, v_row, D, DP, BN, STAGES, SAME_ROW,
    )  # fmt: skip
    m = gl.arange(0, _ROWS, gl.SliceLayout(1, _MMA))
    d = gl.arange(0, DP, gl.SliceLayout(0, _MMA))
    live = m // GROUP < count
    entry = gl.load(members + first + m // GROUP, live, other=0)
    part = gl.load(entry_part + entry, live, other=0) + cut
    at = part.to(gl.int64) * HQ + head * GROUP + m % GROUP
    gl.store(part_out + at[:, None] * D + d[None, :], o, live[:, None] & (d < D)[None, :])
    gl.store(part_lse + at, o_lse, live)


@gluon.jit
def stream_pass_kernel(
    q, k, v, out, lse, part_out, part_lse, private_items, cascade_items, counts, members,
    entry_part, queue, private_slots, scale_log2, q_row, k_row, v_row, out_row, lse_row, lse_head,
    width,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, SAME_ROW: gl.constexpr, LSE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """All memory-bound tiles; the same work, order and results as `launches.private_pass`."""
    if PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = k.dtype.element_ty
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BN, DP], SHARED)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BN, DP], SHARED)
    n_cascade = gl.load(counts + 1) * HKV
    todo = n_cascade + gl.load(counts + 2) * HKV
    work = gl.atomic_add(queue, 1, sem="relaxed")
    while work < todo:
        # Asked for before the tile, so that the answer is there when it ends.
        following = gl.atomic_add(queue, 1, sem="relaxed")
        if work < n_cascade:
            _cascade_tile(
                q, k, v, part_out, part_lse, cascade_items, members, entry_part, work, k_smem,
                v_smem, scale_log2, q_row, k_row, v_row, HQ, HKV, D, DP, BN, STAGES, SAME_ROW,
            )  # fmt: skip
        else:
            _private_tile(
                q, k, v, out, lse, part_out, part_lse, private_items, private_slots,
                work - n_cascade, k_smem, v_smem, scale_log2, q_row, k_row, v_row, out_row,
                lse_row, lse_head, width, HQ, HKV, D, DP, BN, STAGES, SAME_ROW, LSE,
            )  # fmt: skip
        work = following
    if gl.atomic_add(queue + 3, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        gl.store(queue, 0)  # the last block sets the counters back for the next layer
        gl.store(queue + 3, 0)
    if PDL and gl.program_id(0) == 0:
        gdc_wait()


def stream_pass(
    arguments: tuple[Any, ...], blocks: int, pdl: bool, registers: int, **sizes: Any
) -> None:
    """Launch with the arguments of `stream_pass_kernel`, by position and by `sizes`' names."""
    stream_pass_kernel[(blocks,)](
        *arguments, **sizes, PDL=pdl, num_warps=1, maxnreg=registers, launch_pdl=pdl
    )
