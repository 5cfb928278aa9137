"""Library kernels that GraniKV is measured against, called as SGLang 0.5.17 calls them.

The kernel libraries are imported on first use: `sgl_kernel` loads only on a CUDA host.
"""

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]

from granikv.kernels.shapes import Heads


@cache
def _fa3() -> Any:
    from sgl_kernel import flash_attn  # type: ignore[import-not-found,unused-ignore]

    return flash_attn


def fa3_decode_schedule(
    heads: Heads, cache_seqlens: Any, row_starts: Any, longest_tokens: int, page_size: int
) -> Any:
    """FA3's tile schedule of one decode batch; SGLang makes it once a step for all layers."""
    return _fa3().get_scheduler_metadata(
        batch_size=cache_seqlens.shape[0],
        max_seqlen_q=1,
        max_seqlen_k=longest_tokens,
        num_heads=heads.q,
        num_heads_k=heads.kv,
        headdim=heads.dim,
        cache_seqlens=cache_seqlens,
        qkv_dtype=torch.bfloat16,
        cu_seqlens_q=row_starts,
        page_size=page_size,
        causal=True,
        has_softcap=False,
        num_splits=0,
    )


def fa3_decode(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    cache_seqlens: Any,
    row_starts: Any,
    schedule: Any = None,
    return_lse: bool = False,
) -> Any:
    """One query token a row over its pages; O, or (O, LSE) with LSE `[num_q_heads, rows]`.

    Shapes: q `[rows, num_q_heads, head_dim]` bf16, pages `[pages, page_size, num_kv_heads,
    head_dim]`, page_table `[rows, width]` int32, cache_seqlens `[rows]` int32.
    """
    result = _fa3().flash_attn_with_kvcache(
        q=q,
        k_cache=k_pages,
        v_cache=v_pages,
        page_table=page_table,
        cache_seqlens=cache_seqlens,
        cu_seqlens_q=row_starts,
        max_seqlen_q=1,
        softmax_scale=q.shape[-1] ** -0.5,
        causal=True,
        return_softmax_lse=return_lse,
        num_splits=0,
        scheduler_metadata=schedule,
    )
    return result[:2] if return_lse else result


def fa3_extend(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    cache_seqlens: Any,
    query_starts: Any,
    kv_starts: Any,
    longest_query_tokens: int,
) -> Any:
    """New tokens of each request over its cached and new KV, causal; O of q's shape.

    `query_starts` and `kv_starts` are cumulative lengths, int32.
    """
    return _fa3().flash_attn_with_kvcache(
        q=q,
        k_cache=k_pages,
        v_cache=v_pages,
        page_table=page_table,
        cache_seqlens=cache_seqlens,
        cu_seqlens_q=query_starts,
        cu_seqlens_k_new=kv_starts,
        max_seqlen_q=longest_query_tokens,
        softmax_scale=q.shape[-1] ** -0.5,
        causal=True,
        num_splits=0,
    )


def fa3_prefix(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """All rows as one sequence over one contiguous prefix, without a mask.

    Shapes: q `[rows, num_q_heads, head_dim]`, k and v `[prefix_tokens, num_kv_heads, head_dim]`.
    Returns O of q's shape and LSE `[num_q_heads, rows]`, base e.
    """
    out, lse, *_ = _fa3().flash_attn_with_kvcache(
        q=q[None],
        k_cache=k[None],
        v_cache=v[None],
        softmax_scale=q.shape[-1] ** -0.5,
        causal=False,
        return_softmax_lse=True,
        num_splits=0,
    )
    return out[0], lse[0]


def fa3_prefix_page_table(
    q: Any, k_pages: Any, v_pages: Any, page_table: Any, cache_seqlens: Any, query_starts: Any
) -> tuple[Any, Any]:
    """The same pass when the prefix is known by a page table of one row."""
    out, lse, *_ = _fa3().flash_attn_with_kvcache(
        q=q,
        k_cache=k_pages,
        v_cache=v_pages,
        page_table=page_table,
        cache_seqlens=cache_seqlens,
        cu_seqlens_q=query_starts,
        max_seqlen_q=q.shape[0],
        softmax_scale=q.shape[-1] ** -0.5,
        causal=False,
        return_softmax_lse=True,
        num_splits=0,
    )
    return out, lse


def merge_states(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
    """SGLang's merge of two partial results; LSEs `[rows, num_q_heads]` float32, base e."""
    from sgl_kernel import merge_state_v2  # type: ignore[import-not-found,unused-ignore]

    return merge_state_v2(out_a, lse_a, out_b, lse_b)[0]


def prefix_suffix_merge(prefix: tuple[Any, Any], suffix: tuple[Any, Any]) -> Any:
    """Merge of the two passes' (O, LSE `[num_q_heads, rows]`), with the transposes it needs."""
    lse_a, lse_b = prefix[1].T.contiguous(), suffix[1].T.contiguous()
    return merge_states(prefix[0], lse_a, suffix[0], lse_b)


def fused_add_rmsnorm(x: Any, residual: Any, weight: Any) -> None:
    """`residual += x; x = rmsnorm(residual) * weight`, in place."""
    import sgl_kernel  # type: ignore[import-not-found,unused-ignore]  # noqa: F401

    torch.ops.sgl_kernel.fused_add_rmsnorm.default(x, residual, weight, 1e-6, True)


def silu_and_mul(gate_up: Any, out: Any) -> None:
    """`out = silu(gate) * up` of `gate_up [m, 2 n]`."""
    import sgl_kernel  # type: ignore[import-not-found,unused-ignore]  # noqa: F401

    torch.ops.sgl_kernel.silu_and_mul.default(out, gate_up)


def versions() -> dict[str, str]:
    """Versions of everything that decides a time; `absent` where a package is not installed."""
    found = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda)}
    for package in ("sglang-kernel", "triton", "nvidia-cublas"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found
