"""The tiles of a decode step as Triton device functions, used by every launch.

Scores and sums are float32, probabilities are rounded to the values' type before the second
product, and the exponential is base 2 with log2(e) folded into the scale; LSEs are written base e.
"""

import triton
import triton.language as tl

from granikv.kernels.planner import ITEM_WIDTH, LEVELS

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _attend(
    q, k, v, k_at, v_at, inside, peak, total, acc, scale_log2, offs_d, D: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """One block of keys: `k_at`, `v_at` int64 offsets `[BN]`; masked keys weigh nothing."""
    if MASK:
        seen = inside[:, None] & (offs_d < D)[None, :]
        keys = tl.load(k + k_at[:, None] + offs_d[None, :], seen, other=0.0)
        values = tl.load(v + v_at[:, None] + offs_d[None, :], seen, other=0.0)
    else:
        seen = (offs_d < D)[None, :]
        if offs_d.shape[0] == D:
            keys = tl.load(k + k_at[:, None] + offs_d[None, :])
            values = tl.load(v + v_at[:, None] + offs_d[None, :])
        else:
            keys = tl.load(k + k_at[:, None] + offs_d[None, :], seen, other=0.0)
            values = tl.load(v + v_at[:, None] + offs_d[None, :], seen, other=0.0)
    scores = tl.dot(q, tl.trans(keys)) * scale_log2
    if MASK:
        scores = tl.where(inside[None, :], scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(peak - higher)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None])
    return higher, total, acc


@triton.jit
def _finish(peak, total, acc):
    """Normalised O and base-e LSE; nothing seen gives 0 and -inf."""
    some = total > 0
    out = acc / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, (peak + tl.log2(tl.where(some, total, 1.0))) * LN_2, float("-inf"))
    return out, lse


@triton.jit
def prefix_tile(
    q, k, v, items, members, entry_part, slots, width, item, head, scale_log2, q_row, k_row, v_row,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    COLD: tl.constexpr,
):  # fmt: skip
    """Rows of one group over one chunk of their segment, one kv head.

    Packed row m is head `m % GROUP` of the tile's request `m // GROUP`. `COLD` reads segments of
    any slots through the table `slots [table rows, width]`, too. Returns O `[BM, DP]`, LSE
    `[BM]`, and of each packed row its batch row, query head, part and whether it exists.
    """
    item_at = items + item * ITEM_WIDTH
    first = tl.load(item_at)
    count = tl.load(item_at + 1)
    base = tl.load(item_at + 2)
    tokens = tl.load(item_at + 3)
    cut = tl.load(item_at + 5)
    m = tl.arange(0, BM)
    live = m // GROUP < count
    entry = tl.load(members + first + m // GROUP, live, other=0)
    part = tl.load(entry_part + entry, live, other=0) + cut
    row = entry // LEVELS
    q_head = head * GROUP + m % GROUP
    offs_d = tl.arange(0, DP)
    seen = live[:, None] & (offs_d < D)[None, :]
    q_at = row.to(tl.int64) * q_row + q_head * D
    queries = tl.load(q + q_at[:, None] + offs_d[None, :], seen, other=0.0)
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    n = tl.arange(0, BN)
    if COLD:
        indirect = base < 0
        table_row = tl.where(indirect, -1 - base, 0)
        table = slots + table_row.to(tl.int64) * width + tl.load(item_at + 6)
        for start in range(0, tokens, BN):
            at = start + n
            slot = tl.load(table + at, (at < tokens) & indirect, other=0)
            slot = tl.where(indirect, slot, base + at).to(tl.int64)
            peak, total, acc = _attend(
                queries, k + head * D, v + head * D, slot * k_row, slot * v_row, at < tokens, peak,
                total, acc, scale_log2, offs_d, D, True,
            )  # fmt: skip
    else:
        k_first = k + base.to(tl.int64) * k_row + head * D
        v_first = v + base.to(tl.int64) * v_row + head * D
        whole = tokens // BN * BN
        for start in range(0, whole, BN):
            at = (start + n).to(tl.int64)
            peak, total, acc = _attend(
                queries, k_first, v_first, at * k_row, at * v_row, n < BN, peak, total, acc,
                scale_log2, offs_d, D, False,
            )  # fmt: skip
        if whole < tokens:
            at = (whole + n).to(tl.int64)
            peak, total, acc = _attend(
                queries, k_first, v_first, at * k_row, at * v_row, whole + n < tokens, peak, total,
                acc, scale_log2, offs_d, D, True,
            )  # fmt: skip
    out, lse = _finish(peak, total, acc)
    return out, lse, row, q_head, part, live


@triton.jit
def private_tile(
    q, k, v, items, private_slots, item, head, scale_log2, q_row, k_row, v_row, width,
    GROUP: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One row over a chunk of its private slots or of a paged segment, one kv head.

    Returns as `prefix_tile`, with `GP` packed rows, and whether this tile is the row's result.
    """
    item_at = items + item * ITEM_WIDTH
    row = tl.load(item_at)
    base = tl.load(item_at + 1)
    skip = tl.load(item_at + 2)
    tokens = tl.load(item_at + 3)
    part = tl.load(item_at + 4)
    direct = tl.load(item_at + 5) != 0
    g = tl.arange(0, GP)
    live = g < GROUP
    q_head = head * GROUP + g
    offs_d = tl.arange(0, DP)
    q_at = row.to(tl.int64) * q_row + q_head * D
    seen = live[:, None] & (offs_d < D)[None, :]
    queries = tl.load(q + q_at[:, None] + offs_d[None, :], seen, other=0.0)
    peak = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    n = tl.arange(0, BN)
    indirect = base < 0
    table = private_slots + tl.load(item_at + 6).to(tl.int64) * width + skip
    straight = tl.where(indirect, 0, base)
    for start in range(0, tokens, BN):
        at = start + n
        inside = at < tokens
        # A paged segment lies in consecutive slots; its tile reads no table.
        slot = tl.load(table + at, inside & indirect, other=0)
        slot = (tl.where(indirect, slot, straight + at)).to(tl.int64)
        peak, total, acc = _attend(
            queries, k + head * D, v + head * D, slot * k_row, slot * v_row, inside, peak, total,
            acc, scale_log2, offs_d, D, True,
        )  # fmt: skip
    out, lse = _finish(peak, total, acc)
    return out, lse, row, q_head, part, live, direct


@triton.jit
def store_part(
    part_out, part_lse, out, lse, part, q_head, live, HQ: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """Write partial results: `out [M, DP]`, `lse [M]`; `part` is one part or one for each row."""
    at = part.to(tl.int64) * HQ + q_head
    offs_d = tl.arange(0, DP)
    seen = live[:, None] & (offs_d < D)[None, :]
    tl.store(part_out + at[:, None] * D + offs_d[None, :], out, seen)
    tl.store(part_lse + at, lse, live)


@triton.jit
def store_result(
    final_out, final_lse, out, lse, row, q_head, live, out_row, lse_row, lse_head,
    D: tl.constexpr, DP: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Write final results of rows: O in the output's type, LSE base e where it was asked for."""
    offs_d = tl.arange(0, DP)
    seen = live[:, None] & (offs_d < D)[None, :]
    row = row.to(tl.int64)
    at = row * out_row + q_head * D
    tl.store(final_out + at[:, None] + offs_d[None, :], out.to(final_out.dtype.element_ty), seen)
    if LSE:
        tl.store(final_lse + row * lse_row + q_head * lse_head, lse, live)


@triton.jit
def _merged(peak, total, acc):
    """As `_finish`, of parts: their peaks are base e."""
    some = total > 0
    out = acc / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, peak + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    return out, lse


@triton.jit
def merge_parts(
    part_out, part_lse, first, count, q_head, live, HQ: tl.constexpr, M: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Fold parts `first .. first + count - 1` of packed rows in this order; O `[M, DP]`, LSE `[M]`.

    `first` and `count` are scalars or `[M]`. Parts without a token weigh nothing, and a row without
    any is (0, -inf). Reads past L1, since other blocks wrote the parts.
    """
    offs_d = tl.arange(0, DP)
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DP], tl.float32)
    counts = tl.where(live, count, 0)
    for i in range(tl.max(counts, 0)):
        here = i < counts
        at = (first + i).to(tl.int64) * HQ + q_head
        lse = tl.load(part_lse + at, here, other=float("-inf"), cache_modifier=".cg")
        seen = here[:, None] & (offs_d < D)[None, :]
        out = tl.load(
            part_out + at[:, None] * D + offs_d[None, :], seen, other=0.0, cache_modifier=".cg"
        )
        higher = tl.maximum(peak, lse)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, weight = tl.exp(peak - shift), tl.exp(lse - shift)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + out * weight[:, None]
        peak = higher
    return _merged(peak, total, acc)


@triton.jit
def _part_of_row(
    part_out, part_lse, first, i, count, q_head, live, offs_d, HQ: tl.constexpr, D: tl.constexpr
):
    here = live & (i < count)
    at = (first + i).to(tl.int64) * HQ + q_head
    lse = tl.load(part_lse + at, here, other=float("-inf"))
    seen = here[:, None] & (offs_d < D)[None, :]
    return lse, tl.load(part_out + at[:, None] * D + offs_d[None, :], seen, other=0.0)


@triton.jit
def merge_row(
    part_out, part_lse, first, count, q_head, live, HQ: tl.constexpr, M: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """As `merge_parts` for scalars `first` and `count`, with four parts under way at a time."""
    offs_d = tl.arange(0, DP)
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DP], tl.float32)
    for i in range(0, count, 4):
        lse0, o0 = _part_of_row(part_out, part_lse, first, i, count, q_head, live, offs_d, HQ, D)
        lse1, o1 = _part_of_row(
            part_out, part_lse, first, i + 1, count, q_head, live, offs_d, HQ, D
        )
        lse2, o2 = _part_of_row(
            part_out, part_lse, first, i + 2, count, q_head, live, offs_d, HQ, D
        )
        lse3, o3 = _part_of_row(
            part_out, part_lse, first, i + 3, count, q_head, live, offs_d, HQ, D
        )
        higher = tl.maximum(tl.maximum(lse0, lse1), tl.maximum(lse2, lse3))
        higher = tl.maximum(peak, higher)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp(peak - shift)
        w0, w1 = tl.exp(lse0 - shift), tl.exp(lse1 - shift)
        w2, w3 = tl.exp(lse2 - shift), tl.exp(lse3 - shift)
        total = total * shrink + ((w0 + w1) + (w2 + w3))
        acc = acc * shrink[:, None] + o0 * w0[:, None] + o1 * w1[:, None]
        acc = acc + o2 * w2[:, None] + o3 * w3[:, None]
        peak = higher
    return _merged(peak, total, acc)
