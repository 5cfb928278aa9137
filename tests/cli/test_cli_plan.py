"""`granikv plan` from end to end: screen, files, folders, Ctrl-C."""

import json
from pathlib import Path

import pytest
from interrupt_support import interrupted

from granikv.traces.records import read_run

ROOT = Path(__file__).parents[2]
AGENTS = ROOT / "traces/data/agents.yaml"
SERVER = ("--model", "llama-3.1-8b", "--gpu", "h200-sxm")
SMALL = (*SERVER, "--fp", "0.1:0.3", "--seeds", "1", "--jobs", "1")


def plan_of(folder: Path) -> dict:
    return json.loads((folder / "plan.json").read_text())


def test_plan_end_to_end(granikv, workload, tmp_path):
    out = tmp_path / "out"
    ended = granikv("plan", workload, *SMALL, "--out", out)
    assert ended.code == 0
    assert ended.error == ""
    plan = plan_of(out)
    assert plan["is_partial"] is False
    assert sorted(path.name for path in out.iterdir()) == ["plan.html", "plan.json", "runs"]
    # What was read, the capacity and its source, the table, the words, the provenance, the files.
    assert "40 rows read, 40 kept" in ended.out
    assert "by SGLang's memory rule" in ended.out
    assert f"{plan['server']['size_tokens']:,} tokens" in ended.out
    for row in ("stock engine", "cascade", "0.1", "0.2", "0.3"):
        assert row in ended.out
    for sentence in plan["verdict"]["recommendation"]:
        assert sentence in ended.out
    assert "Cost model of h200-sxm; fitted, inside the measured range: " in ended.out
    assert f"Written: {out / 'plan.html'}, {out / 'plan.json'}, {out / 'runs'}" in ended.out


def test_plan_keeps_run_records_of_every_system(granikv, workload, tmp_path):
    granikv("plan", workload, *SMALL, "--out", tmp_path / "out")
    systems = {"sglang", "cascade", *(f"granikv-fp{f:.3f}" for f in (0.1, 0.2, 0.3))}
    names = {path.name for path in (tmp_path / "out/runs").iterdir()}
    assert {f"{system}-n1-seed0" for system in systems} <= names
    run = read_run(tmp_path / "out/runs/granikv-fp0.200-n1-seed0")
    assert run.header.trace == "workload.yaml"
    assert run.requests.collect().height == 40


def test_plan_with_seeds_has_an_interval(granikv, workload, tmp_path):
    out = tmp_path / "out"
    assert granikv("plan", workload, *SERVER, "--fp", "0.2", "--seeds", 3, "--out", out).code == 0
    gain = plan_of(out)["verdict"]["gain_over_stock"]
    assert gain["low"] < gain["mean"] < gain["high"]


def test_plan_passes_server_options_on(granikv, workload, tmp_path):
    out = tmp_path / "out"
    options = ("--size-tokens", 50_000, "--max-running-requests", 7, "--chunked-prefill-size", 4096)
    options += ("--admission", "shared", "--dispatch", "threshold", "--schedule-policy", "lpm")
    ended = granikv("plan", workload, *SMALL, *options, "--out", out, "--slo-ttft-ms", 900)
    assert ended.code == 0
    assert "50,000 tokens, given with --size-tokens" in ended.out
    plan = plan_of(out)
    expected = {
        "size_tokens": 50_000,
        "max_running_requests": 7,
        "chunked_prefill_size": 4096,
        "admission": "shared",
        "dispatch": "threshold",
        "schedule_policy": "lpm",
    }
    assert {name: plan["server"][name] for name in expected} == expected
    assert plan["slo"] == {"ttft_s": 0.9, "tpot_s": None}


def test_plan_finds_the_number_of_replicas(granikv, workload, tmp_path):
    out = tmp_path / "out"
    ended = granikv("plan", workload, *SMALL, "--replicas", "auto", "--out", out)
    assert ended.code == 0
    assert plan_of(out)["needed_replicas"] == {"granikv": 1, "sglang": 1}
    assert "Replicas needed: 1 with a HOT pool, 1 with the stock engine." in ended.out


def test_slo_that_nobody_meets_says_what_was_reached(granikv, workload, tmp_path):
    options = ("--slo-ttft-ms", 0.001, "--out", tmp_path / "out")
    ended = granikv("plan", workload, *SMALL, *options)
    assert ended.code == 0
    assert "0.0% of the requests meet the SLO" in ended.out


# ---------------------------------------------------------------------- folders


def test_second_plan_replaces_the_first_and_nothing_else(granikv, workload, tmp_path):
    out = tmp_path / "out"
    granikv("plan", workload, *SMALL, "--out", out)
    (out / "notes.txt").write_text("mine")
    (out / "runs/left-over").mkdir()
    ended = granikv("plan", workload, *SERVER, "--fp", "0.4", "--seeds", 1, "--out", out)
    assert ended.code == 0
    assert (out / "notes.txt").read_text() == "mine"
    assert not (out / "runs/left-over").exists()
    assert {cell["cell"]["hot_fraction"] for cell in plan_of(out)["cells"]} >= {None, 0.4}
    assert not (out / "runs/granikv-fp0.300-n1-seed0").exists()


@pytest.mark.parametrize("content", ["{}", '{"format": "other"}', "no json"])
def test_folder_of_something_else_is_left_alone(granikv, workload, tmp_path, content):
    out = tmp_path / "out"
    (out / "runs").mkdir(parents=True)
    (out / "plan.json").write_text(content)
    ended = granikv("plan", workload, *SMALL, "--out", out)
    assert ended.code == 1
    assert "choose another --out" in ended.error
    assert (out / "plan.json").read_text() == content
    assert (out / "runs").exists()


def test_folder_of_a_plan_that_failed_can_be_used_again(granikv, workload, tmp_path):
    own, out = tmp_path / "own.py", tmp_path / "out"
    own.write_text("class Own:\n    def observe(self, window):\n        return 1 / 0\n")
    options = (*SERVER, "--fp", "0.2", "--seeds", 1, "--jobs", 1, "--out", out)
    policy = ("--repartition", f"{own}:Own")
    ended = granikv("plan", workload, *options, *policy)
    assert (ended.code, ended.error.count("\n")) == (1, 1)
    assert "failed in line 3" in ended.error
    assert plan_of(out)["is_partial"] is True
    assert granikv("plan", workload, *options).code == 0


def test_folder_that_cannot_be_made(granikv, workload, tmp_path):
    (tmp_path / "file").touch()
    ended = granikv("plan", workload, *SMALL, "--out", tmp_path / "file")
    assert (ended.code, ended.error.count("\n")) == (1, 1)
    assert "--out" in ended.error


# ---------------------------------------------------------------------- Ctrl-C


def test_interrupt_keeps_and_names_finished_runs(tmp_path):
    out = tmp_path / "out"
    arguments = ("plan", AGENTS, *SERVER, "--seeds", "50", "--jobs", "2", "--out", out)
    third = out / "runs/granikv-fp0.050-n1-seed0/requests.parquet"
    code, screen, error = interrupted(arguments, third)
    assert code == 130
    assert "Traceback" not in error
    assert f"kept: {out / 'plan.json'}, {out / 'runs'}." in error
    plan = plan_of(out)
    assert plan["is_partial"] is True
    assert plan["verdict"] is None
    assert f"{len(plan['cells'])} simulations were finished" in error
    assert len(plan["cells"]) >= 1
    assert "stock engine" in screen


def test_interrupt_before_any_run(granikv, workload, tmp_path, monkeypatch):
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("granikv.planner.plan.make_plan", stop)
    ended = granikv("plan", workload, *SMALL, "--out", tmp_path / "out")
    assert (ended.code, ended.error) == (130, "Interrupted; nothing was kept.\n")
