"""Requests of a live run and what its server recorded become run records."""

import json
from pathlib import Path
from typing import Any

import pytest

from granikv.core.errors import TraceFormatError
from granikv.traces.records import REQUEST_SCHEMA, STEP_SCHEMA, read_run
from granikv.validate.serve_runs import convert

STEP = {
    "iter": 1, "steps": 1, "start_s": 0.0, "gpu_us": 9.5, "kind": "decode", "rows": 2,
    "padded_rows": 2, "prefill_tokens": 0, "private_tokens": 64, "segments_json": "[]",
    "plan_json": "{}", "hot_used": 0, "cold_free": 9, "hot_misses": 0, "evictions": 0,
    "retractions": 0, "migrated_tokens": 0, "replica": 0,
}  # fmt: skip
REQUEST = {
    "id": 4, "session": None, "arrival_s": 0.0, "prompt_tokens": 9, "rid": "p.x.4", "sent_s": 0.1,
    "first_token_s": 0.2, "finish_s": 5.0, "output_tokens": 3, "cached_tokens": 8,
    "hot_tokens": None, "status": "finished", "error": None,
}  # fmt: skip


def write(folder: Path, is_recorded: bool, step: Any = None) -> tuple[list[dict[str, Any]], Path]:
    (folder / "r.requests").mkdir()
    (folder / "r.requests/granikv.p.0.jsonl").write_text(json.dumps(REQUEST) + "\n")
    row = {
        "status": "complete", "requests_file": "r.requests/granikv.p.0.jsonl", "model": "m",
        "gpu": None, "size_tokens": 77, "seed": 1, "clock_origin": "2026-11-30T10:00:10+00:00",
        "cell": "p", "versions": {"sglang": "0.5.17"}, "variant": "granikv", "flags": {},
        "variables": {}, "record": "r.steps/g" if is_recorded else None,
    }  # fmt: skip
    if is_recorded:
        spool = folder / "r.steps/g"
        spool.mkdir(parents=True)
        header = {
            "clock_origin": "2026-11-30T10:00:00+00:00", "hot_tokens": 55,
            "step_columns": list(STEP), "request_columns": ["rid", "hot_tokens"],
        }  # fmt: skip
        (spool / "header.json").write_text(json.dumps(header))
        steps = [STEP | {"iter": n, "start_s": start} for n, start in enumerate((9.9, 10.5, 15.5))]
        lines = [json.dumps(list(one.values())) for one in steps] if step is None else [step]
        (spool / "steps-rank0.jsonl").write_text("".join(f"{line}\n" for line in lines) + "[1,")
        (spool / "requests-rank0.jsonl").write_text('["p.x.4", 6]\n["other", 1]\n')
    return [row, {"status": "failed"}], folder / "r.jsonl"


def test_steps_are_put_on_the_clock_of_the_requests(tmp_path: Path):
    (folder,) = convert(*write(tmp_path, is_recorded=True))
    run = read_run(folder)
    assert (run.header.kind, run.header.trace) == ("live", "p")
    assert (run.header.size_tokens, run.header.hot_tokens) == (77, 55)
    (request,) = run.requests.collect().rows(named=True)
    known = {k: v for k, v in REQUEST.items() if k in REQUEST_SCHEMA}
    assert request == known | {"hot_tokens": 6, "replica": 0}
    # The recorder began 10 s earlier; its first step was before the run, its last after it.
    (step,) = run.steps.collect().rows(named=True)
    assert step == STEP | {"iter": 1, "start_s": 0.5}
    assert set(step) == set(STEP_SCHEMA)


def test_steps_may_be_objects(tmp_path: Path):
    (folder,) = convert(*write(tmp_path, True, json.dumps(STEP | {"start_s": 11.0})))
    assert read_run(folder).steps.collect()["start_s"].to_list() == [1.0]


def test_a_run_without_a_recorder_has_requests_only(tmp_path: Path):
    (folder,) = convert(*write(tmp_path, is_recorded=False))
    run = read_run(folder)
    assert run.header.flags["hot_tokens_known"] == 0
    assert run.requests.collect()["hot_tokens"].to_list() == [0]
    assert run.steps.collect().height == 0


def test_runs_are_converted_once(tmp_path: Path):
    results, path = write(tmp_path, is_recorded=False)
    assert len(convert(results, path)) == 1
    assert convert(results, path) == []


@pytest.mark.parametrize(("step", "what"), [('{"iter": 1}', "lacks steps"), ("[1, 2]", "line 1")])
def test_a_bad_step_is_named(tmp_path: Path, step: str, what: str):
    with pytest.raises(TraceFormatError, match=what):
        convert(*write(tmp_path, True, step))
