"""The dense prefix pass on sm_90: warp-specialised, fed by TMA, in Gluon (part of Triton).

A block has a producer warp and two consumer groups of four warps, each with 64 packed rows of a
128-row tile; both read the same stages of K and V. A consumer issues the scores of the next block
of keys, then the product of the last block's weights with V, and computes the softmax of the former
while the latter runs (the intra-warpgroup overlap of FlashAttention-3, arXiv 2407.08608). A block
takes all registers of an SM, or so few that warps of the memory-bound pass run beside it.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from granikv.kernels.planner import ITEM_WIDTH
from granikv.kernels.tiles import LN_2

ROWS = 128  # packed rows of a tile
_HALF = gl.constexpr(64)  # packed rows of one consumer
_PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _pin(x):
    """`x` itself, computed here: an instruction that never runs, and that ptxas may not move.

    Without it ptxas hoists the wait for the second product above the softmax that it should hide.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred nan; setp.nan.f32 nan, $1, $1; @nan nanosleep.u32 1; mov.b32 $0, $1; }",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _produce(
    k_desc, v_desc, items, counts, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    HKV: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the blocks of every work item, the masked last one first."""
    blocks_at_work = gl.load(counts + 3)
    todo = gl.where(gl.program_id(0) < blocks_at_work, gl.load(counts) * HKV, 0)
    step = 0
    for work in range(gl.program_id(0), todo, blocks_at_work):
        item = items + work // HKV * ITEM_WIDTH
        column = work % HKV * D
        slot = gl.load(item + 2)
        tokens = gl.load(item + 3)
        for block in range((tokens + BN - 1) // BN):
            # The last block ends with the chunk and starts where it must, so that nothing behind
            # the chunk is read: a stale NaN in V would survive a weight of zero.
            at = gl.where(block == 0, slot + tokens - BN, slot + (block - 1) * BN)
            stage = step % STAGES
            phase = (step // STAGES & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                k_desc, [at, column], k_full.index(stage), k_smem.index(stage)
            )
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                v_desc, [at, column], v_full.index(stage), v_smem.index(stage)
            )
            step += 1


@gluon.jit
def _consume(
    half: gl.constexpr, q, part_out, part_lse, items, counts, members, entry_part, scale_log2,
    q_row, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attention of 64 packed rows of every work item; writes their parts."""
    GROUP: gl.constexpr = HQ // HKV
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    THREADS: gl.constexpr = D // 8
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // THREADS, THREADS], [4, 1], [1, 0])
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    dtype: gl.constexpr = k_smem.dtype

    blocks_at_work = gl.load(counts + 3)
    todo = gl.where(gl.program_id(0) < blocks_at_work, gl.load(counts) * HKV, 0)
    step = 0
    for work in range(gl.program_id(0), todo, blocks_at_work):
        item = items + work // HKV * ITEM_WIDTH
        head = work % HKV
        first = gl.load(item)
        count = gl.load(item + 1)
        tokens = gl.load(item + 3)
        cut = gl.load(item + 5)
        blocks = (tokens + BN - 1) // BN

        m = half * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, Q_LAYOUT))
        live = m // GROUP < count
        entry = gl.load(members + first + m // GROUP, live, other=0)
        q_at = (entry // 4).to(gl.int64) * q_row + (head * GROUP + m % GROUP) * D
        d = gl.arange(0, D, gl.SliceLayout(0, Q_LAYOUT))
        queries = gl.load(q + q_at[:, None] + d[None, :], live[:, None], other=0.0)
        q_smem.store(queries)
        fence_async_shared()

        stage = step % STAGES
        phase = step // STAGES & 1
        zeros = gl.zeros([_HALF, BN], gl.float32, S_LAYOUT)
        mbarrier.wait(k_full.index(stage), phase)
        scores = warpgroup_mma(
            q_smem, k_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(stage))
        # Of the first block, which ends with the chunk, others have the leading tokens.
        new = gl.arange(0, BN, gl.SliceLayout(0, S_LAYOUT)) >= blocks * BN - tokens
        scores = gl.where(new[None, :], scores, float("-inf"))
        peak = gl.max(scores, 1) * scale_log2
        weights = gl.exp2(scores * scale_log2 - peak[:, None])
        total = gl.sum(weights, 1)
        p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
        acc = gl.zeros([_HALF, D], gl.float32, O_LAYOUT)

        for _ in range(1, blocks):
            v_stage = stage
            v_phase = phase
            step += 1
            stage = step % STAGES
            phase = step // STAGES & 1
            mbarrier.wait(k_full.index(stage), phase)
            scores = warpgroup_mma(
                q_smem, k_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            mbarrier.wait(v_full.index(v_stage), v_phase)
            acc = warpgroup_mma(p, v_smem.index(v_stage), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(k_empty.index(stage))
            higher = gl.maximum(peak, gl.max(scores, 1) * scale_log2)
            shrink = gl.exp2(peak - higher)
            weights = gl.exp2(scores * scale_log2 - higher[:, None])
            total = total * shrink + gl.sum(weights, 1)
            peak = higher
            total = _pin(total)
            p_next = gl.convert_layout(weights.to(dtype), P_LAYOUT)
            # The wait takes the weights, or the compiler would move the softmax behind it.
            acc, p = warpgroup_mma_wait(0, deps=[acc, p_next])
            mbarrier.arrive(v_empty.index(v_stage))
            acc = acc * gl.convert_layout(shrink, O_ROW)[:, None]

        mbarrier.wait(v_full.index(stage), phase)
        acc = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(stage))
        step += 1

        row = half * _HALF + gl.arange(0, _HALF, O_ROW)
        live_o = row // GROUP < count
        entry_o = gl.load(members + first + row // GROUP, live_o, other=0)
        part = gl.load(entry_part + entry_o, live_o, other=0) + cut
        at = part.to(gl.int64) * HQ + head * GROUP + row % GROUP
        d_o = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
        scale = gl.convert_layout(1.0 / total, O_ROW)
        gl.store(part_out + at[:, None] * D + d_o[None, :], acc * scale[:, None], live_o[:, None])
        lse = gl.convert_layout((peak + gl.log2(total)) * LN_2, O_ROW)
        gl.store(part_lse + at, lse, live_o)


@gluon.jit
def prefix_pass_kernel(
    q, k_desc, v_desc, part_out, part_lse, items, counts, members, entry_part, scale_log2, q_row,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """All dense tiles of a step; see the module's text."""
    if EARLY:
        gdc_wait()
    if PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = k_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_HALF, D], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [2, _HALF, D], q_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BN, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BN, D], v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    gl.constexpr(0), q, part_out, part_lse, items, counts, members, entry_part,
                    scale_log2, q_row, q_smem.index(0), k_smem, v_smem, k_full, k_empty, v_full,
                    v_empty, HQ, HKV, D, BN, STAGES,
                ),
            ),
            (
                _consume,
                (
                    gl.constexpr(1), q, part_out, part_lse, items, counts, members, entry_part,
                    scale_log2, q_row, q_smem.index(1), k_smem, v_smem, k_full, k_empty, v_full,
                    v_empty, HQ, HKV, D, BN, STAGES,
                ),
            ),
            (
                _produce,
                (
                    k_desc, v_desc, items, counts, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                    HKV, D, BN, STAGES,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip


def pool_descriptor(pool: Any, block: int) -> Any:
    """TMA view of a pool `[slots, num_kv_heads, head_dim]` in boxes of `block` tokens, one head."""
    slots, heads, dim = pool.shape
    dtype = gl.bfloat16 if "bfloat16" in str(pool.dtype) else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([block, dim], dtype)
    flat = pool.as_strided((slots, heads * dim), (pool.stride(0), 1))
    return TensorDescriptor(flat, [slots, heads * dim], [pool.stride(0), 1], [block, dim], layout)


class Shape(NamedTuple):
    """Keys of a stage, stages of K and of V, and registers of a thread.

    The first consumer gets what the launch's registers leave it; the second has
    `consumer_registers`.
    """

    tokens: int
    stages: int
    consumer_registers: int
    launch_registers: int


# All registers of an SM: below 216 a consumer spills, and at 200 the pass was a quarter slower.
WHOLE_SM = Shape(128, 2, 232, 168)
# The same for the accumulators of 256 elements.
WHOLE_SM_256 = Shape(64, 2, 232, 168)
# Leaves each quarter of an SM the registers of one warp of the memory-bound pass. With 64 keys a
# stage a consumer needs 168; with fewer, ptxas spills or waits after every matrix instruction.
BESIDE_STREAM = Shape(64, 3, 168, 120)


def shape_for(head_dim: int, beside: bool) -> Shape:
    """The shape of a block alone on its SM, or beside blocks of the memory-bound pass."""
    if head_dim == 256:
        return WHOLE_SM_256
    return BESIDE_STREAM if beside else WHOLE_SM


def prefix_pass(
    q: Any, k: Any, v: Any, part_out: Any, part_lse: Any, items: Any, counts: Any, members: Any,
    entry_part: Any, scale_log2: float, sms: int, early: bool, pdl: bool, shape: Shape,
) -> None:  # fmt: skip
    """Launch the pass over the planner's dense list; one persistent block on each of `sms` SMs.

    Args:
        q: `[rows, num_q_heads, head_dim]`; head_dim 64, 128 or 256.
        k: `[slots, num_kv_heads, head_dim]`; `v` alike.
        part_out: `[parts, num_q_heads, head_dim]` float32; `part_lse` without the last dimension.
        items: the planner's dense list; `counts` holds its length and, last, the blocks to use.
        members: the planner's; so is `entry_part`.
        scale_log2: softmax scale times log2(e).
        sms: how many the card has.
        early: the launch may begin before the kernel ahead of it has ended.
        pdl: let the next kernel start beside this one.
        shape: of a block.
    """
    _, num_q_heads, dim = q.shape
    prefix_pass_kernel[(sms,)](
        q, pool_descriptor(k, shape.tokens), pool_descriptor(v, shape.tokens), part_out, part_lse,
        items, counts, members, entry_part, scale_log2, q.stride(0),
        HQ=num_q_heads, HKV=k.shape[1], D=dim, BN=shape.tokens, STAGES=shape.stages,
        CONSUMER_REGISTERS=shape.consumer_registers, EARLY=early, PDL=pdl, num_warps=4,
        maxnreg=shape.launch_registers, launch_pdl=early,
    )  # fmt: skip
