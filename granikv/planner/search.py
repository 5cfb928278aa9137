"""Search: the cells of a plan on all cores, and the number of replicas that the trace needs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from granikv.core.errors import ConfigError
from granikv.planner.cells import Cell, CellResult, PlanTask, run_cell
from granikv.planner.parallel import run_all
from granikv.sim.config import System
from granikv.sim.metrics import Slo

REFERENCE_FRACTION = 0.2  # the paper's default pool fraction
AUTO_FRACTIONS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6)
_RANGE_POINTS = 9
MAX_REPLICAS = 64
# Share of requests that must meet the SLO before a replica count counts as enough.
SLO_SHARE = 0.95
# A queue that grows: the last fifth of the requests waits this much longer than the first, and this
# long.
_GROWTH = 3.0
_GROWTH_TTFT_S = 2.0

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Findings:
    """All results of a plan; `is_partial` after an interrupt.

    Attributes:
        replicas: of the cells.
        needed_replicas: least number per system that keeps up and meets the SLO, None when no
            number up to
            `MAX_REPLICAS` does; a system is missing when it was not asked.
    """

    task: PlanTask
    fractions: tuple[float, ...]
    seeds: int
    replicas: int = 1
    results: dict[Cell, CellResult] = field(default_factory=dict)
    needed_replicas: dict[System, int | None] = field(default_factory=dict)
    is_partial: bool = False

    def of(self, system: System, fraction: float | None = None) -> list[CellResult]:
        """Results of one system and pool fraction in order of seed."""
        cells = [Cell(system, fraction, self.replicas, seed) for seed in range(self.seeds)]
        return [self.results[cell] for cell in cells if cell in self.results]


def parse_fractions(text: str, flag: str = "--fp") -> tuple[float, ...]:
    """`auto`, one fraction, or `low:high`; 0.2 is always among a range's points, to compare with.

    `flag` is the option that errors name.

    Raises:
        ConfigError: not of that form, or outside (0, 1).
    """
    if text == "auto":
        return AUTO_FRACTIONS
    try:
        parts = [float(part) for part in text.split(":")]
    except ValueError:
        parts = []
    if len(parts) not in (1, 2) or not all(0.0 < part < 1.0 for part in parts):
        raise ConfigError(
            f"{flag} must be auto, a fraction inside (0, 1) or a range like 0.05:0.6, got {text}."
        )
    low, high = parts[0], parts[-1]
    if low > high:
        raise ConfigError(f"{flag} {text} runs backwards; write the smaller fraction first.")
    if low == high:
        return (low,)
    step = (high - low) / (_RANGE_POINTS - 1)
    points = {round(low + step * i, 4) for i in range(_RANGE_POINTS)}
    if low < REFERENCE_FRACTION < high:
        points.add(REFERENCE_FRACTION)
    return tuple(sorted(points))


def is_overloaded(result: CellResult) -> bool:
    """Whether requests arrived faster than they were served: the queue grew to the end."""
    summary = result.summary
    if summary.offered_s < 1.0:  # one burst: there is no rate to keep up with
        return False
    late, early = result.late_ttft_s, result.early_ttft_s
    return late > _GROWTH_TTFT_S and late > _GROWTH * early


def is_enough(result: CellResult, slo: Slo) -> bool:
    """Whether this many replicas keep up and meet the SLO."""
    slo_met = not slo.is_set or result.summary.slo_share >= SLO_SHARE
    return slo_met and not is_overloaded(result)


def find_replicas(
    task: PlanTask, system: System, on_run: Callable[[CellResult], None]
) -> tuple[int | None, CellResult]:
    """Least number of replicas that is enough, by doubling and halving; and the best run seen.

    None when even `MAX_REPLICAS` are not enough.
    """
    fraction = REFERENCE_FRACTION if system == "granikv" else None

    def run(replicas: int) -> CellResult:
        result = run_cell(task, Cell(system, fraction, replicas, 0))
        on_run(result)
        return result

    low, high = 0, 1
    best = run(high)
    while not is_enough(best, task.slo):
        if high >= MAX_REPLICAS:
            return None, best
        low, high = high, high * 2
        best = run(high)
    while high - low > 1:
        middle = (low + high) // 2
        result = run(middle)
        if is_enough(result, task.slo):
            high, best = middle, result
        else:
            low = middle
    return high, best


def cells_of(fractions: tuple[float, ...], replicas: int, seeds: int) -> list[Cell]:
    """All cells of a plan, the nominal seed first."""
    cells: list[Cell] = []
    for seed in range(seeds):
        cells.append(Cell("sglang", None, replicas, seed))
        cells.append(Cell("cascade", None, replicas, seed))
        cells.extend(Cell("granikv", fraction, replicas, seed) for fraction in fractions)
    return cells


def run_cells(
    findings: Findings,
    cells: list[Cell],
    records: Path | None,
    on_progress: Progress,
    jobs: int | None = None,
) -> None:
    """Run cells on all cores into `findings.results`; nominal cells leave run records."""
    calls = [
        partial(run_cell, findings.task, cell, None if cell.seed else records) for cell in cells
    ]
    for done, (_, result) in enumerate(run_all(calls, jobs), 1):
        findings.results[result.cell] = result
        on_progress(done, len(cells))
