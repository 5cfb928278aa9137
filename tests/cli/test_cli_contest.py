"""`granikv policies` from end to end: screen, files, folders, wrong input, Ctrl-C."""

import json
import re
from pathlib import Path

import pytest
from interrupt_support import interrupted

EXAMPLES = Path(__file__).resolve().parents[2] / "docs/examples"
DRIFT = EXAMPLES / "drift.yaml"
SERVER = ("--model", "llama-3.1-8b", "--gpu", "h200-sxm", "--size-tokens", 80_000)
SMALL = (*SERVER, "--max-requests", 150, "--static", 0.3, "--fp", 0.1, "--jobs", 1)
OWN = ("--policy", f"{EXAMPLES / 'half_idle.py'}:HalfIdlePolicy")


def body_of(folder: Path) -> dict:
    return json.loads((folder / "policies.json").read_text())


def assert_one_sentence(ended, *words: str) -> None:
    assert ended.code == 1
    assert ended.error.count("\n") == 1
    assert "Traceback" not in ended.error
    for word in words:
        assert word in ended.error


def test_policies_end_to_end(granikv, tmp_path):
    out = tmp_path / "out"
    options = (*SMALL, *OWN, "--policy", "marginal", "--seeds", 2, "--oracle-runs", 6)
    ended = granikv("policies", DRIFT, *options, "--out", out)
    assert (ended.code, ended.error) == (0, "")
    files = [out / name for name in ("policies.html", "policies.json", "runs")]
    assert sorted(out.iterdir()) == files
    body = body_of(out)
    assert body["is_partial"] is False
    # What was read, the capacity, a row each in order, the words, the provenance, the files.
    assert "150 kept" in ended.out
    assert "80,000 tokens, given with --size-tokens" in ended.out
    names = [standing["name"] for standing in body["ranking"]["standings"]]
    assert set(names) == {"oracle", "static 0.1", "static 0.3", "marginal", "HalfIdlePolicy"}
    assert re.findall(rf"^ +(?:> )? *({'|'.join(names)}) ", ended.out, re.MULTILINE) == names
    assert ended.out.count("  > ") == 1
    for sentence in body["ranking"]["sentences"]:
        assert sentence in ended.out
    assert "Cost model of h200-sxm; " in ended.out
    assert f"Written: {', '.join(map(str, files))}" in ended.out
    page = files[0].read_text()
    assert body["ranking"]["sentences"][0] in page
    assert "150 requests over" in page


def test_table_is_not_broken_in_a_pipe(granikv, tmp_path):
    options = (*SMALL, "--seeds", 2, "--oracle-runs", 1, "--out", tmp_path)
    ended = granikv("policies", DRIFT, *options)
    rows = re.findall(r"^ +(?:static|marginal|watermark) .*$", ended.out, re.MULTILINE)
    assert any(re.search(r"\dx \(\d\.\d\d-\d\.\d\d\) ", row) for row in rows)


def test_both_shipped_policies_by_default(granikv, tmp_path):
    granikv("policies", DRIFT, *SMALL, "--seeds", 1, "--no-oracle", "--out", tmp_path)
    body = body_of(tmp_path)
    kinds = {entry["name"]: entry["kind"] for entry in body["entries"]}
    assert [name for name, kind in kinds.items() if kind == "policy"] == ["watermark", "marginal"]
    assert (body["oracle_options"], body["oracles"]) == (None, [])


def test_options_arrive(granikv, tmp_path):
    options = ("--policy-interval-s", 0.5, "--objective", "throughput", "--window", 3)
    options += ("--oracle-runs", 2, "--replicas", 2, "--router", "least_loaded", "--seeds", 1)
    ended = granikv("policies", DRIFT, *SMALL, *options, "--out", tmp_path)
    assert ended.code == 0
    body = body_of(tmp_path)
    assert body["server"]["policy_interval_s"] == 0.5
    assert body["server"]["hot_fraction"] == 0.1
    assert body["ranking"]["objective"] == "throughput"
    assert body["oracle_options"]["window_s"] == 3.0
    assert body["oracles"][0]["simulations"] == 2 + 2 + 2  # splits, policies, the search's
    assert len(body["oracles"][0]["schedule"]) == body["replicas"] == 2
    assert body["router"] == "least_loaded"


def test_second_run_replaces_the_first_and_nothing_else(granikv, tmp_path):
    options = (*SMALL, "--seeds", 1, "--no-oracle", "--out", tmp_path)
    granikv("policies", DRIFT, *options, "--policy", "marginal")
    (tmp_path / "notes.txt").write_text("mine")
    assert granikv("policies", DRIFT, *options, *OWN).code == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"
    names = {path.name for path in (tmp_path / "runs").iterdir()}
    assert names == {"static-0.1", "static-0.3", "HalfIdlePolicy"}


# ---------------------------------------------------------------------- wrong input

CASES = {
    "window": (("--window", 0), ("--window", "0.001 s, got 0")),
    "no end of a window": (("--window", "inf"), ("--window", "inf")),
    "interval": (("--policy-interval-s", 0), ("--policy-interval-s", "got 0")),
    "no end of an interval": (("--policy-interval-s", "inf"), ("--policy-interval-s", "inf")),
    "start": (("--fp", 1.5), ("--fp", "1.5")),
    "statics": (("--static", "0.6:0.1"), ("--static 0.6:0.1 runs backwards",)),
    "unknown": (("--policy", "marginl"), ("did you mean 'marginal'?",)),
    "no policy": (("--policy", "static"), ("--policy static", "--static")),
    "twice": (("--policy", "marginal") * 2, ("--policy marginal is given twice",)),
    "no class": (("--policy", EXAMPLES / "half_idle.py"), ("lacks a class",)),
    "no file": (("--policy", "none.py:X"), ("none.py does not exist",)),
    "goodput of what": (("--objective", "goodput"), ("--slo-ttft-ms or --slo-tpot-ms",)),
    "the option of simulate": (("--repartition", "marginal"), ("--policy", "--repartition")),
    "nothing left": (("--start", "1e6"), ("leaves no request",)),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_value_touches_nothing(granikv, tmp_path, case):
    options, words = CASES[case]
    (tmp_path / "policies.json").write_text('{"format": "granikv-policies-1"}')
    ended = granikv("policies", DRIFT, *SMALL, *options, "--out", tmp_path)
    assert_one_sentence(ended, *words)
    assert (tmp_path / "policies.json").read_text() == '{"format": "granikv-policies-1"}'


def test_a_folder_of_a_plan_is_left_alone(granikv, tmp_path):
    (tmp_path / "plan.json").write_text('{"format": "granikv-plan-1"}')
    (tmp_path / "runs").mkdir()
    ended = granikv("policies", DRIFT, *SMALL, "--out", tmp_path)
    assert_one_sentence(ended, "holds no policies.json", "choose another --out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "runs"]


def test_a_policy_that_fails_is_corrected_and_run_again(granikv, tmp_path):
    own, out = tmp_path / "own.py", tmp_path / "out"
    text = "class Own:\n    def observe(self, window):\n        return window.hot_tokenz\n"
    options = (*SMALL, "--policy", f"{own}:Own", "--seeds", 1, "--no-oracle", "--out", out)
    own.write_text(text)
    ended = granikv("policies", DRIFT, *options)
    assert_one_sentence(ended, "own.py failed in line 3 (AttributeError", "hot_tokenz")
    own.write_text(text.replace("tokenz", "tokens"))
    ended = granikv("policies", DRIFT, *options)
    assert ended.code == 0
    assert "Own" in ended.out


# ---------------------------------------------------------------------- Ctrl-C


def test_interrupt_keeps_and_names_finished_runs(tmp_path):
    out = tmp_path / "out"
    arguments = ("policies", DRIFT, *SERVER, "--fp", 0.1, "--seeds", 99, "--jobs", 1, "--out", out)
    # The last of the nominal seed has begun.
    code, _, error = interrupted(arguments, out / "runs/static-0.6")
    assert code == 130
    assert error.count("\n") == 1
    assert f"{out / 'policies.json'}, {out / 'runs'}." in error
    body = body_of(out)
    assert body["is_partial"] is True
    assert len(body["runs"]) >= 10
    assert f"Interrupted; {len(body['runs'])} simulations were finished; kept: " in error


def test_interrupt_before_any_run(granikv, tmp_path, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("granikv.planner.policies.run_entries", stop)
    monkeypatch.setattr("granikv.planner.parallel.ignore_interrupts", lambda: None)
    ended = granikv("policies", DRIFT, *SMALL, "--out", tmp_path / "out")
    assert ended.code == 130
    assert "Interrupted; 0 simulations were finished" in ended.error
    assert "Cost model" not in ended.out
