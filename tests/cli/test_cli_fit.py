"""granikv fit and granikv dispatch-table, as commands of an app of their own."""

import json
from pathlib import Path

import polars as pl
import pytest
import typer
from typer.testing import CliRunner

from granikv.cli import dispatch_table, fit
from granikv.core.cost_table import CostTable
from granikv.core.errors import ConfigError
from granikv.cost_models.fit import build
from granikv.cost_models.params import load_params

app = typer.Typer(pretty_exceptions_enable=False)
app.command("fit")(fit.command)
app.command("dispatch-table")(dispatch_table.command)
RUNNER = CliRunner()


def _run(*arguments: object) -> str:
    ended = RUNNER.invoke(app, [str(argument) for argument in arguments])
    if ended.exception is not None:
        raise ended.exception
    return ended.output


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fit the A100 to all-reduces only: seconds of fitting are of no use to these tests."""
    terms = build.fitted_terms("a100-sxm4-80gb")[3:]
    stated = build.stated_terms("a100-sxm4-80gb")
    shipped = load_params("a100-sxm4-80gb").terms
    others = {name: getattr(shipped, name) for name in ("gemm", "paged", "extend")}
    monkeypatch.setattr(build, "fitted_terms", lambda gpu: terms)
    monkeypatch.setattr(build, "stated_terms", lambda gpu: stated | others)


@pytest.mark.usefixtures("few_rows")
def test_fit_writes_parameters_and_a_page_and_shows_figures(tmp_path: Path) -> None:
    page = tmp_path / "fit.html"
    output = _run("fit", "--hardware", "a100-sxm4-80gb", "--out", tmp_path, "--report", page)
    assert "all-reduce, 2-8 GPUs" in output
    assert "yes" in output
    written = load_params(str(tmp_path / "a100-sxm4-80gb.json"))
    shipped = load_params("a100-sxm4-80gb").terms.all_reduce
    assert written.terms.all_reduce.efficiency == pytest.approx(shipped.efficiency, rel=1e-3)
    text = page.read_text()
    assert "residual over bytes" in text
    assert "arXiv 2608.15584" in text
    assert "<script src=" not in text  # the page needs nothing from elsewhere


@pytest.mark.usefixtures("few_rows")
def test_a_gpu_without_rows_borrows_and_says_so(tmp_path: Path) -> None:
    output = _run("fit", "--hardware", "a100-sxm4-40gb", "--out", tmp_path)
    assert "this GPU's own bandwidth" in output
    assert load_params(str(tmp_path / "a100-sxm4-40gb.json")).derived_from == "a100-sxm4-80gb"


def test_rows_of_another_gpu_are_refused(tmp_path: Path) -> None:
    shipped = Path(build.__file__).parents[1] / "data" / "rows" / "h200-sxm.own.parquet"
    few = tmp_path / "few.parquet"
    pl.read_parquet(shipped).head(3).write_parquet(few)
    with pytest.raises(ConfigError, match="rows are of h200-sxm; give --hardware h200-sxm"):
        _run("fit", few, "--hardware", "a100-sxm4-80gb")


def test_paths_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a file of measured rows"):
        _run("fit", tmp_path / "none.jsonl", "--hardware", "h200-sxm")
    with pytest.raises(ConfigError, match="is not a folder"):
        _run("fit", "--hardware", "h200-sxm", "--out", tmp_path / "none")


def test_dispatch_table_shows_modes_and_writes_the_table(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    output = _run(
        "dispatch-table", "--model", "qwen2.5-14b", "--gpu", "h200-sxm", "--tp", 2, "--out", path
    )
    for words in ("Mode by prefix length", "stock engine / chosen", "M_sat", "cascade fitted"):
        assert words in output
    table = CostTable.load(path)
    assert table.group == 5
    assert json.loads(path.read_text())["meta"]["tp"] == 2
