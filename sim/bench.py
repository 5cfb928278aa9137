"""Benchmarks behind `granikv bench sim`: how fast the simulator and the shared core are, on this
machine.

Every workload runs in a process of its own, so that start-up and memory are those of a user's run.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from granikv.core.allocator import HotColdAllocator
from granikv.core.dispatch import Dispatcher
from granikv.core.step import Segment, StepShape
from granikv.cost_models.dispatch_table import build_cost_table
from granikv.cost_models.models import load_model
from granikv.cost_models.params import load_params
from granikv.cost_models.step import StepCost
from granikv.sim.config import ServerConfig, System
from granikv.sim.run import MemorySink, simulate
from granikv.traces.generate import generate
from granikv.traces.records import RunHeader, RunWriter
from granikv.traces.spec import WorkloadSpec

_GPU = "h200-sxm"
_MODEL = "llama-3.1-8b"
_SIZE_TOKENS = 800_000
_RATE_PER_S = 8.0


@dataclass(frozen=True, slots=True)
class Workload:
    """One simulator workload: Poisson 8/s, one replica, H200, Llama-3.1-8B."""

    name: str
    requests: int
    shared_tokens: int
    own_tokens: int
    output_tokens: int
    system: System
    goal: str
    to_disk: bool = False


@dataclass(frozen=True, slots=True)
class Measurement:
    """One line of the table; `goal` is what the project asks of itself."""

    name: str
    value: str
    goal: str


WORKLOADS = (
    Workload(
        "10k requests, 2,048 in, 128 out", 10_000, 0, 2_048, 128, "sglang", "simulation <= 2 s",
    ),
    Workload(
        "10k requests, 16,384 shared + 512 in, 128 out", 10_000, 16_384, 512, 128, "granikv",
        "process <= 5 s, <= 300 MB",
    ),
    Workload(
        "the same with 1,024 out", 10_000, 16_384, 512, 1_024, "granikv",
        "<= 1.3x the simulation time of 128 out",
    ),
    Workload(
        "1M requests, 2,048 in, 128 out, records on disk", 1_000_000, 0, 2_048, 128, "sglang",
        "<= 240 s, memory flat", to_disk=True,
    ),
)  # fmt: skip


def run_benchmarks(
    *, quick: bool = False, repeats: int = 3, on_case: Callable[[str], None] | None = None
) -> list[Measurement]:
    """All measurements; `quick` leaves the million requests out. Medians of `repeats` runs."""
    table: list[Measurement] = []

    def add(name: str, value: str, goal: str) -> None:
        table.append(Measurement(name, value, goal))

    for workload in WORKLOADS:
        if quick and workload.to_disk:
            continue
        if on_case is not None:
            on_case(workload.name)
        runs = [_in_process(workload) for _ in range(1 if workload.to_disk else repeats)]
        figures = {key: median(run[key] for run in runs) for key in runs[0]}
        add(
            workload.name,
            f"simulation {figures['simulation_s']:.2f} s, process {figures['process_s']:.2f} s, "
            f"peak {figures['peak_mb']:.0f} MB",
            workload.goal,
        )
    for name, measure, goal in _CORE:
        if on_case is not None:
            on_case(name)
        add(name, measure(), goal)
    for name, arguments, goal in _COMMANDS:
        if on_case is not None:
            on_case(name)
        add(name, f"{median(_command_s(arguments) for _ in range(repeats)):.2f} s", goal)
    return table


def _in_process(workload: Workload) -> dict[str, float]:
    start = time.perf_counter()
    index = str(WORKLOADS.index(workload))
    done = subprocess.run(
        [sys.executable, "-m", "granikv.sim.bench", index],
        check=True,
        capture_output=True,
        text=True,
    )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures | {"process_s": time.perf_counter() - start}


def _run_workload(workload: Workload) -> dict[str, float]:
    cost = StepCost(load_params(_GPU), load_model(_MODEL))
    config = ServerConfig(system=workload.system, size_tokens=_SIZE_TOKENS)
    requests = generate(_spec(workload), seed=0)
    start = time.perf_counter()
    if workload.to_disk:
        with tempfile.TemporaryDirectory() as folder:
            header = RunHeader(
                kind="sim", model=_MODEL, gpu=_GPU, size_tokens=_SIZE_TOKENS, hot_tokens=0
            )
            with RunWriter(Path(folder) / "run", header) as writer:
                simulate(requests, config, cost, writer)
    else:
        simulate(requests, config, cost, MemorySink())
    elapsed = time.perf_counter() - start
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"simulation_s": elapsed, "peak_mb": peak_kib / 1024}


def _spec(workload: Workload) -> WorkloadSpec:
    body: dict[str, Any] = {
        "requests": workload.requests,
        "arrivals": {"kind": "poisson", "rate_per_s": _RATE_PER_S},
        "private_tokens": workload.own_tokens,
        "output_tokens": workload.output_tokens,
    }
    if workload.shared_tokens:
        body["prefixes"] = [{"count": 1, "tokens": workload.shared_tokens}]
    return WorkloadSpec.model_validate(body)


# ---------------------------------------------------------------------- core


def _cold_rate() -> str:
    """Slots a second through one alloc and one free of 4,096, at a pool of a million."""
    allocator = HotColdAllocator(1_000_000, 100_000)
    for _ in range(64):  # a used pool hands slots out in no order
        _shuffle(allocator)

    def cycle() -> None:
        slots = allocator.alloc_cold(4_096)
        if slots is not None:
            allocator.free_cold(slots)

    return f"{4_096 / _best_s(cycle, 400) / 1e6:.0f} M slots/s"


def _shuffle(allocator: HotColdAllocator) -> None:
    slots = allocator.alloc_cold(8_192)
    if slots is not None:
        allocator.free_cold(np.random.default_rng(0).permutation(slots))


def _slab_rate() -> str:
    """Slab operations a second with 1,000 slabs of mixed sizes: free one at random, reserve one."""
    rng = np.random.default_rng(0)
    allocator = HotColdAllocator(4_000_000, 3_000_000)
    sizes = rng.integers(512, 4_096, 1_000).tolist()
    slabs = [slab for slab in map(allocator.reserve_slab, sizes) if slab is not None]
    picks: Iterator[int] = iter(rng.integers(0, len(slabs), 100_000).tolist())

    def cycle() -> None:
        pick = next(picks)
        old = slabs[pick]
        allocator.free_slab(old)
        new = allocator.reserve_slab(old.length)
        if new is not None:
            slabs[pick] = new

    return f"{2 / _best_s(cycle, 2_000) / 1e3:.0f} k operations/s"


def _plan_new() -> str:
    """A new shape of 64 segments each time."""
    dispatcher = Dispatcher(build_cost_table(StepCost(load_params(_GPU), load_model(_MODEL))))
    shapes = iter([_shape(seed) for seed in range(4_000)])
    return f"{_best_s(lambda: dispatcher.plan(next(shapes)), 100) * 1e6:.0f} us"


def _plan_same() -> str:
    """The same segments with a few more private tokens."""
    dispatcher = Dispatcher(build_cost_table(StepCost(load_params(_GPU), load_model(_MODEL))))
    shape = _shape(0)
    dispatcher.plan(shape)
    return f"{_best_s(lambda: dispatcher.plan(shape), 1_000) * 1e6:.1f} us"


def _shape(seed: int) -> StepShape:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(256, 32_768, 64).tolist()
    rows = rng.integers(2, 64, 64).tolist()
    segments, base = [], 1
    for length, count in zip(lengths, rows, strict=True):
        segments.append(Segment(base, length, count))
        base += length
    return StepShape(512, 512, 131_072, 1_024, tuple(segments), 32, 8, 128)


def _best_s(action: Callable[[], object], calls: int) -> float:
    """Median over 15 batches of the mean time of one call."""
    times = []
    for _ in range(15):
        start = time.perf_counter()
        for _ in range(calls):
            action()
        times.append((time.perf_counter() - start) / calls)
    return median(times)


_CORE: tuple[tuple[str, Callable[[], str], str], ...] = (
    ("COLD slots allocated and freed in bulk", _cold_rate, ">= 20 M slots/s"),
    ("slab operations with 1,000 slabs", _slab_rate, ">= 100 k/s"),
    ("Dispatcher.plan, new shape of 64 segments", _plan_new, "<= 50 us"),
    ("Dispatcher.plan, same bucket", _plan_same, "<= 5 us"),
)  # fmt: skip

# ---------------------------------------------------------------------- commands

_ONE_POINT = (
    "simulate", "--model", _MODEL, "--gpu", _GPU, "--max-requests", "200",
    str(Path(__file__).parent.parent / "traces" / "data" / "agents.yaml"),
)  # fmt: skip
_COMMANDS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("granikv --help", ("--help",), "<= 1 s"),
    ("granikv simulate, one point", _ONE_POINT, "<= 2 s"),
)


def _command_s(arguments: tuple[str, ...]) -> float:
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "granikv.cli.main", *arguments], check=True, capture_output=True
    )
    return time.perf_counter() - start


if __name__ == "__main__":
    print(json.dumps(_run_workload(WORKLOADS[int(sys.argv[1])])))
