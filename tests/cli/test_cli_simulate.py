"""`granikv simulate`: the summary on the screen, run records, Ctrl-C."""

import json

import pytest

from granikv.sim.metrics import summarise
from granikv.traces.records import read_run

SERVER = ("--model", "llama-3.1-8b", "--gpu", "h200-sxm")


def test_screen_has_every_section(granikv, workload):
    ended = granikv("simulate", workload, *SERVER, "--slo-ttft-ms", 60_000)
    assert ended.code == 0
    assert ended.error == ""
    for words in (
        "40 sent, 40 finished", "TTFT", "TPOT", "ITL", "end to end", "throughput", "goodput",
        "prompt tokens read from HOT", "free HOT outside its largest run", "HOT misses",
        "evictions", "retractions", "decode steps", "attention", "extend", "100.0% within the SLO",
    ):  # fmt: skip
        assert words in ended.out, words


def test_record_leaves_records_and_summary(granikv, workload, tmp_path):
    folder = tmp_path / "run"
    ended = granikv("simulate", workload, *SERVER, "--fp", 0.3, "--seed", 4, "--record", folder)
    assert ended.code == 0
    run = read_run(folder)
    assert run.header.seed == 4
    assert run.header.hot_tokens == int(0.3 * run.header.size_tokens)
    assert run.header.flags["tp"] == 1
    written = json.loads((folder / "summary.json").read_text())
    again = summarise(run.requests, run.steps).to_json()
    assert {name: written[name] for name in again} == again
    assert sum(written["term_share"].values()) == pytest.approx(1.0)


def test_record_does_not_overwrite(granikv, workload, tmp_path):
    folder = tmp_path / "run"
    granikv("simulate", workload, *SERVER, "--record", folder)
    before = (folder / "requests.parquet").read_bytes()
    ended = granikv("simulate", workload, *SERVER, "--record", folder)
    assert ended.code == 1
    assert str(folder) in ended.error
    assert (folder / "requests.parquet").read_bytes() == before


def test_systems_differ_where_they_should(granikv, workload, tmp_path):
    shares = {}
    for system in ("granikv", "sglang", "cascade"):
        folder = tmp_path / system
        granikv("simulate", workload, *SERVER, "--system", system, "--record", folder)
        shares[system] = json.loads((folder / "summary.json").read_text())["hot_share"]
    assert shares["granikv"] > 0.5
    assert shares["sglang"] == shares["cascade"] == 0


def test_exact_leaves_the_same_summary(granikv, workload, tmp_path):
    summaries = []
    for name, options in (("jump", ()), ("exact", ("--exact",))):
        granikv("simulate", workload, *SERVER, *options, "--record", tmp_path / name)
        summaries.append(json.loads((tmp_path / name / "summary.json").read_text()))
    jump, exact = summaries
    for name in ("finished", "duration_s", "ttft_s", "tpot_s", "decode_steps", "hot_misses"):
        assert jump[name] == exact[name]


def test_until_cuts_the_run(granikv, workload):
    ended = granikv("simulate", workload, *SERVER, "--until", 0.3)
    assert ended.code == 0
    assert "unfinished" in ended.out


def test_replicas_and_tensor_parallelism(granikv, workload):
    options = ("--replicas", 2, "--tp", 2, "--router", "prefix_affinity")
    ended = granikv("simulate", workload, *SERVER, *options)
    assert ended.code == 0
    assert "40 sent, 40 finished" in ended.out
    assert "steps split into a burst and a follow-on" in ended.out
    assert "collective" in ended.out


def test_own_gpu_needs_its_own_parameters(granikv, workload, tmp_path):
    from granikv.cost_models.catalog import DATA

    text = (DATA / "hardware/h200-sxm.yaml").read_text()
    gpu = tmp_path / "mine.yaml"
    gpu.write_text(text.replace("name: h200-sxm", "name: mine"))
    server = ("--model", "llama-3.1-8b", "--gpu", gpu)
    assert granikv("simulate", workload, *server).code == 1
    params = DATA / "params/h200-sxm.json"
    assert granikv("simulate", workload, *server, "--params", params).code == 0


@pytest.mark.parametrize("is_recorded", [True, False])
def test_interrupt(granikv, workload, tmp_path, monkeypatch, is_recorded):
    def stop(requests, config, cost, sink, **_):
        sink.request(0, None, 0.0, 0.0, 0.1, 0.2, 8, 2, 0, 0, "finished", 0)
        raise KeyboardInterrupt

    monkeypatch.setattr("granikv.sim.run.simulate", stop)
    folder = tmp_path / "run"
    options = ("--record", folder) if is_recorded else ()
    ended = granikv("simulate", workload, *SERVER, *options)
    assert ended.code == 130
    if not is_recorded:
        assert ended.error == "Interrupted; nothing was kept.\n"
        return
    assert f"kept in {folder}" in ended.error
    run = read_run(folder)
    assert run.header.status == "partial"
    assert run.requests.collect().height == 1
