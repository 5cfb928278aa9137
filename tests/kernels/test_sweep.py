import io
import json
import subprocess
import sys

import pytest

from granikv.cost_models.rows import SCHEMA, MeasuredRow, read_rows, write_rows
from granikv.kernels import sweep
from granikv.kernels.schedule import point_s
from granikv.kernels.sweep_points import sweep_points

MACHINE = sweep.Machine("h200-sxm", {"torch": "2"}, "2026-11-30", lambda: "1980 MHz, 3201 MHz")


class Clock:
    """A clock that a fake measurement moves by what the point is expected to take."""

    def __init__(self):
        self.now = 100.0
        self.measured = []

    def measure(self, point):
        self.now += point_s(point.shape.guess_us())
        self.measured.append(point)
        return [1.0, 2.0]

    def now_s(self):
        return self.now


def test_every_point_gives_a_row_of_the_schema():
    for point in sweep_points():
        record = sweep.row_record(point, [3.25, 4.0], MACHINE)
        assert list(record) == SCHEMA.names()
        MeasuredRow.model_validate(json.loads(json.dumps(record)))


def test_lines_become_a_rows_file(tmp_path):
    clock, out = Clock(), io.StringIO()
    points = sweep_points(["small"])
    sweep.run_points(points, clock.measure, MACHINE, out, 1e9, clock.now_s)
    rows = [MeasuredRow.model_validate_json(line) for line in out.getvalue().splitlines()]
    write_rows(tmp_path / "rows.parquet", rows)
    assert read_rows(tmp_path / "rows.parquet").height == len(points)


def test_budget_cuts_the_tail_only():
    clock, out = Clock(), io.StringIO()
    points = sweep_points(["prefix"])
    outcome = sweep.run_points(points, clock.measure, MACHINE, out, 5.0, clock.now_s)
    assert 0 < outcome.written < len(points)
    assert outcome.left == len(points) - outcome.written
    assert clock.measured == points[: outcome.written]
    following_s = point_s(points[outcome.written].shape.guess_us())
    assert clock.now - 100.0 <= 5.0 < clock.now - 100.0 + following_s


def test_a_refused_shape_is_left_out_and_told(capsys):
    clock, out = Clock(), io.StringIO()
    points = sweep_points(["prefix"])[:8]

    def measure(point):
        if point == points[4]:
            raise RuntimeError("no kernel\nfor this")
        return clock.measure(point)

    outcome = sweep.run_points(points, measure, MACHINE, out, 1e9, clock.now_s)
    assert outcome == sweep.Outcome(written=7, failed=1, left=0)
    assert len(out.getvalue().splitlines()) == 7
    assert "no kernel" in capsys.readouterr().out


def test_a_broken_device_stops_the_sweep():
    def measure(point):
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        sweep.run_points(sweep_points(), measure, MACHINE, io.StringIO(), 1e9, Clock().now_s)


def test_dry_run_needs_neither_torch_nor_polars():
    code = (
        "import sys\n"
        "from granikv.kernels.sweep import main\n"
        "assert main(['--dry-run', '--part', 'gemm,decode']) == 0\n"
        "print(sorted({'torch', 'polars', 'sgl_kernel'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[-1] == "[]"
    assert "decode" in done.stdout
    assert "extend" not in done.stdout


def test_all_fits_the_budget_with_slack():
    seconds = sum(float(line.split()[-2]) for line in sweep.plan_lines(sweep_points())[:-1])
    assert seconds < 0.8 * 480


def test_an_unknown_part_is_told(capsys):
    with pytest.raises(SystemExit):
        sweep.main(["--dry-run", "--part", "gemm,prefil"])
    assert "got prefil" in capsys.readouterr().err
