"""granikv calibrate, as a command of an app of its own, on the runs that ship."""

import json
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from granikv.cli import calibrate
from granikv.core.errors import ConfigError
from granikv.cost_models.params import load_params

RUNS = Path(__file__).parents[2] / "validate" / "data" / "runs"
FITTED = RUNS / "calibration" / "granikv.poisson-8192.graphs"
GRID = RUNS / "calibration" / "granikv.steady-grid"
HELD_OUT = RUNS / "held-out" / "granikv.qwen2.5-14b-tp2"

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(calibrate.command)


def _run(*arguments: object) -> str:
    ended = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if ended.exception is not None:
        raise ended.exception
    return ended.output


def test_it_writes_a_parameter_file_and_shows_errors(tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    output = _run(FITTED, GRID, "--hardware", "h200-sxm", "--held-out", HELD_OUT, "--out", out)
    assert "fused_exposed_share" in output
    assert "without its run" in output
    assert "Steps of the runs held out" in output
    assert "granikv.qwen2.5-14b-tp2" in output
    assert "The cost of shared pages is kept: only 0 stock steps with sharing." in output
    terms = load_params(str(out)).terms
    assert f"{FITTED.name}, {GRID.name}" in terms.fused_exposed_share.source
    assert terms.fused_exposed_share.held_out is not None
    assert terms.gemm == load_params("h200-sxm").terms.gemm


def test_a_run_with_hardly_any_step_without_segments_leaves_attention_as_it_is(
    tmp_path: Path,
) -> None:
    out = tmp_path / "mine.json"
    output = _run(FITTED, "--hardware", "h200-sxm", "--held-out", HELD_OUT, "--out", out)
    kept = "Private pass and fused launch are kept: only 0 steps without segments and"
    assert kept in " ".join(output.split())
    terms, before = load_params(str(out)).terms, load_params("h200-sxm").terms
    assert terms.fused_exposed_share == before.fused_exposed_share
    assert terms.private_memory_efficiency == before.private_memory_efficiency
    assert FITTED.name in terms.host_decode_ns.source
    assert GRID.name not in terms.host_decode_ns.source


def test_a_file_is_only_written_over_when_told_to(tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    out.write_text("precious")
    arguments = (FITTED, "--hardware", "h200-sxm", "--out", out)
    with pytest.raises(ConfigError, match="exists; name another file, or give --force"):
        _run(*arguments)
    assert out.read_text() == "precious"
    _run(*arguments, "--force")
    assert load_params(str(out)).gpu == "h200-sxm"


def test_parameters_of_another_gpu_are_refused(tmp_path: Path) -> None:
    arguments = ("--params", "h100-sxm", "--out", tmp_path / "mine.json")
    with pytest.raises(ConfigError, match="parameters are of h100-sxm, not of h200-sxm"):
        _run(FITTED, "--hardware", "h200-sxm", *arguments)


def test_a_run_is_fitted_or_held_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is fitted and held out; give it once"):
        _run(
            FITTED, "--hardware", "h200-sxm", "--held-out", FITTED, "--out", tmp_path / "mine.json"
        )


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"kind": "sim"}, "is a sim run; name runs of a live server"),
        ({"gpu": "NVIDIA A100"}, "was recorded on NVIDIA A100, not on h200-sxm"),
        ({"model": "unheard-of"}, "unheard-of"),
    ],
)
def test_runs_that_do_not_fit_are_refused(
    tmp_path: Path, header: dict[str, str], message: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(FITTED, folder)
    body = json.loads((folder / "header.json").read_text())
    (folder / "header.json").write_text(json.dumps(body | header))
    out = tmp_path / "mine.json"
    with pytest.raises(ConfigError, match=message):
        _run(folder, "--hardware", "h200-sxm", "--out", out)
    assert not out.exists()


def test_runs_without_steps_are_refused(tmp_path: Path) -> None:
    folder = RUNS / "calibration" / "stock.poisson-8192.graphs"
    with pytest.raises(ConfigError, match="has no recorded steps"):
        _run(folder, "--hardware", "h200-sxm", "--out", tmp_path / "mine.json")
