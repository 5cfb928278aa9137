"""Cells: one simulation each, of one system, pool fraction, replica count and seed."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl

from granikv import __version__
from granikv.core.repartition import RepartitionPolicy
from granikv.cost_models.coverage import Coverage, coverage_of, seen_of_steps
from granikv.cost_models.hardware import Hardware
from granikv.cost_models.models import ModelShape
from granikv.cost_models.params import GpuParams
from granikv.cost_models.step import StepCost
from granikv.planner.timelines import POINTS, pools_over_time, rate_over_time
from granikv.sim.config import ServerConfig, System
from granikv.sim.metrics import Slo, Summary, summarise, timed_requests
from granikv.sim.run import MemorySink, RunOutcome, simulate
from granikv.traces.detect import Format
from granikv.traces.options import ReadOptions
from granikv.traces.records import RunHeader, RunWriter, read_run
from granikv.traces.request import Request
from granikv.traces.source import open_trace
from granikv.traces.transform import TransformOptions, apply

_CDF_POINTS = 101
_COVERAGE_COLUMNS = (
    "rows", "padded_rows", "prefill_tokens", "private_tokens", "segments_json", "plan_json",
)  # fmt: skip
# The first and last fifth of the arrivals: a queue that grows all along shows between them.
_TREND_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class PlanTask:
    """What every cell of a plan has in common; picklable, since cells run in worker processes.

    `size_source` says in words where the KV capacity comes from.
    """

    trace: Path
    trace_format: Format | Literal["auto"]
    read: ReadOptions
    transform: TransformOptions
    model: ModelShape
    hardware: Hardware
    params: GpuParams
    tp: int
    server: ServerConfig
    router: str
    slo: Slo
    size_source: str = "given"


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation; `hot_fraction` is None for systems without a HOT pool."""

    system: System
    hot_fraction: float | None
    replicas: int
    seed: int

    @property
    def name(self) -> str:
        """Folder name of its run records."""
        pool = "" if self.hot_fraction is None else f"-fp{self.hot_fraction:.3f}"
        return f"{self.system}{pool}-n{self.replicas}-seed{self.seed}"


@dataclass(frozen=True, slots=True)
class CellResult:
    """What a cell found; its series are small enough to draw and to keep in plan.json.

    Attributes:
        early_ttft_s: mean TTFT of the first fifth of the requests by arrival.
        late_ttft_s: mean TTFT of the last fifth, unfinished requests left out.
        hot_misses: wanted slabs that could not be had, by reason.
        split_steps: decode steps that ran as a burst and a follow-on step.
        split_saved_share: busy time that this saved, as a share of all busy time.
        term_share: share of GPU time by term.
        coverage: how well measurements cover what the run asked of each term of the cost model.
        timeline: columns time_s, hot_used, cold_used, hot_tokens, rows of the first replica.
        rate: columns time_s, tokens_per_s.
        cdf: ttft_s and tpot_s at 0, 1, .. 100 %.
    """

    cell: Cell
    summary: Summary
    early_ttft_s: float
    late_ttft_s: float
    hot_misses: dict[str, int]
    promoted_tokens: int
    split_steps: int
    split_saved_share: float
    fragmentation: float
    term_share: dict[str, float]
    coverage: dict[str, Coverage]
    timeline: dict[str, list[float]]
    rate: dict[str, list[float]]
    cdf: dict[str, list[float]]

    def to_json(self) -> dict[str, Any]:
        """Plain form."""
        return asdict(self)


def run_cell(
    task: PlanTask,
    cell: Cell,
    records: Path | None = None,
    policies: Sequence[RepartitionPolicy] | None = None,
) -> CellResult:
    """Simulate one cell; with `records`, its run records are written into that folder's
    `cell.name`; `policies` as in `simulate`.

    Seed 0 is the nominal cost model; every other seed draws each of its parameters from its stated
    error, and seeds every random choice of the trace (jitter, generated workloads), alike for all
    systems.
    """
    cost, requests = seeded(task, cell.seed)
    server = task.server.model_copy(
        update={"system": cell.system}
        | ({} if cell.hot_fraction is None else {"hot_fraction": cell.hot_fraction})
    )
    cost = cost.in_engine(server.is_stock)
    run = partial(
        simulate,
        requests,
        server,
        cost,
        replicas=cell.replicas,
        router=task.router,
        policies=policies,
    )
    if records is None:
        sink = MemorySink()
        outcome = run(sink)
        request_rows, step_rows = (frame.lazy() for frame in sink.frames())
    else:
        folder = records / cell.name
        with RunWriter(folder, _header(task, cell, server)) as writer:
            outcome = run(writer)
        kept = read_run(folder)
        request_rows, step_rows = kept.requests, kept.steps
    return _result(task, cell, server, cost, request_rows, step_rows, outcome)


def seeded(task: PlanTask, seed: int) -> tuple[StepCost, Iterable[Request]]:
    """Cost model and load of a seed."""
    params = task.params
    if seed:
        params = params.draw(np.random.default_rng([seed, 0x5EED]))
    cost = StepCost(params, task.model, task.hardware, task.tp)
    source = open_trace(task.trace, format=task.trace_format, options=replace(task.read, seed=seed))
    return cost, apply(source, task.transform, seed)


def _header(task: PlanTask, cell: Cell, server: ServerConfig) -> RunHeader:
    return RunHeader(
        kind="sim",
        model=task.model.name,
        gpu=task.hardware.name,
        size_tokens=server.size_tokens,
        hot_tokens=server.hot_tokens,
        seed=cell.seed,
        trace=task.trace.name,
        versions={"granikv": __version__},
        flags=server.model_dump(mode="json")
        | {"tp": task.tp, "replicas": cell.replicas, "router": task.router},
    )


def _result(
    task: PlanTask,
    cell: Cell,
    server: ServerConfig,
    cost: StepCost,
    requests: pl.LazyFrame,
    steps: pl.LazyFrame,
    outcome: RunOutcome,
) -> CellResult:
    timed = timed_requests(requests).sort("arrival_s")
    ttft = timed["ttft_s"].to_numpy()
    fifth = max(1, int(len(ttft) * _TREND_SHARE))
    return CellResult(
        cell=cell,
        summary=summarise(requests, steps, task.slo),
        early_ttft_s=float(ttft[:fifth].mean()) if len(ttft) else 0.0,
        late_ttft_s=float(ttft[-fifth:].mean()) if len(ttft) else 0.0,
        hot_misses=outcome.hot_misses,
        promoted_tokens=outcome.promoted_tokens,
        split_steps=sum(totals.split_steps for totals in outcome.totals),
        split_saved_share=outcome.split_saved_share,
        fragmentation=outcome.fragmentation,
        term_share=outcome.term_share,
        coverage=_coverage(cost, steps),
        timeline=pools_over_time(steps, server, outcome.boundaries[0]),
        rate=rate_over_time(steps),
        cdf={
            name: _quantiles(timed[name].drop_nulls().to_numpy()) for name in ("ttft_s", "tpot_s")
        },
    )


def _coverage(cost: StepCost, steps: pl.LazyFrame) -> dict[str, Coverage]:
    """From an even sample of the steps: the extremes of a run last."""
    frame = steps.select(_COVERAGE_COLUMNS).collect()
    sample = frame.gather_every(-(-max(frame.height, 1) // POINTS))
    return coverage_of(cost, seen_of_steps(cost, sample.iter_rows(named=True)))


def _quantiles(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    if not len(values):
        return []
    return [float(q) for q in np.quantile(values, np.linspace(0.0, 1.0, _CDF_POINTS))]
