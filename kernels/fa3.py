"""FlashAttention-3 as the dense pass: one variable-length call over all dense segments of a step.

Its sequences are the groups. Their queries are gathered side by side, their keys are read where
they lie: `cu_seqlens_k` holds the segments' first slots and `seqused_k` their lengths, 0 for a
group that is not dense. All of it is on the device, so a captured graph follows its tables.

Limits: it runs serially; O comes back in the queries' dtype and is copied to the parts, which costs
a pass over it and one more rounding than the other dense passes; and FA3 multiplies the values
behind a segment's end by zero, so the pool must not hold NaN or infinities there.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]
import triton
import triton.language as tl

from granikv.kernels.checks import DecodeLimits
from granikv.kernels.planner import LEVELS
from granikv.kernels.tables import MAX_SEGMENTS, DecodeTables
from granikv.kernels.workspace import Workspace, padded

_TILE_ROWS = 128  # of FA3's tiles at head_dim 128, rows of a group packed


@cache
def load() -> Any:
    """`sgl_kernel.flash_attn`, which loads only on a CUDA host.

    Raises:
        NotImplementedError: it is not installed.
    """
    try:
        from sgl_kernel import flash_attn  # type: ignore[import-not-found,unused-ignore]
    except ImportError as missing:
        raise NotImplementedError(f"the fa3 prefix pass needs sglang-kernel: {missing}") from None
    return flash_attn


@dataclass(frozen=True, slots=True)
class Sequences:
    """FA3's view of a step, int32, and the gathered queries.

    Attributes:
        q_starts: `[groups + 1]` first gathered query of each group, and their number.
        k_starts: `[groups + 1]` first slot of each group's segment.
        k_used: `[groups]` tokens of each dense segment, else 0.
        queries: `[rows * 4, num_q_heads, head_dim]`.
    """

    q_starts: Any
    k_starts: Any
    k_used: Any
    queries: Any


def allocate(limits: DecodeLimits) -> Sequences:
    """Buffers for every batch within the limits."""

    def ints(count: int) -> Any:
        return torch.zeros(count, dtype=torch.int32, device=limits.device)

    entries = limits.max_rows * MAX_SEGMENTS
    queries = torch.zeros(
        entries, limits.heads.q, limits.heads.dim, dtype=limits.dtype, device=limits.device
    )
    groups = limits.max_groups
    return Sequences(ints(groups + 1), ints(groups + 1), ints(groups), queries)


@triton.jit
def fill_sequences(
    group_scratch, group_mode, q_starts, k_starts, k_used, groups, least_tokens, G: tl.constexpr
):
    """Read the planner's groups; grid of one block. `group_scratch [7, G]`."""
    g = tl.arange(0, G)
    live = g < groups
    rows = tl.load(group_scratch + g)
    length = tl.load(group_scratch + G + g)
    base = tl.load(group_scratch + 2 * G + g)
    dense = (tl.load(group_mode + g, live, other=0) == 2) & (rows > 0) & (length >= least_tokens)
    dense = dense & (base >= 0)
    ends = tl.cumsum(rows, 0)
    tl.store(q_starts + g, ends - rows, live)
    tl.store(q_starts + groups, tl.sum(rows, 0))
    tl.store(k_starts + g, tl.where(dense, base, 0), live)
    tl.store(k_starts + groups, 0)
    tl.store(k_used + g, tl.where(dense, length, 0), live)


@triton.jit
def gather_queries(
    q, queries, members, gathered, q_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Query rows in the order of the planner's members; grid of one block an entry."""
    i = tl.program_id(0)
    if i < tl.load(gathered):
        row = tl.load(members + i) // LEVELS
        at = tl.arange(0, BLOCK)
        values = tl.load(q + row.to(tl.int64) * q_row + at, at < WIDTH)
        tl.store(queries + i.to(tl.int64) * WIDTH + at, values, at < WIDTH)


@triton.jit
def scatter_parts(
    out, lse, part_out, part_lse, members, entry_part, segment_group, k_used, gathered, lse_head,
    HQ: tl.constexpr, HQP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """FA3's results to the parts of dense entries; grid of one block an entry."""
    i = tl.program_id(0)
    if i < tl.load(gathered):
        entry = tl.load(members + i)
        if tl.load(k_used + tl.load(segment_group + entry)) > 0:
            part = tl.load(entry_part + entry).to(tl.int64)
            at = tl.arange(0, BLOCK)
            values = tl.load(out + i.to(tl.int64) * WIDTH + at, at < WIDTH)
            tl.store(part_out + part * WIDTH + at, values.to(tl.float32), at < WIDTH)
            h = tl.arange(0, HQP)
            tl.store(part_lse + part * HQ + h, tl.load(lse + h * lse_head + i, h < HQ), h < HQ)


def plan(sequences: Sequences, step: Workspace, tables: DecodeTables, least_tokens: int) -> None:
    """Fill the sequences behind the planner of the same step."""
    fill_sequences[(1,)](
        step.group_scratch, tables.group_mode, sequences.q_starts, sequences.k_starts,
        sequences.k_used, tables.groups, least_tokens, G=padded(tables.groups), num_warps=1,
    )  # fmt: skip


def prefix_pass(
    sequences: Sequences, step: Workspace, q: Any, k: Any, v: Any, tables: DecodeTables,
    longest_tokens: int, sms: int,
) -> None:  # fmt: skip
    """All dense segments of one layer, as parts.

    Args:
        sequences: of the step.
        step: the planner's lists.
        q: `[rows, num_q_heads, head_dim]`.
        k: `[slots, num_kv_heads, head_dim]`; `v` alike.
        tables: of the step.
        longest_tokens: bound of all segments.
        sms: that the splits of segments are to fill, if all rows share one.
    """
    rows, num_q_heads, dim = q.shape
    entries, width = rows * MAX_SEGMENTS, num_q_heads * dim
    # FA3's own choice counts a tile for every row and group, and so splits nothing.
    tiles = k.shape[1] * triton.cdiv(rows * (num_q_heads // k.shape[1]), _TILE_ROWS)
    sizes = {"WIDTH": width, "BLOCK": triton.next_power_of_2(width)}
    groups = tables.groups
    q_starts = sequences.q_starts[: groups + 1]
    gathered = q_starts[groups:]
    queries = sequences.queries[:entries]
    gather_queries[(entries,)](q, queries, step.members, gathered, q.stride(0), **sizes)
    out, lse, *_ = load().flash_attn_varlen_func(
        queries,
        k,
        v,
        q_starts,
        sequences.k_starts[: groups + 1],
        max_seqlen_q=rows,
        max_seqlen_k=longest_tokens,
        seqused_k=sequences.k_used[:groups],
        softmax_scale=dim**-0.5,
        num_splits=min(32, max(1, sms // tiles)),
        return_softmax_lse=True,
    )
    scatter_parts[(entries,)](
        out, lse, step.part_out, step.part_lse, step.members, step.entry_part,
        tables.segment_group, sequences.k_used, gathered, lse.stride(0),
        HQ=num_q_heads, HQP=triton.next_power_of_2(num_q_heads), **sizes,
    )  # fmt: skip
