"""What decode attention over shared segments and private slots computes, in float64.

`decode_reference` is the specification; `decode_error_bound` says how far from it a kernel that
rounds where these kernels round may be.
"""

from collections.abc import Iterator
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]

from granikv.kernels.tables import MAX_SEGMENTS, DecodeTables

_EPS32 = 2.0**-23  # a whole ulp a step: tensor cores truncate when they align addends
_FP16_HALF_STEP = 2.0**-25  # half of the smallest fp16 number


def decode_reference(q: Any, k: Any, v: Any, tables: DecodeTables) -> tuple[Any, Any]:
    """One query token a row over its segments and private tokens, scaled by `head_dim ** -0.5`.

    The value does not depend on any mode. Only slots that a row's lengths reach are read.

    Args:
        q: `[rows, num_q_heads, head_dim]`.
        k: `[slots, num_kv_heads, head_dim]`.
        v: like `k`.
        tables: of the same rows.

    Returns:
        O `[rows, num_q_heads, head_dim]` and LSE `[rows, num_q_heads]` (base e) in float64; a row
        without tokens has O = 0 and LSE = -inf.
    """
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64, device=q.device)
    for row, slots in _slots_of_rows(tables):
        scores = _scores(q[row], k[slots])
        lse[row] = scores.logsumexp(-1).flatten()
        out[row] = _mix(scores.softmax(-1), v[slots])
    return out, lse


def decode_error_bound(q: Any, k: Any, v: Any, tables: DecodeTables) -> tuple[Any, Any]:
    """Largest error of O and of LSE against `decode_reference`, in the reference's shapes.

    Let `u` be half an ulp of the dtype at 1 and `e` one fp32 ulp at 1. A sum of `n` terms, taken
    as blocks of matrix instructions that reduce 16 terms at a time, passes at most `D(n) = n / 16
    + 128` fp32 roundings (128: the terms inside a block, and the merge of the parts).

    1. A score is off by `D(head_dim) e A` with `A = scale * sum |q| |k|`, and by `4 e A` for the
       scale, the change of base and the shift by the maximum; exp2 adds 4 e. A weight is therefore
       off by the relative error `r = (D(head_dim) + 4) e A + 4 e`, A of the worst token.
    2. The sum of the weights adds `D(tokens) e`: the LSE is off by `l = r + D(tokens) e + 4 e
       (1 + |LSE|)`, the last for the logarithm and the shift added back.
    3. Of O = sum p v / sum p: weights and LSEs of the parts stand above and below the line, so
       their errors count twice, `2 (r + l)`; the sum above adds `D(tokens) e`, and the rounding of
       each weight to the dtype `u`. All of them scale `S = sum p |v|`. Weights in fp16 that are
       subnormal miss half a step of 2^-24 each: `2^-25 sum |v|`.
    4. The result is rounded once: `u |O|`.

    Products of two errors are below a hundredth of the sum, which is added.
    """
    out, lse = decode_reference(q, k, v, tables)
    spread, _ = decode_reference(q, k, v.abs(), tables)
    unit = torch.finfo(q.dtype).eps / 2
    out_bound, lse_bound = torch.zeros_like(out), torch.zeros_like(lse)
    for row, slots in _slots_of_rows(tables):
        worst = _scores(q[row].abs(), k[slots].abs()).amax(-1).flatten()
        weight = ((_roundings(q.shape[-1]) + 4) * worst + 4) * _EPS32
        total = _roundings(slots.numel()) * _EPS32
        lse_bound[row] = 1.01 * (weight + total + 4 * _EPS32 * (1 + lse[row].abs()))
        relative = 2 * (weight + lse_bound[row]) + total + unit
        bound = relative[:, None] * spread[row] + unit * out[row].abs()
        if q.dtype == torch.float16:
            group = q.shape[1] // k.shape[1]
            values = v[slots].double().abs().sum(0).repeat_interleave(group, 0)
            bound = bound + _FP16_HALF_STEP * (values + 1)  # 1: O itself may be subnormal
        out_bound[row] = 1.01 * bound
    return out_bound, lse_bound


def _roundings(terms: int) -> float:
    return terms / 16 + 128


def _slots_of_rows(tables: DecodeTables) -> Iterator[tuple[int, Any]]:
    """Every row that has tokens, with their slots as int64."""
    base, length = tables.segment_base.tolist(), tables.segment_length.tolist()
    own_row, own_start = tables.private_row.tolist(), tables.private_start.tolist()
    for row, own in enumerate(tables.private_length.tolist()):
        pieces, column = [], 0
        for level in range(MAX_SEGMENTS):
            first, tokens = base[row][level], length[row][level]
            if first < 0:
                cold = tables.private_slots[-1 - first, column : column + tokens]
                pieces.append(cold.long().cpu())
            else:
                pieces.append(torch.arange(first, first + tokens))
            column += tokens
        start = own_start[row]
        pieces.append(tables.private_slots[own_row[row], start : start + own].long().cpu())
        slots = torch.cat(pieces).to(tables.private_slots.device)
        if slots.numel():
            yield row, slots


def _scores(q: Any, k: Any) -> Any:
    """Scaled products `[num_kv_heads, group, tokens]` in float64."""
    heads = q.double().view(k.shape[1], -1, q.shape[-1])
    return torch.einsum("hgd,thd->hgt", heads, k.double()) * q.shape[-1] ** -0.5


def _mix(weights: Any, v: Any) -> Any:
    """Weighted values `[num_q_heads, head_dim]`."""
    return torch.einsum("hgt,thd->hgd", weights, v.double()).flatten(0, 1)
