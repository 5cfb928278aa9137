"""Public kernel tables: a compact cut that ships with the project, and how it was made."""

from pathlib import Path

import polars as pl

from granikv.core.errors import ConfigError
from granikv.cost_models.catalog import DATA

TABLE_SOURCE = "aiconfigurator-core 0.12.0 (NVIDIA, Apache-2.0)"

# Folder of the package's tables and SGLang version, for each GPU that has them.
TABLES = {"a100-sxm4-80gb": ("a100_sxm", "0.5.10"), "h200-sxm": ("h200_sxm", "0.5.14")}
# The attention kernel that SGLang chooses by default on each GPU.
ATTENTION_KERNEL = {"a100-sxm4-80gb": "flash_attention", "h200-sxm": "fa3"}

_TERMS = {
    "gemm": "gemm/sglang/{version}/gemm_perf.parquet",
    "paged": "attention/sglang/{version}/generation_attention_perf.parquet",
    "extend": "attention/sglang/{version}/context_attention_perf.parquet",
    "all_reduce": "comm/sglang/{version}/custom_allreduce_perf.parquet",
}
_HEADS = (
    pl.col("num_heads").cast(pl.Int32).alias("num_q_heads"),
    pl.col("num_key_value_heads").cast(pl.Int32).alias("num_kv_heads"),
    pl.col("head_dim").cast(pl.Int32),
)
_SIZES: dict[str, tuple[pl.Expr, ...]] = {
    "gemm": tuple(pl.col(name).cast(pl.Int32) for name in ("n", "k", "m")),
    "paged": (
        *_HEADS,
        pl.col("batch_size").cast(pl.Int32).alias("rows"),
        (pl.col("step") + pl.col("isl")).cast(pl.Int32).alias("tokens"),
    ),
    "extend": (
        *_HEADS,
        pl.col("batch_size").cast(pl.Int32).alias("rows"),
        pl.col("isl").cast(pl.Int32).alias("tokens"),
    ),
    # The tables count elements of bf16.
    "all_reduce": (
        pl.col("num_gpus").cast(pl.Int32),
        (pl.col("message_size") * 2).cast(pl.Int64).alias("bytes"),
    ),
}


def cut_path(gpu: str, term: str) -> Path:
    """Where the cut of one GPU's rows of one term is kept."""
    return DATA / "rows" / f"{gpu}.{term}.parquet"


def read_public(gpu: str, term: str) -> pl.DataFrame | None:
    """The shipped cut: sizes and `time_us` of `gemm`, `paged`, `extend` or `all_reduce` rows.

    None when the public tables have no rows of that GPU.
    """
    path = cut_path(gpu, term)
    return pl.read_parquet(path) if path.exists() else None


def sizes_of(term: str) -> tuple[pl.Expr, ...]:
    """The columns of a cut but its time, as expressions over the package's own table."""
    return _SIZES[term]


def table_paths(systems: Path, gpu: str) -> dict[str, Path]:
    """Term to the package's own table: below `systems/data`, or below `systems` in a copy."""
    folder, version = TABLES[gpu]
    data = systems / "data" if (systems / "data").is_dir() else systems
    return {term: data / folder / place.format(version=version) for term, place in _TERMS.items()}


def cut_tables(systems: Path, gpu: str, out: Path) -> list[Path]:
    """Write the cuts of one GPU from the package's own tables.

    Kept are bf16 rows of SGLang's default kernel with a full attention window, and all-reduces
    inside CUDA graphs: what the fit uses.

    Args:
        systems: the package's folder `systems`, or one that holds `a100_sxm` and `h200_sxm`.
        gpu: name of the hardware file.
        out: folder for `<gpu>.<term>.parquet`.

    Raises:
        ConfigError: a table is missing.
    """
    written = []
    for term, path in table_paths(systems, gpu).items():
        if not path.exists():
            raise ConfigError(f"{path} is missing; give the folder of the package's systems.")
        sizes = _SIZES[term]
        time_us = (pl.col("latency") * 1e3).cast(pl.Float32).alias("time_us")
        frame = used_rows(pl.read_parquet(path), gpu, term).select(*sizes, time_us)
        names = [name for name in frame.columns if name != "time_us"]
        target = out / f"{gpu}.{term}.parquet"
        frame.sort(names).write_parquet(target, compression="zstd", compression_level=19)
        written.append(target)
    return written


def used_rows(table: pl.DataFrame, gpu: str, term: str) -> pl.DataFrame:
    """The rows of a package table that a cut keeps."""
    if term == "gemm":
        return table.filter(pl.col("gemm_dtype") == "bfloat16")
    if term == "all_reduce":
        return table.filter(pl.col("backend") == "sglang_graph")
    kept = (pl.col("kernel_source") == ATTENTION_KERNEL[gpu]) & (pl.col("attn_dtype") == "bfloat16")
    kept &= pl.col("kv_cache_dtype") == "bfloat16"
    if "window_size" in table.columns:
        kept &= pl.col("window_size") == 0
    return table.filter(kept)
