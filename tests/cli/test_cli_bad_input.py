"""Bad input ends with one sentence on stderr and exit code 1 (2 for usage), never a traceback."""

import json
from pathlib import Path

import pytest

from granikv.cli.failures import InterruptError, exit_code_of
from granikv.core.errors import ConfigError, IntegrityError

SERVER = ("--model", "llama-3.1-8b", "--gpu", "h200-sxm")


def server(**changes: str) -> tuple[str, ...]:
    values = {"model": "llama-3.1-8b", "gpu": "h200-sxm"} | changes
    return tuple(part for name, value in values.items() for part in (f"--{name}", value))


def assert_one_sentence(ended, code, *words):
    assert ended.code == code
    assert ended.error.count("\n") == 1
    assert "Traceback" not in ended.error
    for word in words:
        assert word in ended.error


CASES = {
    "unknown gpu": (server(gpu="h20-sxm"), ("h20-sxm", "Did you mean h200-sxm?")),
    "unknown model": (server(model="lama-3.1-8b"), ("lama-3.1-8b", "Did you mean llama-3.1-8b?")),
    "model too large": (
        server(model="qwen2.5-32b", gpu="a100-sxm4-40gb"),
        ("qwen2.5-32b", "bytes", "a100-sxm4-40gb has"),
    ),
    "tp does not divide": ((*SERVER, "--tp", "3"), ("tp 3",)),
    "fp above one": ((*SERVER, "--fp", "1.2"), ("--fp", "1.2")),
    "fp zero": ((*SERVER, "--fp", "0"), ("--fp", "got 0")),
    "fp negative": ((*SERVER, "--hot-fraction", "-0.1"), ("--fp", "-0.1")),
    "speedup": ((*SERVER, "--speedup", "0"), ("--speedup must be positive",)),
    "end before start": ((*SERVER, "--start", "9", "--end", "3"), ("--end", "above --start")),
    "max requests": ((*SERVER, "--max-requests", "0"), ("--max-requests",)),
    "think": ((*SERVER, "--max-think", "-1"), ("--max-think must not be negative",)),
    "slo": ((*SERVER, "--slo-ttft-ms", "-5"), ("--slo-ttft-ms must be positive",)),
    "size": ((*SERVER, "--size-tokens", "1"), ("--size-tokens",)),
    "memory": ((*SERVER, "--mem-fraction-static", "1.5"), ("--mem-fraction-static",)),
    "admission": ((*SERVER, "--admission", "valu"), ("valu", "did you mean 'value'?")),
    "router": ((*SERVER, "--router", "least_load"), ("did you mean 'least_loaded'?",)),
    "repartition": ((*SERVER, "--repartition", "statc"), ("did you mean 'static'?",)),
    "dispatch": ((*SERVER, "--dispatch", "cots"), ("--dispatch must be 'cost'", "cots")),
    "policy": ((*SERVER, "--schedule-policy", "lmp"), ("--schedule-policy", "'lpm'", "lmp")),
    "format": ((*SERVER, "--format", "mooncak"), ("mooncak", "mooncake")),
    "option of another format": ((*SERVER, "--block-size", "512"), ("mooncake",)),
    "nothing left": ((*SERVER, "--start", "1e6"), ("leaves no request",)),
}


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize("case", CASES)
def test_bad_value(granikv, workload, tmp_path, command, case):
    options, words = CASES[case]
    out = ("--out", tmp_path / "out") if command == "plan" else ()
    assert_one_sentence(granikv(command, workload, *options, *out), 1, *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "x.yaml", *SERVER, "--spedup", "2"), ("--spedup", "--speedup")),
        (("plan", "x.yaml", "--gpu", "h200-sxm"), ("--model",)),
        (("simulate", "x.yaml", *SERVER, "--system", "sgalng"), ("sgalng", "sglang")),
        (("simulate", "x.yaml", *SERVER, "--speedup", "fast"), ("--speedup",)),
        (("simulat",), ("simulat", "simulate")),
    ],
)
def test_usage_error(granikv, arguments, words):
    assert_one_sentence(granikv(*arguments), 2, *words)


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_plan_replicas(granikv, workload, value):
    assert_one_sentence(granikv("plan", workload, *SERVER, "--replicas", value), 1, "--replicas")


@pytest.mark.parametrize("value", ["0.6:0.1", "0.1:0.2:0.3", "a", "0.1:1", ":"])
def test_plan_fractions(granikv, workload, value):
    assert_one_sentence(granikv("plan", workload, *SERVER, "--fp", value), 1, "--fp", value)


def test_simulate_replicas(granikv, workload):
    ended = granikv("simulate", workload, *SERVER, "--replicas", 0)
    assert_one_sentence(ended, 1, "--replicas")


def rows(path: Path, *times: int) -> Path:
    row = {"input_length": 600, "output_length": 4, "hash_ids": [1, 2]}
    path.write_text("".join(json.dumps({"timestamp": time} | row) + "\n" for time in times))
    return path


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_times_that_go_back(granikv, tmp_path, command):
    trace = rows(tmp_path / "back.jsonl", 0, 5000, 4000)
    ended = granikv(command, trace, *SERVER)
    assert_one_sentence(ended, 1, "back.jsonl, row 3", "earlier")


def test_times_that_go_back_can_be_sorted(granikv, tmp_path):
    trace = rows(tmp_path / "back.jsonl", 0, 5000, 4000)
    ended = granikv("simulate", trace, *SERVER, "--sort")
    assert ended.code == 0
    assert "1 out of order, sorted" in ended.out


@pytest.mark.parametrize("command", [("plan",), ("simulate",)])
def test_empty_file(granikv, tmp_path, command):
    (tmp_path / "empty.jsonl").touch()
    assert_one_sentence(granikv(*command, tmp_path / "empty.jsonl", *SERVER), 1, "empty.jsonl")


@pytest.mark.parametrize("command", [("trace", "info"), ("plan", *SERVER), ("simulate", *SERVER)])
def test_missing_file(granikv, tmp_path, command):
    assert_one_sentence(granikv(*command, tmp_path / "no.jsonl"), 1, "no.jsonl does not exist")


def test_unknown_key_of_a_workload(granikv, workload):
    workload.write_text(workload.read_text() + "colour: red\n")
    ended = granikv("simulate", workload, *SERVER)
    assert_one_sentence(ended, 1, "colour")


def test_slo_that_nobody_meets(granikv, workload, tmp_path):
    ended = granikv(
        "plan", workload, *SERVER, "--replicas", "auto", "--slo-ttft-ms", "0.001",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert_one_sentence(ended, 1, "best reached is 0.0%", "relax the SLO")


# ---------------------------------------------------------------------- exit codes


def fails(error: BaseException):
    def command() -> None:
        raise error

    return command


def test_error_of_the_user(capsys):
    assert exit_code_of(fails(ConfigError("the file\nis wrong."))) == 1
    assert capsys.readouterr().err == "the file is wrong.\n"


@pytest.mark.parametrize("error", [ValueError("odd"), IntegrityError("free + used != size")])
def test_bug_leaves_a_log(capsys, error):
    assert exit_code_of(fails(error)) == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "Traceback" not in said
    log = Path(next(word for word in said.split() if word.endswith(".log")))
    text = log.read_text()
    log.unlink()
    assert "Traceback" in text
    assert str(error) in text
    assert "numpy" in text


def test_interrupt_names_what_was_kept(capsys):
    assert exit_code_of(fails(InterruptError("kept: runs."))) == 130
    assert capsys.readouterr().err == "Interrupted; kept: runs.\n"


def test_interrupt_outside_of_any_work(granikv, workload, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("granikv.cli.trace_options.ReadGroup.open", stop)
    ended = granikv("trace", "info", workload)
    assert (ended.code, ended.error) == (130, "Interrupted; nothing was kept.\n")
