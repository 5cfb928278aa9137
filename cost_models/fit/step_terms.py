"""Terms of whole decode steps, fitted to recorded steps of live servers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from granikv.core.step import Mode
from granikv.cost_models.fit.fused import with_values
from granikv.cost_models.fit.recorded_steps import RecordedRun, predicted_ns, price_decodes
from granikv.cost_models.fit.robust import bounded_fit
from granikv.cost_models.hardware import Hardware
from granikv.cost_models.params import GpuParams

LEAST_STEPS = 50  # fewer of a kind say nothing
SHARED_PAGES = Mode.PAGED.name.lower()
_SOFTNESS = 0.05  # relative error of a step from which it counts less
_GAP_SOFTNESS = 1e-3  # the same of a gap, as a share of its step
_SHARED_FACTORS = np.geomspace(0.5, 2.0, 57)
_KIND = ("run", "mode", "launches", "length")


@dataclass(frozen=True, slots=True)
class Finding:
    """What steps say about some terms.

    Attributes:
        values: by name of the term; empty when the steps say nothing.
        rows_used: steps behind them.
        kept: why the terms stay as they are, in that case.
        residual: median absolute relative error of the steps behind them, where they are no decode
            steps.
    """

    values: dict[str, float]
    rows_used: int
    kept: str | None = None
    residual: float | None = None


def find_host(decodes: pl.DataFrame) -> Finding:
    """Host time of a step and of each row: what passes between two steps, which never is negative.

    Args:
        decodes: of `price_decodes`.
    """
    if decodes.height < LEAST_STEPS:
        text = f"Host time of a decode step is kept: only {decodes.height} timed steps."
        return Finding({}, decodes.height, text)
    gpu, gap, rows = (decodes[name].to_numpy() for name in ("gpu_ns", "gap_ns", "rows"))
    found = bounded_fit((1 / gpu, rows / gpu), gap / gpu, _GAP_SOFTNESS, (np.inf, np.inf))
    names = ("host_decode_ns", "host_decode_row_ns")
    return Finding(dict(zip(names, found.tolist(), strict=True)), decodes.height)


def find_fused(decodes: pl.DataFrame) -> Finding:
    """Latency and exposed share of a fused launch, by robust least squares of relative error.

    All steps of one kind (run, mode, length and octaves of rows and private tokens) count together
    as much as one of them takes: an hour of one batch is no more evidence than a minute of it.
    """
    fused = decodes.filter(pl.col("launches") > 0)
    if fused.height < LEAST_STEPS:
        text = f"Latency and overlap of a fused launch are kept: only {fused.height} such steps."
        return Finding({}, fused.height, text)
    octaves = [pl.col(name).log(2.0).floor() for name in ("rows", "private_tokens")]
    alike = fused.select(pl.len().over(*_KIND, *octaves)).to_series().to_numpy()
    gpu, kernels = fused["gpu_ns"].to_numpy(), fused["kernels_ns"].to_numpy()
    launches, exposed = fused["launches"].to_numpy(), fused["exposed_ns"].to_numpy()
    columns = (launches / gpu, exposed / gpu)
    found = bounded_fit(columns, 1 - kernels / gpu, _SOFTNESS, (np.inf, 1.0), gpu / alike)
    names = ("fused_latency_ns", "fused_exposed_share")
    return Finding(dict(zip(names, found.tolist(), strict=True)), fused.height)


def find_shared_pages(
    runs: Sequence[RecordedRun], decodes: pl.DataFrame, params: GpuParams, hardware: Hardware
) -> Finding:
    """The factor on the cost of shared pages with the least median error of stock steps.

    It comes as the value of `shared_page_cost`; `with_shared_factor` applies it.
    """
    paged = decodes.filter(pl.col("mode") == SHARED_PAGES)
    if paged.height < LEAST_STEPS:
        text = f"The cost of shared pages is kept: only {paged.height} stock steps with sharing."
        return Finding({}, paged.height, text)
    chosen = [
        replace(run, steps=run.steps.join(paged.filter(run=run.name), on="iter", how="semi"))
        for run in runs
    ]
    errors = []
    for factor in _SHARED_FACTORS.tolist():
        scaled = with_shared_factor(params, factor)
        steps = price_decodes(chosen, scaled, hardware)
        error = np.abs(predicted_ns(steps, scaled) / (steps["gpu_ns"] + steps["gap_ns"]) - 1)
        errors.append(float(np.median(error)))
    best = float(_SHARED_FACTORS[int(np.argmin(errors))])
    return Finding({"shared_page_cost": best}, paged.height)


def with_shared_factor(params: GpuParams, factor: float) -> GpuParams:
    """The same parameters with a multiple of the cost of shared pages, never above private ones."""
    cost = params.terms.shared_page_cost
    scaled = tuple(min(1.0, float(f"{value * factor:.5g}")) for value in cost.efficiency)
    surface = cost.model_copy(update={"efficiency": scaled})
    terms = params.terms.model_copy(update={"shared_page_cost": surface})
    return params.model_copy(update={"terms": terms})


def apply(params: GpuParams, findings: Sequence[Finding]) -> GpuParams:
    """The parameters with what was found; where it came from is left as it was."""
    for finding in findings:
        values = dict(finding.values)
        factor = values.pop("shared_page_cost", None)
        params = with_values(params, values)
        params = params if factor is None else with_shared_factor(params, factor)
    return params
