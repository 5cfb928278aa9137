"""The decode benchmark: `python -m granikv.kernels.bench --out ROWS.jsonl`, run once on a card.

Writes one measured row (columns of `granikv.cost_models.rows`) for each cell and backend, with
every time that was taken, and prints the figures at the end. `op` is `decode_attention` for a whole
layer and for private tokens alone, `prefix_pass` for a prefix alone, `plan` for GraniKV's plan of a
step (one for all layers, so outside of the layer's time), `roof_read`, `roof_copy` and `gemm` for
what this card did in this run. Backends are those of `granikv.kernels.bench_points`.

Times are device times of one layer inside a CUDA graph of several, each with its own KV, replayed
behind a flushed L2. Every result is compared before it is timed: FA3's with float64 on some rows,
the others with FA3's.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Protocol, TextIO

from granikv.kernels.bench_figures import read_lines, summary
from granikv.kernels.bench_points import TIERS, Backend, Cell, Job, jobs, plan_calls
from granikv.kernels.sweep import Machine, add_run_options, clock_reader, introduce, record_of
from granikv.kernels.sweep_points import Point, sweep_points

SOURCE = "granikv.kernels.bench"
_REPLAYS = 24  # warm-ups too
_FLUSH_US = 100.0
_CELL_S = 0.15  # tables, queries and the float64 reference
_BACKEND_S = 0.015  # tables, check and capture


class Device(Protocol):
    """What measures: `granikv.kernels.device_bench.DeviceBench`, or a fake one of a test."""

    def measure_point(self, point: Point) -> list[float]:
        """Times of a roof."""

    def begin(self, cell: Cell) -> None:
        """Make the inputs of a cell."""

    def measure(self, backend: Backend) -> tuple[list[float], float]:
        """Times of a backend on the cell, and its relative error."""

    def check_device(self) -> None:
        """Raise where the device is broken."""


@dataclass(slots=True)
class Outcome:
    """Rows written, backends that failed, and cells left when the budget ended."""

    written: int = 0
    failed: list[str] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    left: int = 0


def backend_s(job: Job, backend: Backend) -> float:
    """Wall time that a backend should take on a cell, compilation not included."""
    guess_us = job.cell.guess_us(backend.work)
    replay_us = plan_calls(guess_us) * guess_us + _FLUSH_US
    return _BACKEND_S + _REPLAYS * replay_us * 1e-6


def job_s(job: Job) -> float:
    """Wall time that a cell should take."""
    return _CELL_S + sum(backend_s(job, backend) for backend in job.backends)


def plan_lines(planned: Iterable[Job]) -> list[str]:
    """Cells, rows and guessed seconds of each tier, for `--dry-run`."""
    totals: dict[str, tuple[int, int, float]] = {}
    for job in planned:
        cells, rows, seconds = totals.get(job.tier, (0, 0, 0.0))
        totals[job.tier] = (cells + 1, rows + len(job.backends), seconds + job_s(job))
    everything = [sum(total[i] for total in totals.values()) for i in range(3)]
    return [
        f"{tier:8}{cells:5.0f} cells{rows:6.0f} rows{seconds:8.1f} s"
        for tier, (cells, rows, seconds) in {**totals, "all": everything}.items()
    ]


def run_jobs(
    planned: list[Job],
    device: Device,
    machine: Machine,
    out: TextIO,
    budget_s: float,
    now_s: Callable[[], float],
    without: Sequence[str] = (),
) -> Outcome:
    """Measure cells in order until they are done or the budget is over.

    A backend that raises loses its row and nothing else; one whose library is missing is not tried
    again.

    Raises:
        RuntimeError: an error has left the device unusable.
    """
    begin_s, outcome = now_s(), Outcome(absent=dict.fromkeys(without, "left out"))
    for number, job in enumerate(planned):
        elapsed_s = now_s() - begin_s
        if elapsed_s + job_s(job) > budget_s:
            outcome.left = len(planned) - number
            break
        print(f"{elapsed_s:6.1f} s  {number}/{len(planned)}  {describe(job)}", flush=True)
        device.begin(job.cell)
        for backend in job.backends:
            if now_s() - begin_s > budget_s:
                break
            if backend.name not in outcome.absent:
                _measure(job, backend, device, machine, out, outcome)
    return outcome


def _measure(
    job: Job, backend: Backend, device: Device, machine: Machine, out: TextIO, outcome: Outcome
) -> None:
    try:
        times_us, error = device.measure(backend)
    except NotImplementedError as missing:  # of this cell's heads, perhaps
        print(f"         none: {backend.name}: {_first_line(missing)}", flush=True)
        return
    except ImportError as missing:
        outcome.absent[backend.name] = _first_line(missing)
        print(f"         absent: {backend.name}: {_first_line(missing)}", flush=True)
        return
    except Exception as problem:  # compilers and libraries raise what they like
        outcome.failed.append(f"{describe(job)} {backend.name}: {_first_line(problem)}")
        print(f"         failed: {backend.name}: {_first_line(problem)}", flush=True)
        if backend.family == "flashinfer":  # no compiler, or no kernel for this card
            outcome.absent[backend.name] = _first_line(problem)
        device.check_device()
        return
    sizes = job.cell.columns(backend.page_size)
    _write(out, record_of(job.op(backend), backend.name, sizes, times_us, machine, SOURCE))
    outcome.written += 1
    page = f" page {backend.page_size}" if backend.page_size > 1 else ""
    print(
        f"         {median(times_us):8.1f} us  {backend.name}{page}  (error {error:.0e})",
        flush=True,
    )


def _write(out: TextIO, record: dict[str, object]) -> None:
    out.write(json.dumps(record) + "\n")
    out.flush()


def run_roofs(device: Device, machine: Machine, out: TextIO) -> None:
    """Measure what the card reads, copies and multiplies in this run."""
    for point in sweep_points(["roof"]):
        times_us = device.measure_point(point)
        sizes = point.shape.columns()
        _write(out, record_of(point.op, point.backend, sizes, times_us, machine, SOURCE))
        print(f"         {median(times_us):8.1f} us  {point.op}", flush=True)


def describe(job: Job) -> str:
    """A job in one line of text."""
    cell = job.cell
    parts = [f"{segment.tokens}x{len(segment.rows)}" for segment in cell.segments]
    several = f"{parts[0]} and {len(parts) - 1} more" if len(parts) > 4 else " ".join(parts)
    return (
        f"{job.tier}: {cell.heads.q}/{cell.heads.kv} heads, {cell.rows} rows, "
        f"shared {several or 'none'}, private {cell.private_tokens}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0 when every backend that is there gave a row for every cell, else 1."""
    options = _parser().parse_args(arguments)
    if options.summary:
        print(summary(read_lines(options.summary)))
        return 0
    try:
        planned = jobs_of(options.tier)
    except ValueError as error:
        _parser().error(str(error))
    if options.dry_run:
        if options.list:
            print("\n".join(describe(job) for job in planned))
        print("\n".join(plan_lines(planned)))
        return 0
    if problem := device_problem():
        print(problem, file=sys.stderr)
        return 1
    without = tuple(filter(None, options.without.split(",")))
    return run(planned, options.out, options.budget_s, options.gpu, options.seed, without)


def jobs_of(tier: str) -> list[Job]:
    """Jobs of `all` tiers, or of some with commas.

    Raises:
        ValueError: no such tier.
    """
    return jobs(TIERS if tier == "all" else tier.split(","))


def device_problem() -> str | None:
    """Why nothing can be measured here, or None."""
    try:
        import torch  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return "torch is not installed; pip install 'granikv[gpu]'."
    if not torch.cuda.is_available():
        return "There is no CUDA device; --dry-run and --summary need none."
    return None


def run(
    planned: list[Job],
    out_path: Path,
    budget_s: float,
    gpu: str,
    seed: int,
    without: Sequence[str] = (),
) -> int:
    """Measure on the current card, append rows to a file, print the figures."""
    # Only this path needs torch and a card.
    from granikv.kernels.device_bench import DeviceBench

    begin_s = time.monotonic()
    device = DeviceBench(seed, clock_reader())
    machine = introduce(device, gpu)
    with out_path.open("a") as out:
        run_roofs(device, machine, out)
        left_s = budget_s - (time.monotonic() - begin_s)
        outcome = run_jobs(planned, device, machine, out, left_s, time.monotonic, without)
    print(summary(read_lines(out_path)))
    print(
        f"{outcome.written} rows written, {len(outcome.failed)} failed, {outcome.left} cells left "
        f"by the budget, {time.monotonic() - begin_s:.1f} s, in {out_path}"
    )
    lines = [f"absent: {name}: {why}" for name, why in outcome.absent.items()]
    print("\n".join([*lines, *(f"failed: {line}" for line in outcome.failed)]), flush=True)
    return 1 if outcome.failed else 0


def _first_line(error: Exception) -> str:
    first, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {first[:200]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m granikv.kernels.bench",
        description="Measure decode attention over shared prefixes beside the libraries.",
    )
    add_run_options(parser, Path("bench.jsonl"), "cell")
    parser.add_argument(
        "--tier", default="all", help=f"all, or some of {', '.join(TIERS)}, with commas"
    )
    parser.add_argument("--without", default="", help="backends to leave out, with commas")
    parser.add_argument("--summary", type=Path, help="print the figures of rows, measure nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
