"""The ladder: five rungs from single steps to decisions, over any live runs and results."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from granikv.core.errors import ConfigError
from granikv.cost_models.params import GpuParams
from granikv.validate.compare.decision_rung import Decision, Outcome, decide
from granikv.validate.compare.error_measures import Errors, spread
from granikv.validate.compare.live_run import LiveRun, read_live, words_of
from granikv.validate.compare.replay import Replayed, cost_of, replay
from granikv.validate.compare.request_rung import RequestComparison, compare_requests
from granikv.validate.compare.saturation_rung import Load, Saturation, saturations
from granikv.validate.compare.schedule_rung import ScheduleComparison, compare_schedule
from granikv.validate.compare.steady_rung import SteadyComparison, compare_steady
from granikv.validate.compare.step_rung import StepTimes, step_times
from granikv.validate.driven_cells import PoissonCell
from granikv.validate.serve_cells import cells
from granikv.validate.serve_results import Results

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class RunReport:
    """One live run on the rungs that its records allow.

    Attributes:
        steps: None without recorded steps, schedule likewise; requests, replayed: None without a
            trace.
    """

    run: LiveRun
    steps: StepTimes | None
    schedule: ScheduleComparison | None
    requests: RequestComparison | None
    replayed: Replayed | None


@dataclass(frozen=True, slots=True)
class Ladder:
    """All rungs.

    Attributes:
        saturations: where queues begin, of workloads that ran at several rates.
        spreads: `LiveRun.identity` to the spread of its repeats: throughput, TTFT and TPOT at p50;
            only where there are repeats.
    """

    runs: list[RunReport]
    steady: list[SteadyComparison]
    decisions: list[Decision]
    saturations: list[Saturation]
    spreads: dict[tuple[str, ...], dict[str, float]]


def climb(
    paths: Sequence[Path], params: GpuParams | None = None, on_progress: Progress | None = None
) -> Ladder:
    """Compare live runs (folders) and results of `granikv bench serve` (files) with simulations.

    A folder without a run stands for all runs below it. `params` takes the place of the shipped
    parameters of each run's GPU.

    Raises:
        ConfigError: nothing can be compared, or a run is of an unknown model or GPU.
        TraceFormatError: a file cannot be read.
    """
    folders, files = _found(paths)
    reports, steady = [], []
    for number, folder in enumerate(folders):
        reports.append(_report(read_live(folder), params))
        if on_progress is not None:
            on_progress(number + 1, len(folders) + len(files))
    for number, file in enumerate(files):
        steady += compare_steady(Results(file).rows(), params)
        if on_progress is not None:
            on_progress(len(folders) + number + 1, len(folders) + len(files))
    return Ladder(
        reports,
        steady,
        decide(_outcomes(reports, steady)),
        saturations(_loads(reports)),
        _spreads(reports),
    )


def _found(paths: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Folders with a run, and files of results.

    Raises:
        ConfigError: there is neither at a path.
    """
    folders, files = [], []
    for path in paths:
        if path.is_file():
            files.append(path)
            continue
        found = [header.parent for header in sorted(path.rglob("header.json"))]
        if not found:
            raise ConfigError(f"{path} holds no run and is no file of results; check the path.")
        folders += found
    return folders, files


def window_of(run: LiveRun) -> tuple[int, int] | None:
    """Finishes before and in the steady window of a run past saturation, None for other runs."""
    cell = _cell_of(run)
    return cell.window if cell is not None else None


def _cell_of(run: LiveRun) -> PoissonCell | None:
    """The cell of the serving benchmark with arrivals that a run is of, None for other runs."""
    try:
        (cell,) = cells([run.header.trace])
    except ConfigError:
        return None
    return cell if isinstance(cell, PoissonCell) else None


def _report(run: LiveRun, params: GpuParams | None) -> RunReport:
    cost = cost_of(run.header.model, run.gpu, run.tp, params)
    window = window_of(run)
    engine_cost = cost.in_engine(run.is_stock)
    steps = step_times(run, engine_cost) if run.steps.height else None
    if run.trace is None:
        return RunReport(run, steps, None, None, None)
    schedule = compare_schedule(run, cost, window) if run.steps.height else None
    found = replay(run, cost)
    requests = compare_requests(run.requests, found.requests, window, knows_hot=run.knows_hot)
    return RunReport(run, steps, schedule, requests, found)


def _outcomes(
    reports: Iterable[RunReport], steady: Iterable[SteadyComparison]
) -> Iterable[Outcome]:
    for one in steady:
        workload = _words(one.model, one.cell, one.engine)
        setting = _words(one.variant, words_of(json.loads(one.settings)))
        yield Outcome(workload, one.variant, setting, one.live, one.simulated)
    for report in reports:
        run, found = report.run, report.requests
        if found is None:
            continue
        workload = f"{run.header.model} {run.header.trace}, {run.header.size_tokens:,} tokens"
        setting = _words(run.variant, words_of(run.settings))
        live, simulated = found.live_tokens_per_s, found.simulated_tokens_per_s
        yield Outcome(workload, run.variant, setting, live, simulated)


def _loads(reports: Iterable[RunReport]) -> Iterable[Load]:
    for report in reports:
        run, cell = report.run, _cell_of(report.run)
        found = None if report.requests is None else report.requests.times.get("ttft_s")
        if cell is None or found is None:
            continue
        lengths = "+".join(map(str, sorted(cell.prefixes)))
        settings = words_of(run.settings)
        size = f"{run.header.size_tokens:,} tokens"
        workload = _words(f"{run.header.model} behind {lengths}, {size},", run.variant, settings)
        yield Load(workload, cell.rate_per_s, found.live[0], found.simulated[0])


def _words(*parts: str) -> str:
    """Parts that say something, with spaces."""
    return " ".join(part for part in parts if part not in ("", "{}"))


def _spreads(reports: Iterable[RunReport]) -> dict[tuple[str, ...], dict[str, float]]:
    repeats: dict[tuple[str, ...], list[RequestComparison]] = defaultdict(list)
    for report in reports:
        if report.requests is not None:
            repeats[report.run.identity].append(report.requests)
    found = {}
    for identity, many in repeats.items():
        values = {"throughput": [one.live_tokens_per_s for one in many]}
        for name in many[0].times:
            values[name] = [one.times[name].live[0] for one in many if name in one.times]
        spreads = {name: spread(each) for name, each in values.items()}
        if known := {name: value for name, value in spreads.items() if value is not None}:
            found[identity] = known
    return found


def figures(ladder: Ladder) -> dict[str, float]:
    """Every absolute error by name, as a share; what a later version must not make worse."""
    found: dict[str, float] = {}
    for report in ladder.runs:
        name = report.run.name
        for (mode,), error in (report.steps.errors("mode") if report.steps else {}).items():
            found[f"step {name} {mode} median"] = error.median
            found[f"step {name} {mode} p90"] = error.p90
        if report.schedule is not None:
            found |= _request_figures(f"schedule {name}", report.schedule.requests)
        if report.requests is not None:
            found |= _request_figures(f"run {name}", report.requests)
    for one in ladder.steady:
        key = " ".join((one.model, one.cell, one.variant, one.engine, one.settings))
        found[f"steady {key}"] = abs(one.error)
    for decision in ladder.decisions:
        if decision.counts:
            found[f"{decision.question} {decision.workload}"] = decision.loss
            found[f"gain {decision.question} {decision.workload}"] = abs(decision.points) / 100
    for one in ladder.saturations:
        if one.error is not None:
            found[f"saturation {one.workload}"] = abs(one.error)
    return found


def _request_figures(name: str, found: RequestComparison) -> Mapping[str, float]:
    return {
        f"{name} throughput": abs(found.throughput_error),
        f"{name} cached share": abs(found.cached_points) / 100,
        **{f"{name} {kind} p50": abs(t.quantile_errors[0]) for kind, t in found.times.items()},
        **{f"{name} {kind} distance": t.ks for kind, t in found.times.items()},
    }


def grown(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Errors that have grown by more than a tenth, and by more than a tenth of a percent."""
    return {
        name: (before[name], value)
        for name, value in now.items()
        if name in before and value > before[name] * 1.1 + 0.001
    }


def to_json(ladder: Ladder) -> dict[str, Any]:
    """Plain form of everything but the records themselves."""
    return {
        "runs": [_run_json(report, ladder.spreads) for report in ladder.runs],
        "steady": [asdict(one) | {"error": one.error} for one in ladder.steady],
        "decisions": [asdict(one) | {"counts": one.counts} for one in ladder.decisions],
        "saturations": [asdict(one) | {"error": one.error} for one in ladder.saturations],
        "figures": figures(ladder),
    }


def _run_json(report: RunReport, spreads: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    run, steps = report.run, report.steps
    by_mode: Mapping[tuple[object, ...], Errors] = steps.errors("mode") if steps else {}
    return {
        "name": run.name,
        "variant": run.variant,
        "trace": run.header.trace,
        "settings": run.settings,
        "steps": {str(mode): error.to_json() for (mode,), error in by_mode.items()},
        "steps_skipped": steps.skipped if steps else {},
        "schedule": None if report.schedule is None else asdict(report.schedule),
        "requests": None if report.requests is None else asdict(report.requests),
        "spread": spreads.get(run.identity),
    }
