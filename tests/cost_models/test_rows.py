"""The measured-row file: what is written is read, and nothing else is."""

from pathlib import Path

import polars as pl
import pytest
from pydantic import ValidationError

from granikv.core.errors import ConfigError
from granikv.cost_models.rows import SCHEMA, MeasuredRow, read_rows, write_rows


def _row(**changes: object) -> MeasuredRow:
    fields: dict[str, object] = {
        "op": "decode_attention",
        "backend": "fa3",
        "gpu": "h200-sxm",
        "dtype": "bfloat16",
        "num_q_heads": 32,
        "rows": 8,
        "segments_json": "[[1, 512, 8]]",
        "private_tokens": 2048,
        "times_us": [14.8, 14.9],
        "date": "2026-11-30",
        "source": "test",
    }
    return MeasuredRow.model_validate(fields | changes)


def test_round_trip(tmp_path: Path) -> None:
    rows = [_row(), _row(op="gemm", m=1, n=2, k=3, rows=None)]
    write_rows(tmp_path / "rows.parquet", rows)
    frame = read_rows(tmp_path / "rows.parquet")
    assert frame.schema == SCHEMA
    assert [MeasuredRow.model_validate(record) for record in frame.to_dicts()] == rows


def test_schema_and_model_have_the_same_fields() -> None:
    assert list(MeasuredRow.model_fields) == SCHEMA.names()


@pytest.mark.parametrize(
    "changes",
    [{"times_us": []}, {"rows": 0}, {"date": "yesterday"}, {"colour": "red"}, {"rows": 1.5}],
)
def test_bad_rows_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        _row(**changes)


def test_a_file_with_other_columns_names_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pl.DataFrame([_row().model_dump()], schema=SCHEMA).drop("clocks").write_parquet(path)
    with pytest.raises(ConfigError, match="look at clocks"):
        read_rows(path)


def test_a_bad_stored_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    records = [_row().model_dump(), _row().model_dump() | {"rows": -1}]
    pl.DataFrame(records, schema=SCHEMA).write_parquet(path)
    with pytest.raises(ConfigError, match="row 1: rows is wrong"):
        read_rows(path)


def test_not_parquet(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_text("no")
    with pytest.raises(ConfigError, match="not a parquet file"):
        read_rows(path)
