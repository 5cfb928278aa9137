"""Requests of a live run and what its server recorded become run records."""

import json
from pathlib import Path
from typing import Any

import pytest
from serve_support import FakeEngine, run_virtually

from granikv.cli.main import main
from granikv.core.errors import TraceFormatError
from granikv.traces import open_trace
from granikv.traces.records import REQUEST_SCHEMA, STEP_SCHEMA, read_run
from granikv.validate.clients import EngineClient
from granikv.validate.driven_cells import ClosedCell, PoissonCell
from granikv.validate.serve_cells import Cell
from granikv.validate.serve_options import Settings
from granikv.validate.serve_plan import Job
from granikv.validate.serve_results import Results
from granikv.validate.serve_runs import convert
from granikv.validate.serve_share import Share, measure_share
from granikv.validate.workloads import from_lines

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


def test_old_results_make_no_trace(tmp_path: Path):
    (folder,) = convert(*write(tmp_path, is_recorded=True))
    assert not (folder / "trace.jsonl").exists()
    flags = read_run(folder).header.flags
    assert (flags["settings"], flags["scheduler"]) == ({}, {})


SCHEDULER = {"chunked_prefill_size": 8192, "decode_graph_rows": [1, 2, 4]}
FACTS = {
    "flags": {}, "variables": {}, "versions": {}, "size_tokens": 99, "startup_s": 0.0,
    "scheduler": SCHEDULER,
}  # fmt: skip


class Told(EngineClient):
    async def configure(self, choices: Any) -> None:
        pass

    async def state(self) -> dict[str, Any]:
        return {"hot_tokens": 33}


def measured(folder: Path, cell: Cell, **engine: Any) -> Path:
    """The run records of one cell, measured on a fake engine under a setting."""
    out = folder / "r.jsonl"
    settings = Settings("models/llama", out, (cell.name,), ("granikv",))
    job = Job(cell, (0,), {"hot_fraction": 0.25})

    async def work(loop: Any) -> int:
        share = Share(settings, "granikv", (job,), "now", 1e12, None)
        return await measure_share(Told(FakeEngine(**engine)), share, FACTS, loop.time)

    assert run_virtually(work) == 0
    (run,) = convert(Results(out).rows(), out)
    return run


def test_a_trace_replays_in_the_simulator(tmp_path: Path, capsys: Any):
    cell = PoissonCell("p", (512, 2048), 8.0, 40, largest_output=9)
    folder = measured(tmp_path, cell, prefill_s=0.1, step_s=0.01)
    run, trace = read_run(folder), folder / "trace.jsonl"
    assert (run.header.trace, run.header.hot_tokens) == ("p", 33)
    assert run.header.flags["settings"] == {"hot_fraction": 0.25}
    assert run.header.flags["scheduler"] == SCHEDULER
    assert main(["trace", "info", str(trace)]) == 0
    assert "plain" in capsys.readouterr().out
    replay = ["simulate", str(trace), "--model", "llama-3.1-8b", "--gpu", "h200-sxm"]
    assert main([*replay, "--size-tokens", "800000", "--record", str(tmp_path / "sim")]) == 0
    live = run.requests.collect()
    simulated = read_run(tmp_path / "sim").requests.collect().sort("id")
    assert live.height == 40
    for column in ("id", "prompt_tokens", "output_tokens", "status"):
        assert simulated[column].to_list() == live[column].to_list()
    assert simulated["arrival_s"].to_list() == pytest.approx(live["arrival_s"].to_list())
    # Both find all of a prefix, but for requests that came while it was computed, and no more.
    prefixes = {request.request_id: request.prompt[0].length for request in open_trace(trace)}
    for requests in (live, simulated):
        found = list(zip(requests["id"], requests["cached_tokens"], strict=True))
        assert all(cached in (0, prefixes[name]) for name, cached in found)
        assert sum(cached > 0 for _, cached in found) > 30


def test_a_closed_loop_replays_as_one(tmp_path: Path):
    cell = ClosedCell("c", 64, 3, 20, largest_output=9)
    folder = measured(tmp_path, cell, prefill_s=0.1, step_s=0.01)
    requests = list(open_trace(folder / "trace.jsonl"))
    assert [request.after is None for request in requests] == [True] * 3 + [False] * 17
    users = {request.request_id: request.session for request in requests}
    assert all(users[r.after] == r.session for r in requests if r.after is not None)
    live = read_run(folder).requests.collect()
    assert [request.arrival_s for request in requests] == live["sent_s"].to_list()


def test_a_trace_says_what_was_asked_not_what_came(tmp_path: Path):
    cell = PoissonCell("p", (32,), 90.0, 30, (2, 8), largest_output=20)
    folder = measured(tmp_path, cell, slots=4, step_s=0.01)
    live = read_run(folder).requests.collect()
    assert set(live["status"]) == {"finished", "unfinished"}
    assert min(live["output_tokens"]) < 20
    assert {request.output_tokens for request in open_trace(folder / "trace.jsonl")} == {20}
    with (folder / "trace.jsonl").open() as file:
        sent = list(from_lines(file, seed=3))
    assert [len(request.input_ids) for request in sent] == live["prompt_tokens"].to_list()


def test_runs_are_converted_once(tmp_path: Path):
    results, path = write(tmp_path, is_recorded=False)
    assert len(convert(results, path)) == 1
    assert convert(results, path) == []


@pytest.mark.parametrize(("step", "what"), [('{"iter": 1}', "lacks steps"), ("[1, 2]", "line 1")])
def test_a_bad_step_is_named(tmp_path: Path, step: str, what: str):
    with pytest.raises(TraceFormatError, match=what):
        convert(*write(tmp_path, True, step))
