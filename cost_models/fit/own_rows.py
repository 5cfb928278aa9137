"""Our own rows of each term, in the columns of the public cuts."""

import polars as pl

# Public attention times of the H200 stand this much above ours where both are shorter than 10 us:
# a call inside a graph that shares its tile schedule with the other layers costs less.
ATTENTION_OVERHEAD_US = 2.2

# The prefix pass of GraniKV's that runs on Hopper; its other one is for older GPUs.
OWN_DENSE = "granikv_hopper"

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
    """Decode where rows read the same physical pages of size 1; `prefixes` equal ones.

    Batches of unlike or nested prefixes are left out: no one reader count describes them.
    """
    kept = (pl.col("op") == "decode_attention") & (pl.col("backend") == "fa3")
    kept &= (pl.col("prefixes") > 0) & pl.col("are_equal") & (pl.col("page_size") == 1)
    return own.filter(kept).select(*_SIZES, "length", "prefixes", "sharers", "base", "time_us")


def dense_rows(own: pl.DataFrame) -> pl.DataFrame:
    """The prefix pass over a contiguous prefix: `rows` requests, `length` tokens.

    GraniKV's own where it was measured; FA3's, which an engine may choose too, outside of the sizes
    that those rows span.
    """
    frame = own.filter(pl.col("op") == "prefix_pass").with_columns(
        tile_rows=pl.col("rows") * pl.col("num_q_heads") / pl.col("num_kv_heads")
    )
    mine, fa3 = (frame.filter(pl.col("backend") == name) for name in (OWN_DENSE, "fa3"))
    if mine.height:
        spanned = pl.all_horizontal(
            pl.col(name).is_between(mine[name].min(), mine[name].max())
            for name in ("tile_rows", "length", "num_kv_heads", "head_dim")
        )
        fa3 = fa3.filter(~spanned)
    return pl.concat([fa3, mine]).select(*_HEADS, "rows", "length", "backend", "time_us")


def operator_rows(own: pl.DataFrame) -> pl.DataFrame:
    """GraniKV's whole operator and stock FA3 over the same shared segments, one row a call.

    Added columns: `mode` (of every segment) and `is_overlapped` (one launch, or passes side by
    side).
    """
    name = pl.col("backend")
    is_ours = name.str.starts_with("granikv_")
    kept = (pl.col("op") == "decode_attention") & (pl.col("prefixes") > 0)
    kept &= (pl.col("page_size") == 1) & (is_ours | (name == "fa3"))
    mode = name.str.extract("_(dense|cascade|paged)")
    return own.filter(kept).with_columns(
        mode=pl.when(is_ours).then(mode).otherwise(pl.lit("paged")),
        is_overlapped=is_ours & name.str.contains("_fused|_split|_beside|_stream"),
    )


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


def dense_source(dense: pl.DataFrame) -> str:
    """Whose prefix passes `dense_rows` holds, and over which sizes, in words."""
    mine = dense.filter(pl.col("backend") == OWN_DENSE)
    fa3 = f"FA3's prefix pass ({dense.height - mine.height} rows)"
    if not mine.height:
        return fa3
    tile_rows = mine["rows"] * mine["num_q_heads"] / mine["num_kv_heads"]
    sizes = (tile_rows, mine["length"], mine["num_kv_heads"])
    spans = ", ".join(
        f"{min(values.to_list()):,.0f} to {max(values.to_list()):,.0f} {what}"
        for values, what in zip(sizes, ("rows x group", "tokens", "kv heads"), strict=True)
    )
    return f"GraniKV's own prefix pass ({mine.height} rows: {spans}); elsewhere {fa3}"


def source_of(own: pl.DataFrame) -> str:
    """When rows were measured, in words."""
    dates: list[str] = own["date"].unique().sort().to_list()
    if len(dates) == 1:
        return f"own sweep of {dates[0]}"
    return f"own sweeps of {dates[0]} to {dates[-1]}"
