"""Run records: what is written comes back, also from runs that break off."""

import polars as pl
import pytest
from pydantic import ValidationError

from granikv.core.errors import ConfigError, TraceFormatError
from granikv.traces import records
from granikv.traces.records import (
    REQUEST_SCHEMA,
    STEP_SCHEMA,
    RunHeader,
    RunWriter,
    read_run,
)

HEADER = RunHeader(
    kind="sim",
    model="llama-3.1-8b",
    gpu="h200",
    size_tokens=1_000,
    hot_tokens=250,
    seed=7,
    versions={"granikv": "0.1.0"},
    flags={"hot_fraction": 0.25, "policy": None, "levels": [1, 2]},
)


def request_row(number):
    return (number, None, 0.5 * number, 0.5, 1.25, None, 600, 20, 512, 256, "finished", number % 2)


def step_row(number):
    return (
        number,
        3,
        0.1 * number,
        41.5,
        "decode",
        8,
        16,
        0,
        900,
        "[[1,512,8]]",
        "{}",
        5,
        6,
        7,
        8,
        9,
        10,
        number % 3,
    )


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 35])
def test_rows_come_back_in_order(tmp_path, monkeypatch, count):
    monkeypatch.setattr(records, "_FLUSH_ROWS", 10)
    folder = tmp_path / "new" / "run"
    writer = RunWriter(folder, HEADER)
    for number in range(count):
        writer.request(*request_row(number))
        writer.step(*step_row(number))
    writer.close()
    run = read_run(folder)
    assert run.header == HEADER.model_copy(update={"status": "complete"})
    requests, steps = run.requests.collect(), run.steps.collect()
    assert requests.schema == REQUEST_SCHEMA
    assert steps.schema == STEP_SCHEMA
    assert requests.rows() == [request_row(number) for number in range(count)]
    assert steps.rows() == [step_row(number) for number in range(count)]
    assert sorted(path.name for path in folder.iterdir()) == [
        "header.json",
        "requests.parquet",
        "steps.parquet",
    ]


def test_rows_leave_memory_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_FLUSH_ROWS", 10)
    writer = RunWriter(tmp_path / "run", HEADER)
    for number in range(25):
        writer.step(*step_row(number))
    assert len(list((tmp_path / "run" / "parts").iterdir())) == 2
    writer.close()
    assert read_run(tmp_path / "run").steps.collect().height == 25


def test_a_column_of_nulls_keeps_its_type(tmp_path):
    with RunWriter(tmp_path / "run", HEADER) as writer:
        writer.request(0, None, 0.0, None, None, None, 5, 0, 0, 0, "waiting")
    frame = read_run(tmp_path / "run").requests.collect()
    assert frame.schema == REQUEST_SCHEMA
    assert frame["first_token_s"].to_list() == [None]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_breaks_off_is_partial(tmp_path, error):
    def run():
        with RunWriter(tmp_path / "run", HEADER) as writer:
            writer.request(*request_row(0))
            raise error

    with pytest.raises(error):
        run()
    found = read_run(tmp_path / "run")
    assert found.header.status == "partial"
    assert found.requests.collect().height == 1


def test_closing_twice_changes_nothing(tmp_path):
    with RunWriter(tmp_path / "run", HEADER) as writer:
        writer.request(*request_row(0))
        writer.close("partial")
    assert read_run(tmp_path / "run").header.status == "partial"


def test_a_run_is_not_overwritten(tmp_path):
    RunWriter(tmp_path / "run", HEADER).close()
    with pytest.raises(ConfigError, match="already holds a run"):
        RunWriter(tmp_path / "run", HEADER)


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(TraceFormatError, match="holds no run"):
        read_run(tmp_path)


def test_a_run_that_was_never_closed(tmp_path):
    RunWriter(tmp_path / "run", HEADER).step(*step_row(0))
    with pytest.raises(TraceFormatError, match="never finished"):
        read_run(tmp_path / "run")


def test_damaged_records(tmp_path):
    folder = tmp_path / "run"
    RunWriter(folder, HEADER).close()
    good = (folder / "header.json").read_text()
    (folder / "header.json").write_text(good.replace("granikv-run-1", "granikv-run-2"))
    with pytest.raises(TraceFormatError, match=r"header.json, format: "):
        read_run(folder)
    (folder / "header.json").write_text(good)
    frame = pl.read_parquet(folder / "steps.parquet")
    frame.drop("gpu_us").cast({"rows": pl.Float64}).write_parquet(folder / "steps.parquet")
    with pytest.raises(TraceFormatError, match="no proper column gpu_us, rows"):
        read_run(folder)
    (folder / "steps.parquet").unlink()
    with pytest.raises(TraceFormatError, match="cannot be read"):
        read_run(folder)


def test_headers_take_no_unknown_fields():
    with pytest.raises(ValidationError):
        RunHeader.model_validate(HEADER.model_dump() | {"gpus": 2})
