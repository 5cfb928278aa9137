"""The measurement sweep: `python -m granikv.kernels.sweep --out ROWS.jsonl`, run once on a card.

Writes measured rows as JSON lines, one for each point, with every time that was taken; a line has
the columns of `granikv.cost_models.rows` and nothing else. What the columns mean here:

| op | backend | sizes |
| --- | --- | --- |
| `roof_read`, `roof_copy` | `torch_sum`, `torch_copy` | `bytes`: read, or read plus written |
| `gemm` | `cublas` | `m, n, k` |
| `decode_attention` | `fa3` | as SGLang's decode graphs call it: page table as wide as the context (131072 tokens), one tile schedule for all layers |
| | `fa3_tight_table` | table as wide as the batch, schedule made in each call |
| | `fa3_warm_l2` | as `fa3`, but every call reads what the one before it has read |
| | `fa3_prefix_suffix_merge` | prefix pass, suffix pass and merge, one after the other |
| `prefix_pass` | `fa3`, `fa3_page_table` | all rows as one sequence over one prefix: plain view, or slots |
| `extend_attention` | `fa3` | `m`: new tokens, `private_tokens`: cached and new KV tokens, each summed over `rows` requests; a shared cached prefix is a segment |
| `merge` | `sgl_merge_state_v2` | `rows`, heads, `bytes` |
| `copy` | `torch_gather`, `torch_copy` | K and V of `m` tokens of one layer into a slab; `bytes` read plus written |
| `fused_add_rmsnorm`, `silu_and_mul` | `sgl_kernel` | `m` tokens, width `n`, `bytes` |
| `graph_host`, `graph_device` | `cuda_graph` | `m` trivial kernels: host time of one replay call, device time of the whole graph |

Segments with base 0 lie in random slots, others in consecutive ones; row i holds prefix i mod k.
Times are device times of one call inside a CUDA graph of several, each with its own KV or weights,
replayed behind a flushed L2 (`granikv.kernels.timing`), except where the table says otherwise.
"""  # noqa: E501

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from granikv.kernels.schedule import point_s
from granikv.kernels.shapes import Columns
from granikv.kernels.sweep_points import PARTS, Point, sweep_points

if TYPE_CHECKING:
    from granikv.kernels.card import Card

SOURCE = "granikv.kernels.sweep"
_EMPTY_SIZES: dict[str, int | str | None] = {
    "num_q_heads": None,
    "num_kv_heads": None,
    "head_dim": None,
    "page_size": None,
    "rows": None,
    "segments_json": "[]",
    "private_tokens": None,
    "m": None,
    "n": None,
    "k": None,
    "num_gpus": 1,
    "bytes": None,
}
_MAX_FAILURES_IN_A_ROW = 3  # a sticky CUDA error fails every later point too


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the rows are measured; `read_clocks` says the clocks of this moment."""

    gpu: str
    versions: dict[str, str]
    date: str
    read_clocks: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many points were written, failed, or were left when the budget ended."""

    written: int
    failed: int
    left: int


def row_record(point: Point, times_us: list[float], machine: Machine) -> dict[str, object]:
    """The row of a point of the sweep."""
    return record_of(point.op, point.backend, point.shape.columns(), times_us, machine, SOURCE)


def record_of(
    op: str, backend: str, sizes: Columns, times_us: list[float], machine: Machine, source: str
) -> dict[str, object]:
    """One measured row with the columns of `granikv.cost_models.rows`, in their order."""
    return {
        "op": op,
        "backend": backend,
        "gpu": machine.gpu,
        "dtype": "bfloat16",
        **_EMPTY_SIZES,
        **sizes,
        "times_us": [round(time_us, 4) for time_us in times_us],
        "versions_json": json.dumps(machine.versions),
        "clocks": machine.read_clocks(),
        "date": machine.date,
        "source": source,
    }


def run_points(
    points: list[Point],
    measure: Callable[[Point], list[float]],
    machine: Machine,
    out: TextIO,
    budget_s: float,
    now_s: Callable[[], float],
) -> Outcome:
    """Measure points in order until they are done or the next would overrun the budget.

    Raises:
        RuntimeError: several points in a row failed.
    """
    begin_s = now_s()
    written = failed = in_a_row = 0
    for number, point in enumerate(points):
        elapsed_s = now_s() - begin_s
        if elapsed_s + point_s(point.shape.guess_us()) > budget_s:
            return Outcome(written, failed, len(points) - number)
        if number % 50 == 0:
            print(f"{elapsed_s:6.1f} s  {number}/{len(points)}  {describe(point)}", flush=True)
        try:
            times_us = measure(point)
        except RuntimeError as error:  # torch raises it for a shape that a kernel refuses
            failed, in_a_row = failed + 1, in_a_row + 1
            reason, _, _ = str(error).partition("\n")
            print(f"failed: {describe(point)}: {reason}", flush=True)
            if in_a_row == _MAX_FAILURES_IN_A_ROW:
                raise
            continue
        out.write(json.dumps(row_record(point, times_us, machine)) + "\n")
        out.flush()
        written, in_a_row = written + 1, 0
    return Outcome(written, failed, 0)


def describe(point: Point) -> str:
    """A point in one line of text."""
    return f"tier {point.tier} {point.op} {point.backend} {point.shape}"


def plan_lines(points: Iterable[Point]) -> list[str]:
    """Points and guessed seconds for each part and tier, for `--dry-run`."""
    totals: dict[tuple[int, str], tuple[int, float]] = {}
    for point in points:
        key = (point.tier, point.part)
        count, seconds = totals.get(key, (0, 0.0))
        totals[key] = (count + 1, seconds + point_s(point.shape.guess_us()))
    lines = [
        f"tier {tier}  {part:8}{count:6} points{seconds:8.1f} s"
        for (tier, part), (count, seconds) in totals.items()
    ]
    count = sum(count for count, _ in totals.values())
    seconds = sum(seconds for _, seconds in totals.values())
    return [*lines, f"all            {count:6} points{seconds:8.1f} s"]


def clock_reader() -> Callable[[], str]:
    """A function that reads the SM and memory clock, by NVML where it is installed."""
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        clocks = _nvidia_smi("clocks.sm,clocks.mem")
        return lambda: f"{clocks} (idle, at the start)"
    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(0)

    def read() -> str:
        sm = pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM)
        memory = pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_MEM)
        return f"{sm} MHz, {memory} MHz"

    return read


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0 when every point that fitted was written, 1 when one failed."""
    options = _parser().parse_args(arguments)
    try:
        points = sweep_points(PARTS if options.part == "all" else options.part.split(","))
    except ValueError as error:
        _parser().error(str(error))
    if options.dry_run:
        if options.list:
            print("\n".join(describe(point) for point in points))
        print("\n".join(plan_lines(points)))
        return 0
    return _run(points, options)


def introduce(card: "Card", gpu: str) -> Machine:
    """Say what is measured, and return it as rows note it.

    Args:
        card: the device.
        gpu: name of its hardware file.
    """
    machine = Machine(
        gpu=gpu,
        versions={**card.versions(), "driver": _nvidia_smi("driver_version")},
        date=datetime.now(UTC).date().isoformat(),
        read_clocks=card.clocks_under_load,
    )
    print(f"{card.device_name()}  {json.dumps(machine.versions)}", flush=True)
    return machine


def _run(points: list[Point], options: argparse.Namespace) -> int:
    # Only this path needs torch and a card.
    from granikv.kernels.device_sweep import DeviceSweep

    begin_s = time.monotonic()
    read_clocks = clock_reader()
    sweep = DeviceSweep(options.seed, read_clocks)
    machine = introduce(sweep, options.gpu)
    if options.check:
        attention = any(point.part not in ("roof", "gemm") for point in points)
        print("\n".join(sweep.check(attention)), flush=True)
    print(f"set up in {time.monotonic() - begin_s:.1f} s", flush=True)
    budget_s = options.budget_s - (time.monotonic() - begin_s)
    with options.out.open("a") as out:
        outcome = run_points(points, sweep.measure_point, machine, out, budget_s, time.monotonic)
    print(
        f"{outcome.written} rows written, {outcome.failed} failed, {outcome.left} left by the "
        f"budget, {time.monotonic() - begin_s:.1f} s, in {options.out}",
        flush=True,
    )
    return 1 if outcome.failed else 0


def _nvidia_smi(query: str) -> str:
    """One value of the first GPU, as nvidia-smi prints it."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return text.splitlines()[0].strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m granikv.kernels.sweep",
        description="Measure GEMM, attention and copy kernels on one GPU and write measured rows.",
    )
    add_run_options(parser, Path("sweep.jsonl"), "point")
    parser.add_argument(
        "--part", default="all", help=f"all, or some of {', '.join(PARTS)}, with commas"
    )
    parser.add_argument("--no-check", dest="check", action="store_false")
    return parser


def add_run_options(parser: argparse.ArgumentParser, out: Path, unit: str) -> None:
    """Options of every program that measures one `unit` after another into rows."""
    parser.add_argument("--out", type=Path, default=out, help="appended to")
    parser.add_argument("--budget-s", type=float, default=480.0, help="wall seconds, set-up too")
    parser.add_argument("--gpu", default="h200-sxm", help="name of the hardware file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry-run", action="store_true", help=f"count {unit}s and guess seconds")
    parser.add_argument("--list", action="store_true", help=f"with --dry-run: name every {unit}")


if __name__ == "__main__":
    sys.exit(main())
