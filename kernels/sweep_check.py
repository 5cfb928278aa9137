"""Checks the sweep's calls against float64 before anything is timed."""

from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]

from granikv.kernels import sweep_cases as cases
from granikv.kernels.shapes import Decode, Extend, Gemm, PrefixPass, PrefixSuffix
from granikv.kernels.sweep_points import LLAMA, QWEN, QWEN_TP4

# bf16 keeps 8 bits, so rounding the inputs of P V and the output leaves 2^-8 at most per element
# and less in the norm; a wrong page or mask gives an error near 1.
MAX_RELATIVE_ERROR = 1e-2
_CALLS = 3  # the last call's window lies behind 4 GiB of K, where 32-bit offsets would wrap


def run_checks(pool: cases.DevicePool, attention: bool = True) -> list[str]:
    """Compare every kind of call with float64; one line for each check that held.

    Args:
        attention: check FA3 too, which needs `sgl_kernel`.

    Raises:
        RuntimeError: a result is off by more than rounding.
    """
    lines = [_check_gemm(pool, Gemm(33, 512, 1024))]
    if not attention:
        return lines
    decodes = (
        ("fa3", Decode(LLAMA, 8, 300)),
        ("fa3", Decode(QWEN, 64, 100, 1, 512, 1)),
        ("fa3", Decode(QWEN_TP4, 12, 77, 16, 512, 3)),
        ("fa3", Decode(LLAMA, 6, 100, 64, 256, 1)),
        ("fa3", Decode(LLAMA, 6, 130, 1, 256, 2, contiguous=False)),
        ("fa3_tight_table", Decode(LLAMA, 6, 130, 1, 256, 1)),
    )
    lines += [_check_decode(pool, shape, backend) for backend, shape in decodes]
    for extend in (Extend(LLAMA, 2, 70, 333), Extend(QWEN_TP4, 3, 33, 200, shared=True)):
        lines.append(_check_extend(pool, extend))
    for prefix in (PrefixPass(LLAMA, 48, 777), PrefixPass(QWEN, 9, 777, paged=True)):
        lines.append(_check_prefix(pool, prefix))
    lines.append(_check_pair(pool, PrefixSuffix(LLAMA, 16, 1024, 50)))
    return lines


def _check_decode(pool: cases.DevicePool, shape: Decode, backend: str) -> str:
    wide = backend != "fa3_tight_table"
    state = pool.generator.get_state()
    batch = cases.decode_batch(pool, shape, _CALLS, wide)
    pool.generator.set_state(state)  # the calls draw the same inputs again
    call = cases.decode_calls(pool, shape, backend, _CALLS)[-1]
    return _compare(f"{backend} {shape}", call(), _reference(batch))


def _check_extend(pool: cases.DevicePool, shape: Extend) -> str:
    state = pool.generator.get_state()
    batch = cases.extend_batch(pool, shape, _CALLS)
    pool.generator.set_state(state)
    call = cases.extend_calls(pool, shape, _CALLS)[-1]
    return _compare(f"fa3 {shape}", call(), _reference(batch))


def _check_prefix(pool: cases.DevicePool, shape: PrefixPass) -> str:
    state = pool.generator.get_state()
    kv = Decode(shape.heads, 1, 0, 1, shape.prefix_tokens, 1)
    batch = cases.decode_batch(pool, kv, _CALLS, wide=False)
    q = pool.randn(shape.rows, shape.heads.q, shape.heads.dim)
    pool.generator.set_state(state)
    out, lse = cases.prefix_calls(pool, shape, _CALLS)[-1]()
    pages = batch.tables[-1][0, : shape.prefix_tokens].long()
    want, want_lse = _attend(q, batch.k_pages[pages, 0], batch.v_pages[pages, 0], causal=False)
    _compare(f"lse of {shape}", lse, want_lse)
    return _compare(f"fa3 {shape}", out, want)


def _check_pair(pool: cases.DevicePool, shape: PrefixSuffix) -> str:
    state = pool.generator.get_state()
    kv = Decode(shape.heads, shape.rows, shape.private_tokens, 1, shape.prefix_tokens, 1)
    batch = cases.decode_batch(pool, kv, _CALLS)
    pool.generator.set_state(state)
    call = cases.prefix_suffix_calls(pool, shape, _CALLS)[-1]
    return _compare(f"fa3_prefix_suffix_merge {shape}", call(), _reference(batch))


def _check_gemm(pool: cases.DevicePool, shape: Gemm) -> str:
    state = pool.generator.get_state()
    x = pool.randn(shape.m, shape.k)
    pool.generator.set_state(state)
    got = cases.gemm_calls(pool, shape, 1)[0]()
    weight = pool.k[: shape.n * shape.k].view(shape.n, shape.k)
    return _compare(f"cublas {shape}", got, x.double() @ weight.double().T)


def _reference(batch: cases.PagedBatch) -> Any:
    """Attention of every row of the last call's table, one row at a time."""
    page_size = batch.k_pages.shape[1]
    outs = []
    for row, tokens in enumerate(batch.seqlens.tolist()):
        pages = batch.tables[-1][row, : -(-tokens // page_size)].long()
        k, v = (x[pages].flatten(0, 1)[:tokens] for x in (batch.k_pages, batch.v_pages))
        begin, end = batch.query_starts[row : row + 2].tolist()
        outs.append(_attend(batch.q[begin:end], k, v, causal=True)[0])
    return torch.cat(outs)


def _attend(q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any]:
    """O `[tokens, num_q_heads, head_dim]` and LSE `[num_q_heads, tokens]` in float64.

    A causal mask is aligned to the last key, as for new tokens behind cached ones.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[-1] ** -0.5
    if causal:
        seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
        seen = seen.tril(scores.shape[2] - scores.shape[1])
        scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def _compare(name: str, got: Any, want: Any) -> str:
    error = float((got.double() - want.double()).norm() / want.double().norm())
    if not error < MAX_RELATIVE_ERROR:  # not "<" also catches NaN
        raise RuntimeError(f"check failed: {name} is off by {error:.2e}; nothing was timed")
    return f"check {name}: relative error {error:.1e}"
