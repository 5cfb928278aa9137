import io
import json
import subprocess
import sys
from statistics import median

import pytest

from granikv.cost_models.rows import SCHEMA, MeasuredRow
from granikv.kernels import bench, bench_figures
from granikv.kernels.bench_points import (
    BACKENDS,
    MAX_CALLS,
    MIXED,
    NESTED,
    TIERS,
    Cell,
    jobs,
    one_prefix,
    plan_calls,
)
from granikv.kernels.sweep import Machine
from granikv.kernels.sweep_points import LLAMA

MACHINE = Machine("h200-sxm", {"torch": "2"}, "2026-11-30", lambda: "1980 MHz, 3201 MHz")
POOL_BYTES = 12 << 30  # of K, and the same of V


class FakeDevice:
    """Answers with guessed times; backends in `missing` raise what they are given."""

    def __init__(self, missing=None):
        self.now, self.cells, self.missing, self.tried = 0.0, [], missing or {}, []

    def measure_point(self, point):
        return [point.shape.guess_us()] * 3

    def begin(self, cell):
        self.cells.append(cell)

    def measure(self, backend):
        self.tried.append(backend.name)
        self.now += 0.1
        if backend.name in self.missing:
            raise self.missing[backend.name]
        time_us = self.cells[-1].guess_us(backend.work)
        scale = 0.5 if backend.name.startswith("granikv") else 1.0
        return [scale * time_us * (1 + i / 100) for i in range(20)], 1e-3

    def check_device(self):
        pass

    def now_s(self):
        return self.now


def _run(planned, device, budget_s=1e9):
    out = io.StringIO()
    bench.run_roofs(device, MACHINE, out)
    outcome = bench.run_jobs(planned, device, MACHINE, out, budget_s, device.now_s)
    return outcome, [json.loads(line) for line in out.getvalue().splitlines()]


def test_no_cell_is_measured_twice_and_tiers_come_in_order():
    planned = jobs()
    assert len({job.cell for job in planned}) == len(planned)
    order = [TIERS.index(job.tier) for job in planned]
    assert order == sorted(order)
    assert {job.tier for job in planned} == set(TIERS)


def test_every_figure_has_a_cell_in_the_first_two_tiers():
    cells = {job.cell for job in jobs(("figures", "passes"))}
    tables = (bench_figures.REACH_US, bench_figures.REACH_BYTES, bench_figures.REACH_FLOPS)
    assert cells == {entry[0] for table in tables for entry in table.values()}


def test_cells_fit_the_device_pool():
    for job in jobs():
        cell = job.cell
        assert cell.rows <= 512
        assert cell.private_tokens <= 2048
        assert len(cell.segments) <= 16
        assert max(cell.row_tokens) + cell.private_tokens <= 131_072
        page_slack = 2 * 128 * (1 + len(cell.segments) + cell.rows)
        assert (cell.slots + page_slack) * cell.heads.kv_bytes // 2 <= POOL_BYTES // 2


def test_rows_of_a_segment_have_the_same_tokens_before_it():
    for job in jobs():
        before = [0] * job.cell.rows
        for segment in job.cell.segments:
            assert len({before[row] for row in segment.rows}) == 1
            for row in segment.rows:
                before[row] += segment.tokens
        assert before == job.cell.row_tokens


def test_a_backend_has_one_row_a_cell():
    for job in jobs():
        keys = [(backend.name, backend.page_size) for backend in job.backends]
        assert len(set(keys)) == len(keys)
        assert job.backends[0].name == "fa3"
        assert job.backends[0].page_size == 1
        assert any(name.startswith("granikv") for name, _ in keys)


def test_bytes_and_flops_of_a_figure():
    cell = one_prefix(LLAMA, 256, 16384, 256)
    assert cell.least_bytes == (16384 + 256 * 256) * 4096 + 2 * 256 * 32 * 128 * 2
    assert cell.flops == 4 * 32 * 128 * 256 * (16384 + 256)
    assert cell.floor_us(4.3e6, 790e6) == pytest.approx(88.5, rel=0.02)


def test_pairs_need_every_row_in_exactly_one_segment():
    pair = next(b for b in BACKENDS["figure"] if b.family == "pair")
    assert pair.supports(MIXED)
    assert not pair.supports(NESTED)
    assert not pair.supports(Cell(LLAMA, 8, 256))


def test_nested_columns_name_both_levels():
    segments = json.loads(NESTED.columns()["segments_json"])
    assert segments[0] == [1, 4096, 256]
    assert segments[1:] == [[1 + 4096 + i * 2048, 2048, 64] for i in range(4)]


def test_slabs_start_at_whole_pages():
    assert all(base % 128 == 0 for base in MIXED.bases(128))


@pytest.mark.parametrize(("guess", "calls"), [(20.0, MAX_CALLS), (60.0, 8), (160.0, 4), (5e3, 1)])
def test_short_calls_fill_a_graph(guess, calls):
    assert plan_calls(guess) == calls


def test_unknown_tier_is_refused():
    with pytest.raises(ValueError, match="tier must be one of"):
        jobs(["figure"])


def test_rows_have_the_schema():
    planned = jobs(("figures", "passes"))
    outcome, rows = _run(planned, FakeDevice())
    assert outcome.written == len(rows) - 3 == sum(len(job.backends) for job in planned)
    for row in rows:
        assert list(row) == SCHEMA.names()
        MeasuredRow.model_validate(row)
        assert row["source"] == "granikv.kernels.bench"


def test_budget_loses_the_last_cells_only():
    planned = jobs()
    device = FakeDevice()
    outcome, _ = _run(planned, device, budget_s=60.0)
    assert 0 < outcome.left < len(planned)
    assert device.cells == [job.cell for job in planned[: len(device.cells)]]
    assert device.now <= 60.0 + 0.1


def test_a_missing_library_is_tried_once_and_others_go_on():
    device = FakeDevice({"flashinfer_cascade": ImportError("no flashinfer")})
    outcome, rows = _run(jobs(("figures",)), device)
    assert device.tried.count("flashinfer_cascade") == 1
    assert list(outcome.absent) == ["flashinfer_cascade"]
    assert outcome.failed == []
    assert {row["backend"] for row in rows} >= {"fa3", "granikv_fused_dense", "cublas_dense"}


def test_what_is_not_implemented_or_left_out_is_no_failure():
    device = FakeDevice({"granikv_fused_dense": NotImplementedError("head_dim")})
    out = io.StringIO()
    planned = jobs(("figures",))[:2]
    outcome = bench.run_jobs(planned, device, MACHINE, out, 1e9, device.now_s, ("cublas_dense",))
    assert (outcome.failed, list(outcome.absent)) == ([], ["cublas_dense"])
    assert device.tried.count("granikv_fused_dense") == 2
    assert "cublas_dense" not in device.tried


def test_a_wrong_result_has_no_row():
    device = FakeDevice({"granikv_fused_dense": ArithmeticError("result is off by 1e-1")})
    outcome, rows = _run(jobs(("figures",))[:2], device)
    assert len(outcome.failed) == 2
    assert "granikv_fused_dense" not in {row["backend"] for row in rows}


def test_summary_states_reach_and_roofs():
    _, rows = _run(jobs(("figures", "passes", "coarse")), FakeDevice())
    text = bench_figures.summary(rows)
    results = bench_figures.collect(rows)
    cell = one_prefix(LLAMA, 256, 16384, 256)
    ours = min(t.median_us for t in results.of(cell) if t.backend.startswith("granikv"))
    line = next(line for line in text.splitlines() if line.startswith("| 16K x 256 "))
    cells = [part.strip() for part in line.split("|")[1:-1]]
    assert cells[1] == "160 us (130)"
    assert cells[2].startswith(f"{ours:.1f} (")
    assert float(cells[9]) == pytest.approx(cell.least_bytes / ours / 1e6, abs=0.01)
    assert float(cells[11]) == pytest.approx(cell.flops / ours / 1e6, abs=1)
    assert "Roofs of this run: read 3.49 TB/s" in text
    assert "Best over FA3's serial pair" in text
    assert "Plan of a step" in text


def test_summary_of_nothing_says_so():
    text = bench_figures.summary([])
    assert text.count("not measured") == 3 + len(
        {**bench_figures.REACH_US, **bench_figures.REACH_BYTES, **bench_figures.REACH_FLOPS}
    )


def test_last_of_two_rows_counts():
    _, rows = _run(jobs(("passes",)), FakeDevice())
    again = [{**row, "times_us": [1.0, 2.0, 4.0]} for row in rows]
    results = bench_figures.collect([*rows, *again])
    times = [time for found in results.times.values() for time in found]
    assert {time.median_us for time in times} == {2.0}
    assert median(time.iqr_us for time in times) == 1.5


def test_dry_run_and_summary_need_neither_torch_nor_polars(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("")
    code = (
        "import sys\n"
        "from granikv.kernels.bench import main\n"
        "assert main(['--dry-run']) == 0\n"
        f"assert main(['--summary', {str(path)!r}]) == 0\n"
        "print(sorted({'torch', 'triton', 'polars', 'pydantic', 'rich'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_all_fits_a_run_with_slack():
    seconds = sum(bench.job_s(job) for job in jobs())
    assert seconds < 0.5 * 480
