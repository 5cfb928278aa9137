"""Library kernels that GraniKV is measured against, called as SGLang 0.5.17 calls them.

The kernel libraries are imported on first use: `sgl_kernel` loads only on a CUDA host.
"""

from collections.abc import Callable
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


def _fa3_attend(q: Any, k: Any, v: Any, causal: bool, **options: Any) -> Any:
    return _fa3().flash_attn_with_kvcache(
        q=q,
        k_cache=k,
        v_cache=v,
        softmax_scale=q.shape[-1] ** -0.5,
        causal=causal,
        num_splits=0,
        **options,
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
    result = _fa3_attend(
        q,
        k_pages,
        v_pages,
        True,
        page_table=page_table,
        cache_seqlens=cache_seqlens,
        cu_seqlens_q=row_starts,
        max_seqlen_q=1,
        return_softmax_lse=return_lse,
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
    return _fa3_attend(
        q,
        k_pages,
        v_pages,
        True,
        page_table=page_table,
        cache_seqlens=cache_seqlens,
        cu_seqlens_q=query_starts,
        cu_seqlens_k_new=kv_starts,
        max_seqlen_q=longest_query_tokens,
    )


def fa3_prefix(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """All rows as one sequence over one contiguous prefix, without a mask.

    Shapes: q `[rows, num_q_heads, head_dim]`, k and v `[prefix_tokens, num_kv_heads, head_dim]`.
    Returns O of q's shape and LSE `[num_q_heads, rows]`, base e.
    """
    out, lse, *_ = _fa3_attend(q[None], k[None], v[None], False, return_softmax_lse=True)
    return out[0], lse[0]


def fa3_prefix_page_table(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    cache_seqlens: Any,
    query_starts: Any,
    most_rows: int | None = None,
) -> tuple[Any, Any]:
    """The same pass when prefixes are known by a page table, one row of it for each prefix.

    Rows `query_starts[i]` to `query_starts[i + 1]` of q read prefix `i`; `most_rows` of one prefix
    must be given when there are several.
    """
    out, lse, *_ = _fa3_attend(
        q,
        k_pages,
        v_pages,
        False,
        page_table=page_table,
        cache_seqlens=cache_seqlens,
        cu_seqlens_q=query_starts,
        max_seqlen_q=most_rows or q.shape[0],
        return_softmax_lse=True,
    )
    return out, lse


def dense_prefix(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Hydragen's prefix pass: product, softmax, product, each by a library; shapes as `fa3_prefix`.

    The score matrix is held in bf16, as the products need it. The LSE comes from the largest score
    and the largest weight, which costs less than a sum of its own.
    """
    rows, num_q_heads, dim = q.shape
    num_kv_heads = k.shape[1]
    queries = q.view(rows, num_kv_heads, -1, dim).transpose(0, 1).reshape(num_kv_heads, -1, dim)
    scores = torch.bmm(queries * dim**-0.5, k.permute(1, 2, 0))
    weights = torch.softmax(scores, -1)
    lse = scores.amax(-1).float() - weights.amax(-1).float().log()
    out = torch.bmm(weights, v.transpose(0, 1)).view(num_kv_heads, rows, -1, dim)
    lse = lse.view(num_kv_heads, rows, -1).transpose(1, 2)
    return out.transpose(0, 1).reshape(q.shape), lse.reshape(num_q_heads, rows)


def forked(first: Callable[[], Any], second: Callable[[], Any], side_stream: Any) -> Any:
    """Results of two calls, the second on a stream forked from the current one and joined to it."""
    main = torch.cuda.current_stream()
    side_stream.wait_stream(main)
    with torch.cuda.stream(side_stream):
        on_side = second()
    on_main = first()
    main.wait_stream(side_stream)
    return on_main, on_side


def flashinfer_cascade(
    heads: Heads, rows: int, prefix_slots: Any, private_slots: Any
) -> Callable[[Any, Any, Any], Any]:
    """FlashInfer's two-level cascade over one prefix, planned; call it with q and the pages.

    Args:
        prefix_slots: `[prefix_tokens]` int32.
        private_slots: `[rows, private_tokens]` int32.

    Raises:
        ImportError: FlashInfer is not installed. It compiles its kernels on first use, and raises
            what it likes where there is no compiler.
    """
    from flashinfer import (  # type: ignore[import-not-found,unused-ignore]
        MultiLevelCascadeAttentionWrapper,
    )

    def ints(*values: int) -> Any:
        return torch.tensor(values, dtype=torch.int32, device=prefix_slots.device)

    starts = torch.arange(rows + 1, dtype=torch.int32, device=prefix_slots.device)
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=prefix_slots.device)
    wrapper = MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
    wrapper.plan(
        [ints(0, rows), starts],
        [ints(0, prefix_slots.numel()), starts * private_slots.shape[1]],
        [prefix_slots, private_slots.flatten()],
        [ints(1), torch.ones_like(starts[1:])],
        heads.q,
        heads.kv,
        heads.dim,
        1,
        causal=False,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    return lambda q, k_pages, v_pages: wrapper.run(q, (k_pages, v_pages))


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
    for package in ("sglang-kernel", "triton", "nvidia-cublas", "flashinfer-python"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found
