"""Fractions, cells, overload and the number of replicas."""

from dataclasses import replace

import pytest

from granikv.core.errors import ConfigError
from granikv.planner import search
from granikv.planner.cells import Cell, run_cell
from granikv.planner.search import (
    AUTO_FRACTIONS,
    Findings,
    cells_of,
    find_replicas,
    is_enough,
    is_overloaded,
    parse_fractions,
    run_cells,
)
from granikv.sim.metrics import Slo
from granikv.traces.records import read_run


@pytest.fixture(scope="module")
def result(planned):
    return planned[0].of("granikv", 0.1)[0]


def test_fractions():
    assert parse_fractions("auto") == AUTO_FRACTIONS
    assert parse_fractions("0.3") == parse_fractions("0.3:0.3") == (0.3,)


@pytest.mark.parametrize(
    ("text", "has_reference"), [("0.05:0.6", True), ("0.3:0.6", False), ("0.2:0.6", True)]
)
def test_range_of_fractions(text, has_reference):
    low, high = map(float, text.split(":"))
    points = parse_fractions(text)
    assert (points[0], points[-1]) == (low, high)
    assert list(points) == sorted(set(points))
    assert (0.2 in points) is has_reference


@pytest.mark.parametrize(
    "text", ["0", "1", "-0.1", "1.5", "0.6:0.1", "0.1:0.2:0.3", "", "nan", "a"]
)
def test_fractions_outside(text):
    with pytest.raises(ConfigError, match="--fp"):
        parse_fractions(text)


def test_cells_start_with_the_nominal_seed():
    cells = cells_of((0.1, 0.2), 3, 2)
    assert len(cells) == len(set(cells)) == 8
    assert [cell.seed for cell in cells] == [0] * 4 + [1] * 4
    assert {cell.replicas for cell in cells} == {3}
    assert len({cell.name for cell in cells}) == 8


def test_cell_is_the_same_in_memory_and_on_disk(make_task, tmp_path):
    task, cell = make_task(), Cell("granikv", 0.1, 1, 0)
    memory, disk = run_cell(task, cell), run_cell(task, cell, tmp_path)
    assert memory == disk
    assert read_run(tmp_path / cell.name).header.hot_tokens == 40_000


def test_seed_draws_the_cost_model(make_task):
    task = make_task()
    nominal, drawn, again = (run_cell(task, Cell("sglang", None, 1, s)) for s in (0, 1, 1))
    assert drawn == again
    assert drawn.summary.e2e_s != nominal.summary.e2e_s


def test_overload_is_a_queue_that_grows(result):
    assert not is_overloaded(replace(result, early_ttft_s=5.0, late_ttft_s=6.0))
    assert not is_overloaded(replace(result, early_ttft_s=0.1, late_ttft_s=1.0))
    late = replace(result, early_ttft_s=1.0, late_ttft_s=9.0)
    assert is_overloaded(replace(late, summary=replace(late.summary, offered_s=60.0)))
    assert not is_overloaded(replace(late, summary=replace(late.summary, offered_s=0.0)))


def test_enough_needs_the_slo_too(result):
    met = replace(result, summary=replace(result.summary, slo_share=0.96))
    missed = replace(result, summary=replace(result.summary, slo_share=0.94))
    assert is_enough(met, Slo(ttft_s=1.0))
    assert not is_enough(missed, Slo(ttft_s=1.0))
    assert is_enough(missed, Slo())


@pytest.mark.parametrize("needed", [1, 2, 3, 5, 8, 33, 64, None])
def test_least_number_of_replicas(monkeypatch, make_task, result, needed):
    asked = []

    def run(task, cell):
        asked.append(cell.replicas)
        share = 1.0 if needed is not None and cell.replicas >= needed else 0.0
        return replace(result, cell=cell, summary=replace(result.summary, slo_share=share))

    monkeypatch.setattr(search, "run_cell", run)
    task = make_task(slo=Slo(ttft_s=1.0))
    found, best = find_replicas(task, "sglang", lambda _: None)
    assert found == needed
    assert len(asked) == len(set(asked)) <= 13
    assert best.cell.replicas == (needed or 64)


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_do_not_depend_on_processes(planned, make_task, jobs):
    findings, _ = planned
    cells = [Cell("sglang", None, 1, 0), Cell("granikv", 0.1, 1, 1)]
    fresh = Findings(findings.task, (0.1,), 2)
    seen = []
    run_cells(fresh, cells, None, lambda done, total: seen.append((done, total)), jobs)
    assert seen == [(1, 2), (2, 2)]
    assert fresh.results == {cell: findings.results[cell] for cell in cells}


def test_interrupt_leaves_what_is_there(planned, monkeypatch):
    findings, _ = planned
    cells = list(findings.results)[:3]

    def run(task, cell, records):
        if cell == cells[2]:
            raise KeyboardInterrupt
        return findings.results[cell]

    monkeypatch.setattr(search, "run_cell", run)
    partial = Findings(findings.task, findings.fractions, 3)
    with pytest.raises(KeyboardInterrupt):
        run_cells(partial, cells, None, lambda *_: None, jobs=1)
    assert list(partial.results) == cells[:2]
