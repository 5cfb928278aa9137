"""What the command line asks for, and how long it should take."""

from pathlib import Path
from typing import Any

import pytest

from granikv.cli.main import main
from granikv.core.errors import ConfigError, TraceFormatError
from granikv.validate import bench_serve
from granikv.validate.driven_cells import TraceCell
from granikv.validate.serve_cells import cells
from granikv.validate.serve_options import OPTIONS, Settings, settings_of
from granikv.validate.serve_plan import Job, job_s, plan_lines
from granikv.validate.serve_results import Results

SWEEP, TWO = ["hot_fraction=0.1,0.2"], "stock,granikv"


def options(**given: Any) -> Settings:
    return settings_of("m", {name: option.default for name, option in OPTIONS.items()} | given)


def test_a_sweep_is_the_product_of_its_texts():
    chosen = options(sweep=["hot_fraction=0.05, .4,0.40", "dispatch=cost,paged"])
    assert chosen.sweep == (
        {"hot_fraction": 0.05, "dispatch": "cost"},
        {"hot_fraction": 0.05, "dispatch": "paged"},
        {"hot_fraction": 0.4, "dispatch": "cost"},
        {"hot_fraction": 0.4, "dispatch": "paged"},
    )
    assert options().sweep == ()


@pytest.mark.parametrize(
    ("texts", "what"),
    [
        (["page_size=1"], "not possible without a restart"),
        (["hot_fraction=1.5"], "between 0 and 1"),
        (["hot_fraction=much"], "between 0 and 1"),
        (["dispatch=cost,fast"], "dispatch=fast: choose from cost"),
        (["dispatch=cost", "dispatch=paged"], "comes twice"),
        (["dispatch="], "no values"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(texts: list[str], what: str):
    with pytest.raises(ConfigError, match=what):
        options(sweep=texts)


def test_a_trace_must_be_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="is no file"):
        options(trace=tmp_path / "none")


def test_a_dry_run_adds_up(tmp_path: Path):
    lines = plan_lines(
        options(out=tmp_path / "r", cells="loads,headline", sweep=SWEEP, variants=TWO)
    )
    totals = [int(line.split("about ")[1].split()[0]) for line in lines if "results of" in line]
    cells_s = [int(line.split("about ")[1].split()[0]) for line in lines if line[0] == " "]
    assert len(cells_s) == 12 + 2 * 12
    assert sum(totals) == pytest.approx(sum(cells_s) + 2 * 45, abs=len(cells_s))
    assert int(lines[-1].split()[1]) == pytest.approx(sum(totals), abs=2)


@pytest.mark.parametrize("start", [bench_serve.main, lambda line: main(["bench", "serve", *line])])
def test_both_command_lines_take_the_same_options(start: Any, tmp_path: Path, capsys: Any):
    line = ["m", "--out", str(tmp_path / "r.jsonl"), "--cells", "mixed@4", "--dry-run"]
    line += ["--sweep", "hot_fraction=0.1,0.2", "--sweep", "dispatch=cost,paged", "--seed", "3"]
    assert start(line) == 0
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert "stock: 1 results of 1 jobs" in text
    assert "granikv-fa3: 4 results of 4 jobs" in text
    assert '{"dispatch": "paged", "hot_fraction": 0.2}' in text
    assert start(["--dry-run"]) == 1
    assert "Name the model's folder" in capsys.readouterr().err


def test_guessed_seconds_are_near_the_kept_results():
    kept = Results(Path(bench_serve.__file__).parent / "data/serve.h200-sxm.jsonl").rows()
    ratios = []
    for row in kept:
        if (row["variant"], row["engine"]) in (("stock", "{}"), ("granikv", "{}")):
            (cell,) = cells([row["cell"]])
            one, two = (job_s(Job(cell, (0,) * n), row["variant"] == "granikv") for n in (1, 2))
            ratios.append((one if row["repeat"] == 0 else two - one) / row["wall_s"])
    assert len(ratios) > 50
    assert 0.5 < min(ratios) < max(ratios) < 1.6
    assert sorted(ratios)[len(ratios) // 2] == pytest.approx(1.0, abs=0.2)


def test_a_trace_takes_as_long_as_its_arrivals_and_an_answer(tmp_path: Path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"arrival_s": 500}\n\n{"arrival_s": 20}\n')
    assert 500 < job_s(Job(TraceCell(path), (0,)), is_ours=True) < 520
    path.write_text("{}\n")
    with pytest.raises(TraceFormatError, match="line 1"):
        job_s(Job(TraceCell(path), (0,)), is_ours=True)
