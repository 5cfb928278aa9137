"""Readers: public cuts and our own rows."""

import json
from pathlib import Path

import polars as pl
import pytest

from granikv.core.errors import ConfigError
from granikv.cost_models.fit import own_rows
from granikv.cost_models.readers.own import import_lines, own_path, read_own
from granikv.cost_models.readers.public import TABLES, cut_tables, read_public, table_paths

_LINE = {
    "op": "decode_attention",
    "backend": "fa3",
    "gpu": "h200-sxm",
    "dtype": "bfloat16",
    "num_q_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "page_size": 1,
    "rows": 64,
    "segments_json": "[[1, 2048, 32], [2049, 2048, 32]]",
    "private_tokens": 6400,
    "m": None,
    "n": None,
    "k": None,
    "num_gpus": 1,
    "bytes": None,
    "times_us": [10.0, 12.0, 11.0],
    "versions_json": "{}",
    "clocks": None,
    "date": "2026-11-30",
    "source": "test",
}


def _write(path: Path, *changes: dict[str, object]) -> Path:
    path.write_text("\n".join(json.dumps(_LINE | change) for change in changes))
    return path


def test_lines_become_rows_with_medians_and_prefixes(tmp_path: Path) -> None:
    lines = _write(tmp_path / "a.jsonl", {}, {"segments_json": "[]", "private_tokens": 640})
    out = tmp_path / "a.parquet"
    assert import_lines([lines], out) == 2
    shared, private = read_own([out]).sort("prefixes", descending=True).iter_rows(named=True)
    assert shared["time_us"] == 11.0
    assert (shared["prefixes"], shared["length"], shared["sharers"]) == (2, 2048, 32)
    assert (shared["base"], shared["tokens"]) == (1, 100)
    assert (private["prefixes"], private["length"], private["sharers"]) == (0, 0, 1)
    assert private["tokens"] == 10


def test_unsteady_rows_are_left_out(tmp_path: Path) -> None:
    lines = _write(tmp_path / "a.jsonl", {}, {"times_us": [10.0, 20.0, 30.0, 40.0]})
    import_lines([lines], tmp_path / "a.parquet")
    assert read_own([tmp_path / "a.parquet"]).height == 1


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    lines = _write(tmp_path / "a.jsonl", {}, {"rows": -3})
    with pytest.raises(ConfigError, match=r"a.jsonl, line 2: .*rows.*measure it again"):
        import_lines([lines], tmp_path / "a.parquet")


def test_no_rows_at_all_is_an_empty_frame() -> None:
    assert read_own([]).height == 0
    assert own_rows.paged_rows(read_own([])).height == 0


def test_extend_rows_count_new_and_cached_tokens(tmp_path: Path) -> None:
    extend = {"op": "extend_attention", "rows": 2, "m": 512, "segments_json": "[]"}
    lines = _write(
        tmp_path / "a.jsonl",
        extend | {"private_tokens": 2 * (256 + 4096)},
        extend | {"private_tokens": 2 * 256, "segments_json": "[[1, 4096, 2]]"},
    )
    import_lines([lines], tmp_path / "a.parquet")
    rows = own_rows.extend_rows(read_own([tmp_path / "a.parquet"]))
    assert rows["tokens"].to_list() == [256, 256]
    assert rows["cached"].to_list() == [4096, 4096]


def test_the_shipped_sweep_covers_what_the_public_tables_lack() -> None:
    own = read_own([own_path("h200-sxm")])
    assert set(own["gpu"]) == {"h200-sxm"}
    assert own_rows.extend_rows(own).filter(pl.col("cached") > 0).height > 200
    groups = own_rows.shared_rows(own).select(pl.col("num_q_heads") / pl.col("num_kv_heads"))
    assert {1, 2, 4, 5, 8} <= set(groups.to_series())
    assert own_rows.gemm_rows(own).select("n", "k").n_unique() >= 30


@pytest.mark.parametrize("gpu", list(TABLES))
@pytest.mark.parametrize("term", ["gemm", "paged", "extend", "all_reduce"])
def test_shipped_cuts_are_whole(gpu: str, term: str) -> None:
    frame = read_public(gpu, term)
    assert frame is not None
    assert frame.null_count().sum_horizontal().item() == 0
    assert (frame["time_us"] > 0).all()
    keys = [name for name in frame.columns if name != "time_us"]
    assert frame.select(keys).is_unique().all()


def test_other_gpus_have_no_public_rows() -> None:
    assert read_public("h100-sxm", "gemm") is None


def test_a_cut_keeps_only_what_is_used(tmp_path: Path) -> None:
    """bf16, the default kernel, a full window; sizes and times in our units."""
    for term, path in table_paths(tmp_path, "h200-sxm").items():
        path.parent.mkdir(parents=True, exist_ok=True)
        _TABLES[term].write_parquet(path)
    cut_tables(tmp_path, "h200-sxm", tmp_path)
    gemm, paged, extend, reduce = (
        pl.read_parquet(tmp_path / f"h200-sxm.{term}.parquet").rows()
        for term in ("gemm", "paged", "extend", "all_reduce")
    )
    assert gemm == [(8, 4, 2, 1000.0)]
    assert paged == [(32, 8, 128, 4, 1024, 20.0)]
    assert extend == [(32, 8, 128, 2, 512, 30.0)]
    assert reduce == [(2, 256, 5.0)]


_ATTENTION = {
    "kernel_source": ["fa3", "triton", "fa3", "fa3"],
    "attn_dtype": ["bfloat16"] * 4,
    "kv_cache_dtype": ["bfloat16", "bfloat16", "fp8", "bfloat16"],
    "window_size": [0, 0, 0, 128],
    "num_heads": [32] * 4,
    "num_key_value_heads": [8] * 4,
    "head_dim": [128] * 4,
}
_TABLES = {
    "gemm": pl.DataFrame(
        {"gemm_dtype": ["bfloat16", "fp8"], "m": [2, 2], "n": [8, 8], "k": [4, 4], "latency": 1.0}
    ),
    "paged": pl.DataFrame(_ATTENTION | {"batch_size": 4, "isl": 1, "step": 1023, "latency": 0.02}),
    "extend": pl.DataFrame(_ATTENTION | {"batch_size": 2, "isl": 512, "step": 0, "latency": 0.03}),
    "all_reduce": pl.DataFrame(
        {
            "backend": ["sglang_graph", "sglang_eager"],
            "num_gpus": [2, 2],
            "message_size": [128, 128],
            "latency": [0.005, 0.009],
        }
    ),
}


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gemm_perf.parquet is missing"):
        cut_tables(tmp_path, "a100-sxm4-80gb", tmp_path)
