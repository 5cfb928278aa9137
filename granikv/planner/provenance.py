"""provenance: what the answers of many runs rest on - server, cost model and its measurements."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

from granikv.cost_models.coverage import ORDER, Coverage
from granikv.cost_models.params import Terms
from granikv.planner.cells import CellResult, PlanTask
from granikv.planner.page_parts import Table

_COVERAGE = {
    "measured range": "fitted, inside the measured range",
    "extrapolated": "fitted, but asked beyond what was measured",
    "datasheet": "not measured, stated or published values",
}
_TERM_NAMES = {
    "gemm": "matrix products",
    "paged": "paged attention",
    "private_memory_efficiency": "private tokens",
    "shared_page_cost": "shared pages",
    "private_reread_share": "shared tokens in COLD",
    "extend": "prefill attention",
    "dense": "dense prefix pass",
    "all_reduce": "all-reduce",
    "elementwise_memory_efficiency": "small kernels",
    "cascade_compute_efficiency": "cascade prefix pass",
    "fused_latency_ns": "fused launch",
    "fused_exposed_share": "overlap in a fused launch",
    "merge_latency_ns": "merge",
}
_NOT_MODELLED = (
    "waves and tails of kernels, clocks and power limits; tokenisation, the network and sampling "
    "beyond a host time per step and row; other users of the GPU, failures and restarts"
)


class Runs(Protocol):
    """Runs of one task, whatever was compared."""

    @property
    def task(self) -> PlanTask:
        """What they have in common."""

    @property
    def results(self) -> Mapping[Any, CellResult]:
        """The runs themselves."""

    @property
    def seeds(self) -> int:
        """Runs per point."""

    @property
    def replicas(self) -> int:
        """Servers of every run."""


def coverage(runs: Runs) -> dict[str, Coverage]:
    """How well measurements cover each term that any nominal run used; the worst of all runs.

    In the order of the parameter file: runs end in any order.
    """
    worst: dict[str, Coverage] = {}
    for result in runs.results.values():
        if result.cell.seed == 0:
            for term, found in result.coverage.items():
                worst[term] = max(worst.get(term, found), found, key=ORDER.index)
    return {term: worst[term] for term in Terms.model_fields if term in worst}


def task_json(task: PlanTask) -> dict[str, Any]:
    """The question, in plain form."""
    return {
        "trace": str(task.trace),
        "model": task.model.name,
        "gpu": task.hardware.name,
        "tp": task.tp,
        "slo": asdict(task.slo),
        "server": task.server.model_dump(mode="json"),
        "size_source": task.size_source,
        "router": task.router,
    }


def provenance_line(runs: Runs) -> str:
    """What the answer rests on, the least sound part of the cost model last."""
    by_coverage: dict[str, list[str]] = {}
    for term, found in coverage(runs).items():
        by_coverage.setdefault(found, []).append(_TERM_NAMES.get(term, term))
    parts = [
        f"{_COVERAGE[name]}: {', '.join(by_coverage[name])}"
        for name in ORDER
        if name in by_coverage
    ]
    return f"Cost model of {runs.task.params.gpu}; {'; '.join(parts)}."


def subject(task: PlanTask) -> str:
    """What was asked about, in a few words."""
    gpus = f" x {task.tp}" if task.tp > 1 else ""
    return f"{task.trace.name} on {task.model.name}, {task.hardware.name}{gpus}"


def assumptions(runs: Runs) -> dict[str, str]:
    """What the runs take for granted, by name."""
    task, server = runs.task, runs.task.server
    slo = [("TTFT", task.slo.ttft_s), ("TPOT", task.slo.tpot_s)]
    limits = ", ".join(f"{name} {limit * 1e3:g} ms" for name, limit in slo if limit is not None)
    return {
        "Model": f"{task.model.name} ({task.model.source})",
        "GPU": f"{task.hardware.name}, tensor parallelism {task.tp}",
        "Cost model": f"{provenance_line(runs)} {task.params.note}",
        "Service levels": limits or "none given",
        "Scheduler": (
            f"SGLang 0.5.17's rules, {server.schedule_policy}, {server.max_running_requests:,} "
            f"running requests at most, chunks of {server.chunked_prefill_size:,} tokens"
        ),
        "HOT pool": f"admission {server.admission}, dispatch {server.dispatch}",
        "Replicas": f"{runs.replicas}, router {task.router}",
        "Seeds": f"{runs.seeds}; seed 0 is the nominal cost model, every other one a draw",
        "Not modelled": _NOT_MODELLED,
    }


def parameters(task: PlanTask) -> Table:
    """Headers, and cells by name of the cost model's parameter."""
    rows: dict[str, tuple[str, ...]] = {}
    for name, p in task.params.terms.items():
        numbers = (p.summary, f"{p.rel_error:.0%}", f"{p.rows_used:,}")
        rows[name] = (*numbers, p.provenance, p.source)
    return ("parameter", "value", "1 sigma", "rows", "origin", "source"), rows
