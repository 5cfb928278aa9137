"""The run list: what is measured stays, what failed comes again, a dead server costs itself."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from serve_support import FakeEngine, run_virtually

from granikv.core.errors import ConfigError
from granikv.validate import bench_serve
from granikv.validate.clients import EngineClient, ServerError
from granikv.validate.driven_cells import ClosedCell
from granikv.validate.serve_cells import cells, groups
from granikv.validate.serve_options import Settings
from granikv.validate.serve_plan import Job, planned
from granikv.validate.serve_results import Results
from granikv.validate.serve_share import Share, measure_share
from granikv.validate.servers import (
    VARIANTS,
    environment,
    scheduler_settings,
    variables_of,
)

HERE = Path(__file__).parent
FACTS = {"flags": {}, "variables": {}, "versions": {}, "size_tokens": 1, "startup_s": 0.0}


def settings(out: Path, *names: str, **options: Any) -> Settings:
    variants = options.pop("variants", ("stock", "granikv"))
    return Settings("models/llama", out, names, variants, **options)


class Told(EngineClient):
    """A client that writes down what it is told instead of asking SGLang."""

    def __init__(self, engine: FakeEngine, log: list[str]) -> None:
        super().__init__(engine)
        self._log = log

    async def configure(self, choices: Any) -> None:
        if choices.get("hot_fraction") == 0.9:
            raise ServerError("no")
        self._log.append(json.dumps(choices))


def launched(log: list[str], **engine: Any) -> bench_serve.Launch:
    """A launch that measures here, on a fake engine in virtual time."""

    def launch(share: Share) -> int:
        log.append(share.variant)

        async def work(loop: Any) -> int:
            client = Told(FakeEngine(**engine), log)
            return await measure_share(client, share, FACTS, loop.time)

        code: int = run_virtually(work)
        return code

    return launch


def test_results_are_written_once(tmp_path: Path):
    out, log = tmp_path / "new" / "r.jsonl", []
    chosen = settings(out, "512x1", "512x2")
    assert bench_serve.run(chosen, launched(log)) == 0
    rows = Results(out).rows()
    assert [(r["variant"], r["cell"], r["repeat"]) for r in rows] == [
        ("stock", "512x1", 0),
        ("stock", "512x2", 0),
        ("granikv", "512x1", 0),
        ("granikv", "512x2", 0),
    ]
    assert {row["model"] for row in rows} == {"llama"}
    assert bench_serve.run(chosen, launched(log)) == 0
    assert log == ["stock", "granikv"]
    assert Results(out).rows() == rows


def test_a_rerun_does_what_is_missing(tmp_path: Path):
    out, log = tmp_path / "r.jsonl", []
    bench_serve.run(settings(out, "512x1", variants=("stock",)), launched(log))
    whole = out.read_text()
    out.write_text(whole + whole[:40])  # interrupted while it wrote
    bench_serve.run(settings(out, "512x1", "512x2"), launched(log))
    assert [(r["variant"], r["cell"]) for r in Results(out).rows()] == [
        ("stock", "512x1"),
        ("stock", "512x2"),
        ("granikv", "512x1"),
        ("granikv", "512x2"),
    ]


def test_repeats_resume_one_by_one(tmp_path: Path):
    out = tmp_path / "r.jsonl"
    name = groups()["headline"][0].name
    identity = settings(out).identity
    for repeat, status in ((0, "complete"), (1, "failed")):
        Results(out).append(
            {"variant": "stock", "cell": name, "repeat": repeat, "status": status, **identity}
        )
    ((_, jobs),) = planned(settings(out, name, variants=("stock",)))
    assert [(job.cell.name, job.repeats) for job in jobs] == [(name, (1, 2))]
    other_seed = settings(out, name, variants=("stock",), seed=5)
    ((_, jobs),) = planned(other_seed)
    assert jobs[0].repeats == (0, 1, 2)


SWEEP = ({"hot_fraction": 0.1}, {"hot_fraction": 0.2})
TEXTS = ('{"hot_fraction": 0.1}', '{"hot_fraction": 0.2}')


def test_a_sweep_measures_our_servers_under_each_setting_and_resumes(tmp_path: Path):
    out, log = tmp_path / "r.jsonl", []
    first = settings(out, "512x1", sweep=SWEEP[:1])
    assert bench_serve.run(first, launched(log)) == 0
    assert log == ["stock", "granikv", TEXTS[0]]
    bench_serve.run(settings(out, "512x1", "512x2", sweep=SWEEP), launched(log))
    assert log[3:] == ["stock", "granikv", TEXTS[1], TEXTS[0], TEXTS[1]]
    assert [(r["variant"], r["cell"], r["settings"]) for r in Results(out).rows()] == [
        ("stock", "512x1", "{}"),
        ("granikv", "512x1", TEXTS[0]),
        ("stock", "512x2", "{}"),
        ("granikv", "512x1", TEXTS[1]),
        ("granikv", "512x2", TEXTS[0]),
        ("granikv", "512x2", TEXTS[1]),
    ]
    # Without the sweep, ours has not been measured yet; results of before there was one count.
    assert [len(jobs) for _, jobs in planned(settings(out, "512x1", "512x2"))] == [0, 2]
    old = [json.loads(line) for line in out.read_text().splitlines()]
    out.write_text(
        "".join(json.dumps({k: v for k, v in r.items() if k != "settings"}) + "\n" for r in old)
    )
    assert [len(jobs) for _, jobs in planned(settings(out, "512x1", "512x2"))] == [0, 0]


def test_a_setting_that_is_refused_costs_itself(tmp_path: Path):
    out = tmp_path / "r.jsonl"
    sweep = ({"hot_fraction": 0.9}, SWEEP[0])
    bench_serve.run(settings(out, "512x1", variants=("granikv",), sweep=sweep), launched([]))
    refused, done = Results(out).rows()
    assert (refused["status"], refused["error"]) == ("failed", "ServerError: no")
    assert (done["status"], done["settings"]) == ("complete", TEXTS[0])


def test_requests_of_different_settings_lie_side_by_side(tmp_path: Path):
    out, launch = tmp_path / "r.jsonl", launched([])
    cell = ClosedCell("c", 64, 2, 4, largest_output=3)
    jobs = tuple(Job(cell, (0,), choices) for choices in SWEEP)
    for seed in (0, 1):
        chosen = settings(out, "512x1", seed=seed, engine={"max_total_tokens": 9})
        assert launch(Share(chosen, "granikv", jobs, "now", time.time() + 99, None)) == 0
    files = [row["requests_file"] for row in Results(out).rows()]
    assert files[0] == "r.requests/granikv.c.hot_fraction=0.1,max_total_tokens=9.0.jsonl"
    assert len(set(files)) == 4
    assert all((tmp_path / file).is_file() for file in files)


def test_a_failed_cell_leaves_the_others(tmp_path: Path):
    class Half(FakeEngine):
        async def async_generate(self, input_ids: Any, **rest: Any) -> Any:
            if len(input_ids) == 2:
                raise ValueError("no room")
            return await super().async_generate(input_ids, **rest)

    def launch(share: Share) -> int:
        async def work(loop: Any) -> int:
            return await measure_share(EngineClient(Half()), share, FACTS, loop.time)

        code: int = run_virtually(work)
        return code

    out = tmp_path / "r.jsonl"
    bench_serve.run(settings(out, "512x2", "512x1", variants=("stock",)), launch)
    failed, done = Results(out).rows()
    assert (failed["status"], failed["cell"]) == ("failed", "512x2")
    assert "2 of 2 requests did not finish: ValueError: no room" in failed["error"]
    assert (done["status"], done["cell"]) == ("complete", "512x1")


def test_a_server_that_hangs_ends_its_variant(tmp_path: Path):
    out = tmp_path / "r.jsonl"
    chosen = settings(out, "512x1", "512x2", variants=("stock",))
    assert bench_serve.run(chosen, launched([], prefill_s=1e4)) == 1
    hung, died = Results(out).rows()
    assert (hung["status"], died["status"]) == ("failed", "died")
    assert "no answer for 300 s" in hung["error"]


def test_no_cell_starts_when_the_budget_is_over(tmp_path: Path):
    out, log = tmp_path / "r.jsonl", []
    bench_serve.run(settings(out, "512x1", budget_s=30.0), launched(log))
    assert log == []  # a start takes longer than what is left
    share = Share(
        settings(out, "512x1"),
        "stock",
        (Job(cells(["512x1"])[0], (0,)),),
        "now",
        time.time() - 1,
        None,
    )
    assert launched(log)(share) == 0
    assert not out.exists()


def test_unknown_names_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no cell 7x7"):
        planned(settings(tmp_path / "r", "7x7"))
    with pytest.raises(ConfigError, match="no variant other"):
        planned(settings(tmp_path / "r", "512x1", variants=("other",)))
    with pytest.raises(ConfigError, match="one running server"):
        planned(settings(tmp_path / "r", "512x1", url="http://here"))
    here = {"url": "http://here", "variants": ("mine",), "sweep": SWEEP}
    with pytest.raises(ConfigError, match="leave out --url"):
        planned(settings(tmp_path / "r", "512x1", **here))


def test_a_foreign_file_is_refused(tmp_path: Path):
    out = tmp_path / "r.jsonl"
    out.write_text('{"format": "granikv-serve-1"}\n{"a": 1}\n')
    with pytest.raises(ConfigError, match="line 2"):
        Results(out).rows()


def test_cells_come_once_headline_first():
    chosen = cells(["headline", "poisson", "unshared", "grid"])
    names = [cell.name for cell in chosen]
    assert len(names) == len(set(names))
    assert [cell.repeats for cell in chosen[:7]] == [3] * 7
    assert {cell.repeats for cell in chosen[7:]} == {1}
    grid = {f"{p}x{b}" for p in (512, 2048, 4096, 8192, 16384, 32768) for b in (1, 8, 32, 64, 128)}
    assert grid <= set(names)


def test_a_variant_has_its_environment_for_its_time_only(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv("GRANIKV_KERNELS", "granikv")
    monkeypatch.delenv("GRANIKV_RECORD", raising=False)
    before = dict(os.environ)
    with environment(variables_of(VARIANTS["granikv-fa3"], tmp_path)):
        assert os.environ["GRANIKV_KERNELS"] == "fa3"
        assert os.environ["GRANIKV_RECORD"] == str(tmp_path)
    assert dict(os.environ) == before
    assert variables_of(VARIANTS["stock"], None) == {"SGLANG_PLUGINS": "none"}
    recorded = {"SGLANG_PLUGINS": "granikv", "GRANIKV_OBSERVE": str(tmp_path)}
    assert variables_of(VARIANTS["stock"], tmp_path) == recorded
    assert variables_of(VARIANTS["granikv"], None) == {}


def test_the_schedulers_own_word_counts():
    info = {
        "max_running_requests": 256, "page_size": 1, "chunked_prefill_size": 8192, "tp_size": 2,
        "cuda_graph_config": {"decode": {"bs": None}}, "version": "0.5.17",
        "internal_states": [
            {
                "effective_max_running_requests_per_dp": 100, "page_size": 64,
                "cuda_graph_config": {"decode": {"bs": [1, 2, 4]}},
            }
        ],
    }  # fmt: skip
    known = scheduler_settings(info)
    assert (known["max_running_requests"], known["page_size"]) == (100, 64)
    assert (known["chunked_prefill_size"], known["tp_size"]) == (8192, 2)
    assert (known["decode_graph_rows"], known["version"]) == ([1, 2, 4], "0.5.17")
    assert known["schedule_policy"] is None


# Stands for a GPU host: no polars, and an sglang whose engine is the fake one.
_HOST = """
import sys
from importlib.abc import MetaPathFinder
class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("polars", "plotly", "joblib", "simpy", "torch", "aiohttp"):
            raise ImportError(name + " is not on this host")
sys.meta_path.insert(0, Absent())
"""


def test_the_module_runs_on_a_host_without_polars_and_survives_a_dead_server(tmp_path: Path):
    (tmp_path / "sglang.py").write_text("from serve_support import Engine\n")
    (tmp_path / "sitecustomize.py").write_text(_HOST)
    out = tmp_path / "r.jsonl"
    command = [sys.executable, "-m", "granikv.validate.bench_serve", "model", "--out", str(out)]
    command += ["--cells", "512x2", "--variants", "stock,stock-triton,granikv"]
    package = Path(bench_serve.__file__).parents[2]
    paths = os.pathsep.join(map(str, (tmp_path, HERE, package)))
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": paths, "FAKE_DEATH": "triton"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["variant"], row["status"]) for row in rows] == [
        ("stock", "complete"),
        ("stock-triton", "died"),
        ("granikv", "complete"),
    ]
    assert rows[0]["size_tokens"] == 4321
    assert rows[0]["flags"]["attention_backend"] == "fa3"
    assert rows[0]["scheduler"]["schedule_policy"] == "fcfs"
    assert "stock-triton: the server died: exit code 9" in done.stdout
    assert "granikv 1/1 512x2 #0" in done.stderr
