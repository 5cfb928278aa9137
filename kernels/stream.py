"""The memory-bound tiles on a card, in Gluon: private tokens, paged segments and cascade tiles.

A block is one warp with 8 or 16 packed rows and a ring of stages that asynchronous copies fill from
the slots of the pool. Slots are read one block of tokens before their copies start. Blocks are so
small that they find room beside a block of the dense pass, or six to eleven of them on an SM.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from granikv.kernels.planner import ITEM_WIDTH
from granikv.kernels.tiles import LN_2

_ROWS = gl.constexpr(16)  # packed rows of a cascade tile
_MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))


@gluon.constexpr_function
def _load_layout():
    """16 bytes a thread, 128 a row and step: the fewer rows a thread has, the fewer addresses."""
    return gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])


@gluon.constexpr_function
def _columns(group):
    """Packed rows of a private tile."""
    return 8 if group <= 8 else 16


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
def _scores(keys, queries, left, scale_log2, DP: gl.constexpr, N: gl.constexpr):
    """Scores `[16, N]` of 16 tokens in base-2 units, of which `left` exist.

    `queries` is an operand for 8 packed rows and shared memory for 16, which would spill.
    """
    KEYS: gl.constexpr = gl.DotOperandLayout(0, _MMA, 2)
    QUERIES: gl.constexpr = gl.DotOperandLayout(1, _MMA, 2)
    scores = gl.zeros([16, N], gl.float32, _MMA)
    if N == 8:
        scores = mma_v2(keys.load(KEYS), queries, scores)
    else:
        for d in gl.static_range(0, DP, 64):
            part = queries.slice(d, 64, 1).permute((1, 0)).load(QUERIES)
            scores = mma_v2(keys.slice(d, 64, 1).load(KEYS), part, scores)
    token = gl.arange(0, 16, gl.SliceLayout(1, _MMA))
    return gl.where((token < left)[:, None], scores * scale_log2, float("-inf"))


@gluon.jit
def _add(acc, weights, values):
    """`acc` and 16 tokens' values with their weights."""
    VALUES: gl.constexpr = gl.DotOperandLayout(0, _MMA, 2)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(1, _MMA, 2)
    weights = gl.convert_layout(weights.to(values.dtype), WEIGHTS)
    return mma_v2(values.permute((1, 0)).load(VALUES), weights, acc)


@gluon.jit
def _attend(
    q, k, v, table, base, tokens, row, q_head, live, q_smem, k_smem, v_smem, scale_log2, q_row,
    k_row, v_row, N: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, SAME_ROW: gl.constexpr,
):  # fmt: skip
    """`N` packed rows over `tokens` slots of one kv head; normalised O `[DP, N]` and base-e LSE.

    The products are taken transposed, tokens and elements of a head as the 16 rows of a matrix
    instruction, so that `N` may be 8. `row`, `q_head`, `live`: `[N]` in the load layout's row
    slice; `k`, `v` point to the kv head.
    """
    QUERIES: gl.constexpr = gl.DotOperandLayout(1, _MMA, 2)
    LOAD: gl.constexpr = _load_layout()

    offs_d = gl.arange(0, DP, gl.SliceLayout(0, LOAD))
    n = gl.arange(0, BN, gl.SliceLayout(1, LOAD))
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
    q_smem.store(gl.load(q + q_at[:, None] + offs_d[None, :], seen, other=0.0))
    gl.thread_barrier()
    queries = q_smem
    if N == 8:
        queries = q_smem.permute((1, 0)).load(QUERIES)
    peak = gl.full([N], float("-inf"), gl.float32, gl.SliceLayout(0, _MMA))
    total = gl.zeros([16, N], gl.float32, _MMA)
    acc = gl.zeros([DP, N], gl.float32, _MMA)
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
        k_stage = k_smem.index(stage)
        v_stage = v_smem.index(stage)
        left = tokens - i * BN
        # Steps of 16 tokens share one softmax; operands of a whole stage would spill.
        s0 = _scores(k_stage.slice(0, 16), queries, left, scale_log2, DP, N)
        if BN == 16:
            higher = gl.maximum(peak, gl.max(s0, 0))
        else:
            s1 = _scores(k_stage.slice(16, 16), queries, left - 16, scale_log2, DP, N)
            higher = gl.maximum(peak, gl.max(gl.maximum(s0, s1), 0))
        shrink = gl.exp2(peak - higher)
        peak = higher
        acc = acc * shrink[None, :]
        w0 = gl.exp2(s0 - higher[None, :])
        total = total * shrink[None, :] + w0
        acc = _add(acc, w0, v_stage.slice(0, 16))
        if BN == 32:
            w1 = gl.exp2(s1 - higher[None, :])
            total += w1
            acc = _add(acc, w1, v_stage.slice(16, 16))
    async_copy.wait_group(0)
    gl.thread_barrier()

    weight = gl.sum(total, 0)
    some = weight > 0
    sure = gl.where(some, weight, 1.0)
    lse = gl.where(some, (peak + gl.log2(sure)) * LN_2, float("-inf"))
    return acc / sure[None, :], lse


@gluon.jit
def _store_part(part_out, part_lse, o, o_lse, at, d, live, D: gl.constexpr):
    """Write a partial result: `o [D, N]` and its LSE `[N]`, from `at` on in units of a head."""
    gl.store(part_out + at[None, :] * D + d[:, None], o, live[None, :] & (d < D)[:, None])
    gl.store(part_lse + at, o_lse, live)


@gluon.jit
def _private_tile(
    q, k, v, out, lse, part_out, part_lse, items, private_slots, work, q_smem, k_smem, v_smem,
    scale_log2, q_row, k_row, v_row, out_row, lse_row, lse_head, width,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, SAME_ROW: gl.constexpr, LSE: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """One row over a chunk of its own slots or of a paged segment, one kv head."""
    GROUP: gl.constexpr = HQ // HKV
    LOAD: gl.constexpr = _load_layout()
    item = items + work // HKV * ITEM_WIDTH
    head = work % HKV
    row = gl.load(item)
    base = gl.load(item + 1)
    skip = gl.load(item + 2)
    tokens = gl.load(item + 3)
    part = gl.load(item + 4)
    direct = gl.load(item + 5)
    table_row = gl.load(item + 6)
    m = gl.arange(0, N, gl.SliceLayout(1, LOAD))
    o, o_lse = _attend(
        q, k + head * D, v + head * D, private_slots + table_row.to(gl.int64) * width + skip, base,
        tokens, row + m * 0, head * GROUP + m, m < GROUP, q_smem, k_smem, v_smem, scale_log2, q_row,
        k_row, v_row, N, D, DP, BN, STAGES, SAME_ROW,
    )  # fmt: skip
    m = gl.arange(0, N, gl.SliceLayout(0, _MMA))
    d = gl.arange(0, DP, gl.SliceLayout(1, _MMA))
    live = m < GROUP
    seen = live[None, :] & (d < D)[:, None]
    q_head = head * GROUP + m
    if direct != 0:
        at = row.to(gl.int64) * out_row + q_head * D
        gl.store(out + at[None, :] + d[:, None], o.to(out.dtype.element_ty), seen)
        if LSE:
            gl.store(lse + row.to(gl.int64) * lse_row + q_head * lse_head, o_lse, live)
    else:
        at = part.to(gl.int64) * HQ + q_head
        _store_part(part_out, part_lse, o, o_lse, at, d, live, D)


@gluon.jit
def _cascade_tile(
    q, k, v, part_out, part_lse, items, members, entry_part, private_slots, work, q_smem, k_smem,
    v_smem, scale_log2, q_row, k_row, v_row, width,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, SAME_ROW: gl.constexpr,
):  # fmt: skip
    """Up to 16 packed rows of one group over a chunk of their segment, one kv head.

    A negative `base` is a row of the slot table, as in `DecodeTables`.
    """
    GROUP: gl.constexpr = HQ // HKV
    LOAD: gl.constexpr = _load_layout()
    item = items + work // HKV * ITEM_WIDTH
    head = work % HKV
    first = gl.load(item)
    count = gl.load(item + 1)
    base = gl.load(item + 2)
    tokens = gl.load(item + 3)
    cut = gl.load(item + 5)
    table_row = gl.where(base < 0, -1 - base, 0)
    table = private_slots + table_row.to(gl.int64) * width + gl.load(item + 6)
    m = gl.arange(0, _ROWS, gl.SliceLayout(1, LOAD))
    live = m // GROUP < count
    row = gl.load(members + first + m // GROUP, live, other=0) // 4
    o, o_lse = _attend(
        q, k + head * D, v + head * D, table, base, tokens, row, head * GROUP + m % GROUP, live,
        q_smem, k_smem, v_smem, scale_log2, q_row, k_row, v_row, _ROWS, D, DP, BN, STAGES, SAME_ROW,
    )  # fmt: skip
    m = gl.arange(0, _ROWS, gl.SliceLayout(0, _MMA))
    d = gl.arange(0, DP, gl.SliceLayout(1, _MMA))
    live = m // GROUP < count
    entry = gl.load(members + first + m // GROUP, live, other=0)
    part = gl.load(entry_part + entry, live, other=0) + cut
    at = part.to(gl.int64) * HQ + head * GROUP + m % GROUP
    _store_part(part_out, part_lse, o, o_lse, at, d, live, D)


@gluon.jit
def _set_back(queue):
    """The last block sets the counters back, where no merge follows to do it."""
    if gl.atomic_add(queue + 3, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        gl.store(queue, 0)
        gl.store(queue + 3, 0)


@gluon.jit
def stream_pass_kernel(
    q, k, v, out, lse, part_out, part_lse, private_items, cascade_items, counts, members,
    entry_part, queue, private_slots, scale_log2, q_row, k_row, v_row, out_row, lse_row, lse_head,
    width,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, SAME_ROW: gl.constexpr, LSE: gl.constexpr, EARLY: gl.constexpr,
    PDL: gl.constexpr, BESIDE: gl.constexpr, ALONE: gl.constexpr,
):  # fmt: skip
    """All memory-bound tiles; the same work, order and results as `launches.private_pass`.

    `BESIDE` a dense pass it is launched by that pass, which has waited for what came before; else
    it waits itself where it is launched `EARLY`.
    """
    if EARLY and not BESIDE:
        gdc_wait()
    dtype: gl.constexpr = k.dtype.element_ty
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
    N: gl.constexpr = _columns(HQ // HKV)
    q_smem = gl.allocate_shared_memory(dtype, [_ROWS, DP], SHARED)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BN, DP], SHARED)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BN, DP], SHARED)
    n_cascade = gl.load(counts + 1) * HKV
    todo = n_cascade + gl.load(counts + 2) * HKV
    if BESIDE:
        # Blocks that wait for room on an SM must not own tiles, and may come when all are taken.
        start = 0
        work = gl.load(queue, volatile=True)
        if work < todo:
            work = gl.atomic_add(queue, 1, sem="relaxed")
    else:
        start = gl.num_programs(0)
        work = gl.program_id(0)
    while work < todo:
        # Asked for before the tile, so that the answer is there when it ends.
        following = gl.atomic_add(queue, 1, sem="relaxed") + start
        if work < n_cascade:
            _cascade_tile(
                q, k, v, part_out, part_lse, cascade_items, members, entry_part, private_slots,
                work, q_smem, k_smem, v_smem, scale_log2, q_row, k_row, v_row, width, HQ, HKV, D,
                DP, BN, STAGES, SAME_ROW,
            )  # fmt: skip
        else:
            _private_tile(
                q, k, v, out, lse, part_out, part_lse, private_items, private_slots,
                work - n_cascade, q_smem.slice(0, N), k_smem, v_smem, scale_log2, q_row, k_row,
                v_row, out_row, lse_row, lse_head, width, HQ, HKV, D, DP, BN, STAGES, SAME_ROW, LSE,
                N,
            )  # fmt: skip
        work = following
    if ALONE:
        _set_back(queue)
    if PDL:
        # Not earlier: waiting blocks of the merge would take the place of blocks of this pass.
        gdc_launch_dependents()
        if BESIDE and gl.program_id(0) == 0:
            gdc_wait()  # so that this kernel ends after the dense pass


class Shape(NamedTuple):
    """Tokens of a stage, stages, registers of a thread, and blocks of one warp on an SM.

    `blocks_per_sm` fit on an SM without other work, `blocks_at_first` while the dense pass runs.
    """

    tokens: int
    stages: int
    registers: int
    blocks_per_sm: int
    blocks_at_first: int


# With fewer registers than 152 ptxas orders the loads one behind the other: at 128 the whole
# operator took up to 20 % longer on an H200.
_ALONE = Shape(32, 2, 168, 6, 6)
# Stages of 16 tokens, so that the shared memory beside a block of the dense pass holds four blocks.
_BESIDE = Shape(16, 2, 152, 11, 4)
_ALONE_256 = Shape(16, 2, 255, 5, 5)


def shape_for(padded_dim: int, beside: bool) -> Shape:
    """The shape of a block where the pass has its SMs alone, or beside a block of the dense one."""
    if padded_dim == 256:
        return _ALONE_256
    return _BESIDE if beside else _ALONE


def stream_pass(
    arguments: tuple[Any, ...],
    sms: int,
    shape: Shape,
    early: bool,
    pdl: bool,
    beside: bool,
    alone: bool,
    **sizes: Any,
) -> None:
    """Launch with the arguments of `stream_pass_kernel`, by position and by `sizes`' names.

    Args:
        sms: how many the card has.
        shape: of a block.
        early: the launch may begin before the kernel ahead of it has ended.
        pdl: the next kernel may start before this one ends.
        beside: a dense pass runs at the same time.
        alone: no merge follows.
    """
    stream_pass_kernel[(sms * shape.blocks_per_sm,)](
        *arguments, **sizes, BN=shape.tokens, STAGES=shape.stages, EARLY=early, PDL=pdl,
        BESIDE=beside, ALONE=alone, num_warps=1, maxnreg=shape.registers, launch_pdl=early,
    )  # fmt: skip
