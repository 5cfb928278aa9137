"""calibrate: refit what belongs to whole steps to recorded steps of live servers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from granikv.core.errors import ConfigError
from granikv.cost_models.fit.extend_terms import find_extend
from granikv.cost_models.fit.fused import with_values
from granikv.cost_models.fit.held_out import summarise
from granikv.cost_models.fit.recorded_steps import (
    RecordedRun,
    price_decodes,
    timed_steps,
)
from granikv.cost_models.fit.result import held_out_error, rounded
from granikv.cost_models.fit.step_terms import (
    Finding,
    apply,
    find_attention,
    find_host,
    find_rereads,
    find_shared_pages,
)
from granikv.cost_models.hardware import Hardware
from granikv.cost_models.params import GpuParams, HeldOutError, Terms
from granikv.cost_models.surface import FloatArray

_WHAT = {
    "host_decode_ns": "what passes between a decode step's end on the GPU and the next one's start",
    "private_latency_ns": "of a step without segments, what remains for each layer",
    "private_row_ns": "what a row adds to a layer beyond its reads, sampling included",
    "private_memory_efficiency": "what private tokens are read at, uneven rows and clocks under "
    "load included",
    "fused_latency_ns": "what a fused launch takes beyond its work",
    "dense_step_efficiency": "share of the rate that dense passes have alone, clocks under load "
    "included",
    "fused_exposed_share": "what fused launches do not hide of the shorter of their passes over "
    "prefixes and their private pass",
    "shared_page_cost": "the surface of kernel rows times one factor",
    "host_extend_ns": "what an extend step without a CUDA graph takes whatever it computes",
    "host_extend_graph_ns": "what one with a CUDA graph takes beside that graph's tokens",
    "private_reread_share": "what a read from L2 costs in the private pass, of one from memory",
    "extend_step_efficiency": "share of its kernels' rates that an extend step reaches",
}
_NOTE = " Terms of whole steps rest on "
_LEAST_ERROR, _ONE_RUN_ERROR = 0.05, 0.3


@dataclass(frozen=True, slots=True)
class Calibration:
    """Refitted parameters and what they do to steps.

    Attributes:
        params: with the provenance of what was refitted.
        changes: name of a term to its summary before and after.
        kept: a sentence for each term that the steps do not tell.
        steps: timed decode steps of all runs: run, mode, rows, measured_ns and the predictions
            before_ns, after_ns and left_out_ns (by a fit without the step's run; NaN for one run).
        held_out: the same steps of runs that no fit has seen, without left_out_ns; None for none.
    """

    params: GpuParams
    changes: dict[str, tuple[str, str]]
    kept: tuple[str, ...]
    steps: pl.DataFrame
    held_out: pl.DataFrame | None


def calibrate(
    runs: Sequence[RecordedRun],
    params: GpuParams,
    hardware: Hardware,
    held_out: Sequence[RecordedRun] = (),
) -> Calibration:
    """Refit every term that the steps of these runs tell; `params` has all others.

    Raises:
        ConfigError: they tell none, or a run has no decode step whose time is known.
    """
    for run in (*runs, *held_out):
        if timed_steps(run, "decode").is_empty():
            raise ConfigError(f"{run.name} has no two decode steps in a row; leave it out.")
    findings = _find(runs, params, hardware)
    kept = tuple(finding.kept for finding in findings if finding.kept is not None)
    if not any(finding.values for finding in findings):
        raise ConfigError(f"The runs have too few recorded steps to fit. {' '.join(kept)}")
    fitted = apply(params, findings)
    steps = _compared(runs, params, fitted, hardware)
    others = [_others(runs, run, params, hardware) for run in runs] if len(runs) > 1 else []
    left_out = [
        _predicted([run], other, hardware) for run, other in zip(runs, others, strict=False)
    ]
    unseen = np.concatenate(left_out) if left_out else np.full(steps.height, np.nan)
    steps = steps.with_columns(left_out_ns=unseen)
    judged = _compared(held_out, params, fitted, hardware) if held_out else None
    final = _described(params, fitted, findings, others, _evidence(steps, judged, runs))
    changes = {
        name: (getattr(params.terms, name).summary, getattr(final.terms, name).summary)
        for finding in findings
        for name in finding.values
    }
    return Calibration(final, changes, kept, steps, judged)


def _find(
    runs: Sequence[RecordedRun], params: GpuParams, hardware: Hardware
) -> tuple[Finding, ...]:
    """Every finding; host time first, because all others rest on it, and what a private pass takes
    before what rows share in it.
    """
    # Dense passes at the rate that they have alone: what is found is a share of that one.
    alone = with_values(params, {"dense_step_efficiency": 1.0})
    decodes = price_decodes(runs, alone, hardware)
    host, attention = find_host(decodes), find_attention(decodes)
    found = apply(params, [host, attention])
    return (
        host,
        find_shared_pages(runs, decodes, found, hardware),
        attention,
        find_rereads(runs, decodes, found, hardware),
        find_extend(runs, params, hardware),
    )


def _others(
    runs: Sequence[RecordedRun], left_out: RecordedRun, params: GpuParams, hardware: Hardware
) -> GpuParams:
    """The parameters that all other runs give."""
    return apply(params, _find([run for run in runs if run is not left_out], params, hardware))


def _compared(
    runs: Sequence[RecordedRun], before: GpuParams, after: GpuParams, hardware: Hardware
) -> pl.DataFrame:
    steps = price_decodes(runs, before, hardware)
    return steps.select(
        "run",
        "mode",
        "rows",
        measured_ns=pl.col("gpu_ns") + pl.col("gap_ns"),
        before_ns=pl.col("predicted_ns"),
        after_ns=_predicted(runs, after, hardware),
    )


def _predicted(runs: Sequence[RecordedRun], params: GpuParams, hardware: Hardware) -> FloatArray:
    return price_decodes(runs, params, hardware)["predicted_ns"].to_numpy()


@dataclass(frozen=True, slots=True)
class _Evidence:
    """Errors of whole steps, and in words which runs they are of."""

    words: str
    residual: float
    held_out: HeldOutError | None
    rows: tuple[float, float]


def _evidence(
    steps: pl.DataFrame, judged: pl.DataFrame | None, runs: Sequence[RecordedRun]
) -> _Evidence:
    names = ", ".join(run.name for run in runs)
    words = f"recorded steps of live servers ({names})"
    measured, after = steps["measured_ns"].to_numpy(), steps["after_ns"].to_numpy()
    unseen, predicted = (judged, "after_ns") if judged is not None else (steps, "left_out_ns")
    error = None
    if judged is not None or len(runs) > 1:
        summary = summarise(
            unseen[predicted].to_numpy(), unseen["measured_ns"].to_numpy(), unseen["run"].to_numpy()
        )
        error = held_out_error(summary, "runs of live servers")
    residual = float(np.median(np.abs(after / measured - 1)))
    rows = steps["rows"].cast(pl.Float64).to_numpy()
    return _Evidence(words, rounded(residual), error, (float(rows.min()), float(rows.max())))


def _described(
    params: GpuParams,
    fitted: GpuParams,
    findings: Sequence[Finding],
    others: Sequence[GpuParams],
    evidence: _Evidence,
) -> GpuParams:
    """The fitted parameters with where they come from, checked as a file's would be."""
    items: dict[str, Any] = dict(params.terms.items())
    for finding in findings:
        for name in finding.values:
            item = getattr(fitted.terms, name)
            update: dict[str, Any] = {
                "provenance": "fitted",
                "source": f"{evidence.words}: {_WHAT[name]}",
                "rows_used": finding.rows_used,
                "residual": evidence.residual,
                "held_out": evidence.held_out,
            }
            if finding.residual is not None:
                update |= {"residual": rounded(finding.residual), "held_out": None}
            if name == "shared_page_cost":
                update["source"] += f"; {item.source}"
            else:
                value = round(item.value, 1 if item.unit == "ns" else 3)
                without = [getattr(other.terms, name).value for other in others]
                update |= {
                    "value": value,
                    "rel_error": _spread(value, without),
                    "valid_range": {} if finding.residual is not None else {"rows": evidence.rows},
                }
            items[name] = item.model_copy(update=update).model_dump()
    note = params.note.split(_NOTE)[0] + _NOTE + f"{evidence.words}."
    return params.model_copy(update={"note": note, "terms": Terms.model_validate(items)})


def _spread(value: float, without: Sequence[float]) -> float:
    """How far a value moves without one of its runs, as a share of it."""
    if not without or value == 0.0:
        return _ONE_RUN_ERROR
    moved = max(abs(other / value - 1) for other in without)
    return rounded(min(1.0, max(_LEAST_ERROR, moved)))
