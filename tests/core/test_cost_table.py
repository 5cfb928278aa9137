"""CostTable: checked when it is made, kept bit for bit in a file, frozen."""

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from granikv.core.cost_table import CostTable
from granikv.core.errors import ConfigError


def _table() -> CostTable:
    """Small, with numbers that decimal text could lose."""
    rng = np.random.default_rng(1)
    return CostTable(
        rows=np.array([1, 8, 64], np.int64),
        lengths=np.array([64, 4096], np.int64),
        prefix_ns=rng.random((3, 2, 3)) / 3,
        private_ns=rng.random((3, 2, 3)) * 1e9,
        pass_latency_ns=np.array([0.1, 1 / 3, 2e-300]),
        private_ns_per_token=rng.random(3),
        private_latency_ns=0.1 + 0.2,
        fused_latency_ns=None,
        fused_exposed_share=1 / 3,
        merge_ns=rng.random(3),
        gemm_ns=rng.random(3),
        collective_ns=np.zeros(3),
        num_layers=32,
        group=4,
        m_sat=184,
        meta={"gpu": "h200-sxm", "provenance": {"gemm": "stated"}, "tp": 1},
    )


@pytest.mark.parametrize("fused_latency_ns", [None, 1 / 9])
def test_a_file_gives_the_table_back_bit_for_bit(
    tmp_path: Path, fused_latency_ns: float | None
) -> None:
    table = replace(_table(), fused_latency_ns=fused_latency_ns)
    path = tmp_path / "gpu.model.tp1.dispatch.json"
    table.save(path)
    loaded = CostTable.load(path)
    for field in fields(CostTable):
        kept, got = getattr(table, field.name), getattr(loaded, field.name)
        if isinstance(kept, np.ndarray):
            assert got.dtype == kept.dtype
            assert got.tobytes() == kept.tobytes()
        else:
            assert got == kept
    again = tmp_path / "again.json"
    loaded.save(again)
    assert again.read_bytes() == path.read_bytes()


def test_a_table_cannot_be_changed() -> None:
    table = _table()
    with pytest.raises(ValueError, match="read-only"):
        table.prefix_ns[0, 0, 0] = 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": np.array([1, 1, 2], np.int64)}, "rows must be at least two ascending"),
        ({"rows": np.array([0, 1, 2], np.int64)}, "rows must be at least two ascending"),
        ({"lengths": np.array([64], np.int64)}, "lengths must be at least two ascending"),
        ({"prefix_ns": np.zeros((3, 3, 2))}, r"prefix_ns must have shape \(3, 2, 3\)"),
        ({"merge_ns": np.zeros(2)}, r"merge_ns must have shape \(3,\)"),
        ({"gemm_ns": np.array([1.0, np.nan, 1.0])}, "gemm_ns must be finite"),
        ({"private_ns": np.full((3, 2, 3), -1.0)}, "private_ns must be finite and not negative"),
        ({"private_ns_per_token": np.zeros(2)}, r"private_ns_per_token must have shape \(3,\)"),
        ({"private_latency_ns": -1.0}, "private_latency_ns must be a number and not negative"),
        ({"private_latency_ns": None}, "private_latency_ns must be a number and not negative"),
        ({"fused_exposed_share": 1.1}, "fused_exposed_share must be a number from 0 to 1"),
        ({"fused_exposed_share": -0.1}, "fused_exposed_share must be a number from 0 to 1"),
        ({"fused_exposed_share": None}, "fused_exposed_share must be a number from 0 to 1"),
    ],
)
def test_wrong_arrays_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(_table(), **change)  # type: ignore[arg-type]


def _saved(tmp_path: Path) -> tuple[Path, dict[str, object]]:
    path = tmp_path / "table.json"
    _table().save(path)
    return path, json.loads(path.read_text())


def _assert_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a dispatch table") as caught:
        CostTable.load(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    _assert_refused(tmp_path / "nothing.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"format": "other"}', "{}"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    _assert_refused(path)


def test_a_table_of_the_time_before_private_passes_is_refused(tmp_path: Path) -> None:
    path, body = _saved(tmp_path)
    body["compute_ns"], body["memory_ns"] = body.pop("prefix_ns"), body.pop("private_ns")
    path.write_text(json.dumps(body | {"format": "granikv-cost-table-2"}))
    with pytest.raises(ConfigError, match="format must be granikv-cost-table-3"):
        CostTable.load(path)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_fused_launch_leaves_a_share_of_the_shorter_sum(share: float) -> None:
    table = replace(_table(), fused_exposed_share=share)
    for prefix, private in [(3.0, 8.0), (8.0, 3.0), (5.0, 5.0), (0.0, 2.0)]:
        expected = max(prefix, private) + share * min(prefix, private)
        assert table.overlapped_ns(prefix, private) == pytest.approx(expected, rel=1e-12)


def test_binary_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(b"\x93NUMPY\xff\xfe")
    _assert_refused(path)


@pytest.mark.parametrize("missing", ["rows", "prefix_ns", "fused_exposed_share", "m_sat", "meta"])
def test_a_file_without_a_field_is_refused(tmp_path: Path, missing: str) -> None:
    path, body = _saved(tmp_path)
    del body[missing]
    path.write_text(json.dumps(body))
    _assert_refused(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows", [8, 1, 64]),
        ("prefix_ns", [[1.0]]),
        ("gemm_ns", ["a", "b", "c"]),
        ("gemm_ns", 3),
        ("unknown", 1),
        ("num_layers", None),
        ("private_latency_ns", "fast"),
    ],
)
def test_a_file_with_a_bad_field_is_refused(tmp_path: Path, field: str, value: object) -> None:
    path, body = _saved(tmp_path)
    path.write_text(json.dumps(body | {field: value}))
    _assert_refused(path)
