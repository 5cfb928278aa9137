"""Our own rows of each term, in the columns of the public cuts."""

import polars as pl

# Public attention times of the H200 stand this much above ours where both are shorter than 10 us:
# a call inside a graph that shares its tile schedule with the other layers costs less.
ATTENTION_OVERHEAD_US = 2.2

_HEADS = ("num_q_heads", "num_kv_heads", "head_dim")
_SIZES = (*_HEADS, "rows", "tokens")


def gemm_rows(own: pl.DataFrame) -> pl.DataFrame:
    """`n, k, m, time_us` of cuBLAS products."""
    return own.filter(pl.col("op") == "gemm").select("n", "k", "m", "time_us")


def paged_rows(own: pl.DataFrame) -> pl.DataFrame:
    """Decode over private pages of size 1, called as SGLang's graphs call it."""
    kept = (pl.col("op") == "decode_attention") & (pl.col("backend") == "fa3")
    kept &= (pl.col("prefixes") == 0) & (pl.col("page_size") == 1)
    return own.filter(kept).select(*_SIZES, "time_us")


def shared_rows(own: pl.DataFrame) -> pl.DataFrame:
    """Decode where rows read the same physical pages of size 1; `prefixes` equal ones."""
    kept = (pl.col("op") == "decode_attention") & (pl.col("backend") == "fa3")
    kept &= (pl.col("prefixes") > 0) & (pl.col("page_size") == 1)
    return own.filter(kept).select(*_SIZES, "length", "prefixes", "sharers", "base", "time_us")


def dense_rows(own: pl.DataFrame) -> pl.DataFrame:
    """The prefix pass over a contiguous prefix: `rows` requests, `length` tokens."""
    kept = (pl.col("op") == "prefix_pass") & (pl.col("backend") == "fa3")
    return own.filter(kept).select(*_HEADS, "rows", "length", "time_us")


def extend_rows(own: pl.DataFrame) -> pl.DataFrame:
    """Extend attention: `tokens` new ones of each of `rows` requests over `cached` ones."""
    new = pl.col("m") / pl.col("rows")
    return (
        own.filter(pl.col("op") == "extend_attention")
        .with_columns(cached=pl.col("length") * (pl.col("prefixes") > 0) + pl.col("tokens") - new)
        .with_columns(tokens=new)
        .select(*_SIZES, "cached", "time_us")
    )


def traffic_rows(own: pl.DataFrame, op: str, backend: str) -> pl.DataFrame:
    """`bytes, time_us` of a kernel that only moves memory."""
    kept = (pl.col("op") == op) & (pl.col("backend") == backend)
    return own.filter(kept).select("bytes", "time_us")
