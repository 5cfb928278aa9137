"""plan: the whole of `granikv plan` without its terminal - task to findings, verdict and files."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from granikv.core.errors import ConfigError
from granikv.planner.cells import PlanTask
from granikv.planner.parallel import saved
from granikv.planner.provenance import coverage, task_json
from granikv.planner.search import (
    MAX_REPLICAS,
    SLO_SHARE,
    Findings,
    Progress,
    cells_of,
    find_replicas,
    is_overloaded,
    run_cells,
)
from granikv.planner.verdict import Verdict, judge
from granikv.planner.words import recommend


def make_plan(
    task: PlanTask,
    fractions: tuple[float, ...],
    replicas: int | None,
    seeds: int,
    out: Path,
    on_progress: Progress,
    on_stage: Callable[[str], None],
    jobs: int | None = None,
) -> tuple[Findings, Verdict | None]:
    """Run all cells and judge them; `replicas` None finds the number that is enough.

    The verdict is None when an interrupt came before the nominal seed was complete. Run records of
    the nominal seed and plan.json are in `out` afterwards, also after an interrupt or an error.

    Raises:
        ConfigError: no number of replicas meets the SLO, or a repartition policy fails.
    """
    findings = Findings(task, fractions, seeds)

    def run() -> None:
        if replicas is None:
            on_stage("Finding the number of replicas")
            findings.replicas = _enough_replicas(findings)
        else:
            findings.replicas = replicas
        on_stage("Simulating")
        cells = cells_of(fractions, findings.replicas, seeds)
        run_cells(findings, cells, out / "runs", on_progress, jobs)
        if _is_short(findings):
            on_stage("Overloaded: finding the number of replicas")
            _need(findings)

    def save() -> Verdict | None:
        verdict = _try_judge(findings)
        write_plan(findings, verdict, out / "plan.json")
        return verdict

    return findings, saved(findings, run, save)


def _enough_replicas(findings: Findings) -> int:
    needed, best = find_replicas(findings.task, "granikv", lambda _: None)
    if needed is None:
        summary = best.summary
        raise ConfigError(
            f"No number of replicas up to {MAX_REPLICAS} lets {SLO_SHARE:.0%} of the requests meet "
            f"the SLO: the best reached is {summary.slo_share:.1%}, with TTFT p95 "
            f"{summary.ttft_s.p95 * 1e3:.0f} ms and TPOT p95 {summary.tpot_s.p95 * 1e3:.1f} ms; "
            "relax the SLO or take a faster GPU or a higher --tp."
        )
    findings.needed_replicas["granikv"] = needed
    findings.needed_replicas["sglang"], _ = find_replicas(findings.task, "sglang", lambda _: None)
    return needed


def _need(findings: Findings) -> None:
    for system in ("granikv", "sglang"):
        findings.needed_replicas[system], _ = find_replicas(findings.task, system, lambda _: None)


def _is_short(findings: Findings) -> bool:
    nominal = [findings.of("granikv", fraction)[0] for fraction in findings.fractions]
    return all(is_overloaded(result) for result in nominal)


def _try_judge(findings: Findings) -> Verdict | None:
    try:
        verdict = judge(findings)
    except ValueError:
        return None
    return replace(verdict, sentences=recommend(verdict, findings))


def write_plan(findings: Findings, verdict: Verdict | None, path: Path) -> None:
    """Write plan.json: the question, the answer, every cell."""
    body: dict[str, Any] = {
        "format": "granikv-plan-1",
        "is_partial": findings.is_partial,
        **task_json(findings.task),
        "replicas": findings.replicas,
        "needed_replicas": findings.needed_replicas,
        "seeds": findings.seeds,
        "cost_model_coverage": coverage(findings),
        "verdict": None if verdict is None else _verdict_json(verdict),
        "cells": [
            findings.results[cell].to_json()
            for cell in sorted(findings.results, key=lambda cell: (cell.seed, cell.name))
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=1) + "\n")


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "kind": verdict.kind,
        "objective": verdict.objective,
        "hot_fraction": verdict.fraction,
        "gain_over_stock": asdict(verdict.gain),
        "gain_over_reference": None
        if verdict.over_reference is None
        else asdict(verdict.over_reference),
        "gain_over_cascade": asdict(verdict.over_cascade),
        "flat_region": list(verdict.flat),
        "recommendation": list(verdict.sentences),
    }
