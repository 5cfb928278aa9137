"""What a live server has spooled becomes run records, whole or not."""

import json
import warnings

import pytest

from granikv.core.errors import ConfigError, TraceFormatError
from granikv.traces.live_records import _REQUEST_SCHEMA, convert
from granikv.traces.records import STEP_SCHEMA, read_run

HEADER = {
    "format": "granikv-spool-1",
    "kind": "live",
    "model": "llama",
    "gpu": "NVIDIA H200",
    "size_tokens": 1000,
    "hot_tokens": 250,
    "clock_origin": "2027-01-02T03:04:05.500000+00:00",
    "versions": {"sglang": "0.5.17"},
    "flags": {"tp_size": 1, "quantization": None},
    "replica": 0,
    "step_columns": list(STEP_SCHEMA),
    "request_columns": list(_REQUEST_SCHEMA),
    "is_closed": True,
    "dropped_steps": 0,
    "dropped_requests": 0,
}


def step_row(number, replica=0):
    segments = json.dumps([[1, 512, 8]])
    plan = '{"modes": [2], "launch": "fused", "row_split": []}'
    return [
        number, 1, 0.5 * number, 41.5, "decode", 8, 16, 0, 900, segments, plan,
        5, 6, 7, 8, 9, 10, replica,
    ]  # fmt: skip


def request_row(rid, first_token_s=1.5):
    return [rid, 1.0, first_token_s, 2.0, 600, 20, 512, 256, "finished"]


def spool(folder, steps, requests, replica=0, **changes):
    name = f"-rank{replica}" if replica else ""
    header = HEADER | {"replica": replica} | changes
    (folder / f"header{name}.json").write_text(json.dumps(header))
    for kind, rows in (("steps", steps), ("requests", requests)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{kind}-rank{replica}.jsonl").write_text(lines)


def convert_quietly(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(folder)
    return read_run(folder)


def test_a_closed_recording(tmp_path):
    steps = [step_row(number) for number in range(3)]
    spool(tmp_path, steps, [request_row("17"), request_row("a1b2", None), request_row("3" * 19)])
    run = convert_quietly(tmp_path)
    header = run.header
    assert (header.kind, header.status) == ("live", "complete")
    assert (header.model, header.gpu) == ("llama", "NVIDIA H200")
    assert (header.size_tokens, header.hot_tokens) == (1000, 250)
    assert header.clock_origin == "2027-01-02T03:04:05.500000+00:00"
    assert header.versions == HEADER["versions"]
    assert header.flags == HEADER["flags"]
    found = run.steps.collect()
    assert found.schema == STEP_SCHEMA
    assert found.rows() == [tuple(row) for row in steps]
    assert run.requests.collect().rows() == [
        (17, None, 1.0, None, 1.5, 2.0, 600, 20, 512, 256, "finished", 0),
        (-1, None, 1.0, None, None, 2.0, 600, 20, 512, 256, "finished", 0),
        (-2, None, 1.0, None, 1.5, 2.0, 600, 20, 512, 256, "finished", 0),
    ]
    assert (tmp_path / "requests-rank0.jsonl").exists()


def test_a_recording_without_rows(tmp_path):
    spool(tmp_path, [], [])
    run = convert_quietly(tmp_path)
    assert run.steps.collect().schema == STEP_SCHEMA
    assert run.requests.collect().height == 0


def test_a_killed_server_leaves_a_partial_run(tmp_path):
    """Its last lines are cut, and its header does not know what was dropped."""
    spool(tmp_path, [step_row(0), step_row(1)], [request_row("1")], is_closed=False)
    for name, length in (("steps", 40), ("requests", 7)):
        path = tmp_path / f"{name}-rank0.jsonl"
        text = path.read_text()
        path.write_text(text + text[:length])
    with pytest.warns(UserWarning, match="gaps: 2 unreadable lines"):
        convert(tmp_path)
    run = read_run(tmp_path)
    assert run.header.status == "partial"
    assert run.header.flags == HEADER["flags"] | {"unreadable_lines": 2}
    assert run.steps.collect()["iter"].to_list() == [0, 1]
    assert run.requests.collect()["id"].to_list() == [1]


def test_dropped_rows_are_told(tmp_path):
    spool(tmp_path, [step_row(0)], [], dropped_steps=1200, dropped_requests=3)
    with pytest.warns(UserWarning, match="1,200 dropped steps, 3 dropped requests"):
        convert(tmp_path)
    flags = read_run(tmp_path).header.flags
    assert (flags["dropped_steps"], flags["dropped_requests"]) == (1200, 3)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{}",
        "[1, 2]",
        "\x00\x00",
        json.dumps([*step_row(1), 1]),
        json.dumps([True, *step_row(1)[1:]]),
        json.dumps([1.5, *step_row(1)[1:]]),
        json.dumps([None, *step_row(1)[1:]]),
        json.dumps([*step_row(1)[:3], "41.5", *step_row(1)[4:]]),
        json.dumps([*step_row(1)[:4], 7, *step_row(1)[5:]]),
    ],
)
def test_a_line_that_is_no_step_is_left_out(tmp_path, line):
    spool(tmp_path, [step_row(0)], [])
    with (tmp_path / "steps-rank0.jsonl").open("a") as file:
        file.write(line + "\n" + json.dumps(step_row(2)) + "\n")
    with pytest.warns(UserWarning, match="1 unreadable lines"):
        convert(tmp_path)
    assert read_run(tmp_path).steps.collect()["iter"].to_list() == [0, 2]


def test_replicas_share_the_first_ones_clock(tmp_path):
    spool(tmp_path, [step_row(0)], [request_row("1")])
    later = {"clock_origin": "2027-01-02T03:04:07.500000+00:00"}
    for replica in (1, 2):
        rows = [step_row(0, replica)], [request_row("2"), request_row("x")]
        spool(tmp_path, *rows, replica, is_closed=replica != 2, **later)
    run = convert_quietly(tmp_path)
    assert run.header.status == "partial"
    steps = run.steps.select("start_s", "replica").collect()
    assert steps.rows() == [(0.0, 0), (2.0, 1), (2.0, 2)]
    requests = run.requests.select("id", "arrival_s", "first_token_s", "finish_s", "replica")
    assert requests.collect().rows() == [
        (1, 1.0, 1.5, 2.0, 0),
        (2, 3.0, 3.5, 4.0, 1),
        (-1, 3.0, 3.5, 4.0, 1),
        (2, 3.0, 3.5, 4.0, 2),
        (-2, 3.0, 3.5, 4.0, 2),
    ]


def test_a_conversion_that_was_interrupted_starts_again(tmp_path):
    spool(tmp_path, [step_row(0)], [])
    (tmp_path / "steps-rank0.jsonl").rename(tmp_path / "aside")
    with pytest.raises(TraceFormatError, match=r"steps-rank0.jsonl cannot be read"):
        convert(tmp_path)
    (tmp_path / "aside").rename(tmp_path / "steps-rank0.jsonl")
    assert convert_quietly(tmp_path).steps.collect().height == 1


def test_what_is_no_recording(tmp_path):
    with pytest.raises(TraceFormatError, match="holds no recording"):
        convert(tmp_path)
    spool(tmp_path, [], [], format="granikv-spool-2")
    with pytest.raises(TraceFormatError, match=r"format: .* another version"):
        convert(tmp_path)
    spool(tmp_path, [], [], step_columns=["iter"])
    with pytest.raises(TraceFormatError, match="columns are those of another version"):
        convert(tmp_path)


def test_a_recording_is_converted_once(tmp_path):
    spool(tmp_path, [], [])
    convert(tmp_path)
    with pytest.raises(ConfigError, match="holds run records already"):
        convert(tmp_path)
