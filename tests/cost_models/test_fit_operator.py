"""Rows of GraniKV's own kernels: which count, and the launch and threshold that they give."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from granikv.core.step import Mode
from granikv.cost_models.fit import own_rows
from granikv.cost_models.fit.dense import fit_dense
from granikv.cost_models.fit.fused import fit_cascade, fit_fused, slowed, with_values, work_ns
from granikv.cost_models.fit.operator_terms import _PRIVATE_PASS, operator_items
from granikv.cost_models.fit.rereads import fit_rereads
from granikv.cost_models.fit.saturation import fit_saturation
from granikv.cost_models.hardware import load_hardware
from granikv.cost_models.ideal import Peaks
from granikv.cost_models.params import Terms, load_params
from granikv.cost_models.readers.own import import_lines, read_own

H200 = load_hardware("h200-sxm")
PARAMS = load_params("h200-sxm")
LLAMA, QWEN_TP2 = (32, 8), (20, 4)
ROWS, LENGTHS = (8, 32, 64, 256), (2048, 8192, 32768)


def _row(
    backend: str,
    time_us: float = 100.0,
    heads: tuple[int, int] = LLAMA,
    rows: int = 64,
    segments: list[list[int]] | None = None,
    private: int = 256,
    op: str = "decode_attention",
) -> dict[str, object]:
    """One line of `granikv bench kernels`; all rows over 8K tokens unless segments say other."""
    segments = [[1, 8192, rows]] if segments is None else segments
    return {
        "op": op,
        "backend": backend,
        "gpu": "h200-sxm",
        "dtype": "bfloat16",
        "num_q_heads": heads[0],
        "num_kv_heads": heads[1],
        "head_dim": 128,
        "page_size": 1,
        "rows": rows,
        "segments_json": json.dumps(segments),
        "private_tokens": rows * private,
        "times_us": [time_us] * 3,
        "date": "2026-11-30",
        "source": "test",
    }


@pytest.fixture
def read(tmp_path: Path) -> Callable[[list[dict[str, object]]], pl.DataFrame]:
    """Rows by the way that they take from a benchmark into a fit."""

    def read_lines(rows: list[dict[str, object]]) -> pl.DataFrame:
        lines, out = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
        lines.write_text("\n".join(map(json.dumps, rows)))
        import_lines([lines], out)
        return read_own([out])

    return read_lines


Read = Callable[[list[dict[str, object]]], pl.DataFrame]


def test_unlike_and_nested_prefixes_do_not_count_as_equal_ones(read: Read) -> None:
    equal = [[1, 2048, 32], [2049, 2048, 32]]
    mixed = [[1, 2048, 32], [2049, 4096, 32]]
    uneven = [[1, 2048, 16], [2049, 2048, 48]]
    nested = [[1, 2048, 64], [2049, 1024, 32], [3073, 1024, 32]]
    stacked = [[1, 2048, 64], [2049, 2048, 64]]
    batches = (equal, mixed, uneven, nested, stacked, [[1, 8192, 64]], [])
    own = read([_row("fa3", segments=segments) for segments in batches])
    assert own_rows.shared_rows(own)["prefixes"].sort().to_list() == [1, 2]
    assert own_rows.paged_rows(own).height == 1


def test_own_prefix_passes_replace_fa3s_where_they_span(read: Read) -> None:
    def passes(backend: str, sizes: list[tuple[int, int]], time_us: float) -> list:
        return [
            _row(backend, time_us, rows=rows, segments=[[1, n, rows]], private=0, op="prefix_pass")
            for rows, n in sizes
        ]

    everywhere = [(rows, length) for rows in ROWS for length in LENGTHS]
    fa3 = passes("fa3", everywhere, 100.0)
    assert own_rows.dense_rows(read(fa3)).height == len(everywhere)
    assert own_rows.dense_source(own_rows.dense_rows(read(fa3))).startswith("FA3's prefix pass")
    others = passes("granikv_triton", everywhere, 1.0) + passes(
        "granikv_fused_dense", [(8, 2048)], 1
    )
    mine = passes("granikv_hopper", [(64, 8192), (256, 8192), (256, 32768)], 90.0)
    rows = own_rows.dense_rows(read(fa3 + others + mine))
    counts = dict(rows.group_by("backend").len().iter_rows())
    assert counts == {"fa3": len(everywhere) - 4, "granikv_hopper": 3}
    assert "(3 rows: 256 to 1,024 rows x group, 8,192 to 32,768 tokens, 8 to 8 kv heads)" in (
        own_rows.dense_source(rows)
    )


def test_dense_follows_its_own_rows_inside_and_fa3s_outside(read: Read) -> None:
    peaks = Peaks.of(H200)

    def passes(backend: str, kv: int, share: float, lengths: tuple[int, ...]) -> list:
        return [
            _row(
                backend,
                6 + 4 * 128 * kv * length * max(4 * rows, 128) / peaks.flops / share / 1e3,
                (4 * kv, kv),
                rows,
                [[1, length, rows]],
                0,
                "prefix_pass",
            )
            for rows in (64, 128, 256, 512)
            for length in lengths
        ]

    lengths = (1024, 2048, 4096, 8192, 16384, 32768)
    fa3 = [row for kv in (1, 2, 4, 8) for row in passes("fa3", kv, 0.5, lengths)]
    mine = passes("granikv_hopper", 8, 0.65, (8192, 16384, 32768))
    fit = fit_dense(own_rows.dense_rows(read(fa3 + mine)), peaks)
    assert fit.surface.efficiency(1024, 16384, 8) == pytest.approx(0.65, rel=0.04)
    assert fit.surface.efficiency(1024, 16384, 1) == pytest.approx(0.5, rel=0.04)
    assert fit.surface.efficiency(1024, 1024, 8) == pytest.approx(0.5, rel=0.06)


def _operator(latency_ns: float, read: Read) -> pl.DataFrame:
    """Whole calls that take the predicted work and one latency, a slower twin beside each."""
    one = [
        (heads, rows, [[1, n, rows]])
        for heads in (LLAMA, QWEN_TP2)
        for rows in ROWS
        for n in LENGTHS
    ]
    slabs = [(LLAMA, 64, [[1, 2048, 32], [2049, 8192, 32]])]
    kinds = one + slabs
    calls = read([_row("granikv_fused_dense", 1.0, *kind) for kind in kinds])
    params = with_values(PARAMS, {"fused_exposed_share": 0.0})
    times = (np.array(work_ns(calls, params, H200)) + latency_ns) / 1e3
    return read(
        [
            _row(backend, time * slower, *kind)
            for kind, time in zip(kinds, times.tolist(), strict=True)
            for backend, slower in (
                ("granikv_fused_dense", 1.2),
                ("granikv_two_call_beside_dense", 1.0),
                ("granikv_two_call_dense", 0.5),
                ("granikv_fused_cascade", 1.1),
                ("fa3", 1.3),
            )
        ]
    )


@pytest.mark.parametrize("latency_ns", [0.0, 7000.0])
def test_fused_latency_is_what_the_best_overlapped_call_leaves(
    latency_ns: float, read: Read
) -> None:
    rows = own_rows.operator_rows(_operator(latency_ns, read))
    fit = fit_fused(rows.filter(pl.col("mode") == "dense"), PARAMS, H200)
    assert fit.latency_ns == pytest.approx(latency_ns, abs=20)
    assert fit.exposed_share == pytest.approx(0.0, abs=0.005)
    assert fit.residual < 0.01
    assert fit.error.p90 < 0.01
    assert fit.rows == 25
    assert fit.error.shapes == 6


def test_exposed_share_is_what_calls_take_beyond_their_greater_part(read: Read) -> None:
    """Of calls that take less than their passes one by one would: there, a share can show."""
    share, latency_ns = 0.2, 5000.0
    kinds = [
        (heads, rows, [[1, n, rows]], private)
        for heads in (LLAMA, QWEN_TP2)
        for rows in (64, 128, 256)
        for n in (8192, 16384, 32768)
        for private in (256, 512)
    ]
    params = with_values(PARAMS, {"fused_exposed_share": share})
    calls = read([_row("granikv_fused_dense", 1.0, *kind) for kind in kinds])
    exposing, one_by_one = (
        np.array(work_ns(calls, with_values(params, {"fused_exposed_share": value}), H200))
        for value in (share, 1.0)
    )
    free = exposing < one_by_one
    assert free.sum() > 12
    rows = [
        _row("granikv_fused_dense", (time + latency_ns) / 1e3, *kind)
        for kind, time, is_free in zip(kinds, exposing.tolist(), free.tolist(), strict=True)
        if is_free
    ]
    fit = fit_fused(own_rows.operator_rows(read(rows)), PARAMS, H200)
    assert fit.exposed_share == pytest.approx(share, abs=0.01)
    assert fit.latency_ns == pytest.approx(latency_ns, abs=200)
    assert fit.residual < 0.005


def test_cascade_rates_are_the_share_that_its_calls_show(read: Read) -> None:
    slow = slowed(PARAMS, 10**-0.5)  # the grid of shares has such values only near by
    kinds = [(LLAMA, rows, [[1, n, rows]]) for rows in ROWS for n in LENGTHS]
    calls = read([_row("granikv_fused_cascade", 1.0, *kind) for kind in kinds])
    latency_ns = PARAMS.terms.fused_latency_ns.value
    times = (np.array(work_ns(calls, slow, H200, Mode.CASCADE)) + latency_ns) / 1e3
    rows = [
        _row("granikv_fused_cascade", time, *kind)
        for kind, time in zip(kinds, times.tolist(), strict=True)
    ]
    fit = fit_cascade(own_rows.operator_rows(read(rows)), PARAMS, H200)
    assert fit.share == pytest.approx(10**-0.5, rel=0.05)
    assert fit.error.median < 0.05
    assert fit.rows == 12


def _compared(read: Read, dense_wins: Callable[[int, int], bool]) -> pl.DataFrame:
    """Calls where dense takes 90 or 110 % of a cascade, by effective rows and length."""
    own = read(
        [
            _row(backend, time, rows=rows, segments=[[1, length, rows]])
            for rows in ROWS
            for length in (512, 4096, *LENGTHS)
            for backend, time in (
                ("granikv_fused_dense", 90.0 if dense_wins(4 * rows, length) else 110.0),
                ("granikv_fused_cascade", 100.0),
                ("fa3", 400.0),
            )
        ]
    )
    return own_rows.operator_rows(own)


def test_m_sat_is_the_least_size_from_which_dense_wins(read: Read) -> None:
    found = fit_saturation(_compared(read, lambda effective, length: effective >= 256))
    assert found is not None
    assert (found.m_sat, found.below, found.least, found.most) == (256, 128, 32, 1024)
    assert found.lengths == (2048, 32768)
    assert found.without_a_length == (256, 256)
    assert (found.cells, found.rows, found.worst_loss) == (16, 48, 0.0)


def test_m_sat_needs_dense_to_win_at_every_larger_size(read: Read) -> None:
    found = fit_saturation(_compared(read, lambda effective, length: effective not in (128, 32)))
    assert found is not None
    assert found.m_sat == 256
    found = fit_saturation(_compared(read, lambda effective, length: effective != 128))
    assert found is not None
    assert found.m_sat == 256
    assert found.worst_loss == pytest.approx(1 / 0.9 - 1)  # 32 effective rows would run dense


def test_m_sat_says_when_no_smaller_size_lost_and_when_none_won(read: Read) -> None:
    found = fit_saturation(_compared(read, lambda effective, length: True))
    assert found is not None
    assert (found.m_sat, found.below) == (32, None)
    assert fit_saturation(_compared(read, lambda effective, length: False)) is None
    assert fit_saturation(_compared(read, lambda effective, length: True).head(3)) is None


def test_items_are_parameters_with_their_evidence(read: Read) -> None:
    items = operator_items(_operator(7000.0, read), PARAMS, H200)
    terms = Terms.model_validate(dict(PARAMS.terms.items()) | items)
    assert terms.fused_latency_ns.provenance == "fitted"
    assert terms.fused_latency_ns.value == pytest.approx(7000, abs=20)
    assert terms.fused_latency_ns.rows_used == 25
    assert terms.fused_latency_ns.held_out is not None
    assert "passes over prefixes and its private pass" in terms.fused_latency_ns.source
    assert terms.fused_exposed_share.provenance == "fitted"
    assert terms.fused_exposed_share.value == pytest.approx(0.0, abs=0.005)
    assert terms.fused_exposed_share.source == terms.fused_latency_ns.source
    assert terms.m_sat is not None
    assert terms.m_sat.value == 32
    assert "dense was fastest at every size measured" in terms.m_sat.source


def test_rows_without_our_operator_give_nothing(read: Read) -> None:
    assert operator_items(read([_row("fa3")]), PARAMS, H200) == {}
    assert operator_items(read_own([]), PARAMS, H200) == {}


def _private_passes(share: float) -> list[dict[str, object]]:
    """Calls of the private pass alone that take 9 us, 4 KiB/ns of private tokens, and a share of
    that time of what rows have in common.
    """
    return [
        _row(
            "granikv_stream_paged",
            9 + 512 * heads[1] / 4096e3 * rows * (private + share * length),
            heads,
            rows,
            [[1 + i * length, length, rows // prefixes] for i in range(prefixes)],
            private,
        )
        for heads in (LLAMA, QWEN_TP2)
        for rows in (32, 64, 256)
        for length in LENGTHS
        for prefixes in (1, 4)
        for private in (64, 1024)
    ]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_shared_reads_cost_the_share_that_private_passes_show(share: float, read: Read) -> None:
    rows = _private_passes(share)
    # Fewer than eight readers leave the card half empty and count not; nor do other kernels.
    few = [_row("granikv_stream_paged", 9e3, rows=4, segments=[[1, 8192, 4]])] * 3
    others = [_row("fa3", 5e3), _row("granikv_fused_cascade", 5e3)]
    own = read(rows + few + others)
    fit = fit_rereads(own_rows.operator_rows(own).filter(pl.col("backend") == _PRIVATE_PASS))
    assert fit.share == pytest.approx(share, abs=2e-3)
    assert fit.rows == len(rows)
    assert fit.residual < 1e-3
    assert fit.error.shapes == 6
    item = operator_items(own, PARAMS, H200)["private_reread_share"]
    assert item["value"] == pytest.approx(share, abs=2e-3)
    assert item["provenance"] == "fitted"


def test_one_call_in_ten_that_took_twice_as_long_moves_the_share_little(read: Read) -> None:
    rows = _private_passes(0.3)
    for row in rows[::10]:
        row["times_us"] = [2 * time for time in row["times_us"]]  # type: ignore[attr-defined]
    fit = fit_rereads(own_rows.operator_rows(read(rows)))
    assert fit.share == pytest.approx(0.3, abs=0.03)
