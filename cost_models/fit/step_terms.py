"""Terms of whole decode steps, fitted to recorded steps of live servers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from scipy.optimize import least_squares

from granikv.core.step import Mode
from granikv.cost_models.fit.fused import with_values
from granikv.cost_models.fit.recorded_steps import RecordedRun, price_decodes
from granikv.cost_models.fit.robust import bounded_fit
from granikv.cost_models.hardware import Hardware
from granikv.cost_models.params import GpuParams
from granikv.cost_models.surface import FloatArray

LEAST_STEPS = 50  # fewer of a kind say nothing
SHARED_PAGES = Mode.PAGED.name.lower()
_SOFTNESS = 0.02  # relative error of a step from which it counts less
_GAP_SOFTNESS = 1e-3  # the same of a gap, as a share of its step
_SHARED_FACTORS = np.geomspace(0.5, 2.0, 57)
_REREAD_SHARES = np.linspace(0.02, 0.8, 40)
_KIND = ("run", "mode", "is_fused", "length")
_SWEEPS = 12
_FEW = 20
# Of the numbers of `find_attention`, so that the solver sees numbers of one size.
_ATTENTION_SCALE = np.array([9000.0, 40.0, 1.2, 14000.0, 0.6, 1.1])
_ATTENTION_LEAST = np.array([0.0, 0.0, 1.0, 0.0, 0.0, 1.0]) / _ATTENTION_SCALE
_ATTENTION_MOST = np.array([np.inf, np.inf, 5.0, np.inf, 1.0, 5.0]) / _ATTENTION_SCALE


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
    """Host time of a step: what passes between two steps, which never is negative.

    Args:
        decodes: of `price_decodes`.
    """
    if decodes.height < LEAST_STEPS:
        text = f"Host time of a decode step is kept: only {decodes.height} timed steps."
        return Finding({}, decodes.height, text)
    gpu, gap = (decodes[name].to_numpy() for name in ("gpu_ns", "gap_ns"))
    found = bounded_fit((1 / gpu,), gap / gpu, _GAP_SOFTNESS, (np.inf,))
    return Finding({"host_decode_ns": float(found[0])}, decodes.height)


def find_attention(decodes: pl.DataFrame) -> Finding:
    """GraniKV's private pass and fused launch, by robust least squares of relative error.

    A step without segments is `other + layers * (latency + row * rows) + reads / efficiency`, a
    fused one `other + layers * fused latency` and the longer of its dense passes and its private
    pass without its launch (cascades included), and a share of the shorter one; dense passes take
    longer than alone by one factor, their launches do not. All steps of one kind (run, mode, length
    and octaves of rows and private tokens) count together as one: an hour of a batch is no more
    evidence than a minute of it. Kinds of a few steps, between two batches, count not.
    """
    octaves = [pl.col(name).log(2.0).floor() for name in ("rows", "private_tokens")]
    alike = pl.len().over(*_KIND, *octaves)
    steps = decodes.filter("is_fitted").with_columns(alike=alike).filter(pl.col("alike") >= _FEW)
    fused = steps.filter("is_fused").height
    if min(fused, steps.height - fused) < LEAST_STEPS:
        text = (
            f"Private pass and fused launch are kept: only {steps.height - fused} steps without "
            f"segments and {fused} fused ones."
        )
        return Finding({}, steps.height, text)
    names = ("gpu_ns", "other_ns", "layers", "rows", "prefix_ns", "launch_ns", "cascade_ns")
    gpu, other, layers, rows, prefix, launch, cascades, reads = (
        steps[name].to_numpy().astype(np.float64) for name in (*names, "token_ns")
    )
    is_fused, weight = steps["is_fused"].to_numpy(), 1 / np.sqrt(steps["alike"].to_numpy())

    def error(x: FloatArray) -> FloatArray:
        latency, row, stretch, fused_latency, share, dense = x * _ATTENTION_SCALE
        passes = launch + dense * (prefix - launch)
        private = layers * row * (rows - 1) + reads * stretch + cascades
        alone = layers * (latency + row) + private
        both = np.maximum(passes, private) + share * np.minimum(passes, private)
        attention = np.where(is_fused, layers * fused_latency + both, alone)
        return np.asarray((other + attention) / gpu - 1)

    # Huber's loss of the error itself: a point's weight is what it counts, not what it is off.
    found = np.ones(len(_ATTENTION_SCALE))
    trust = np.ones(len(gpu))
    bounds = (_ATTENTION_LEAST, _ATTENTION_MOST)
    scale = weight / np.sqrt((weight**2).mean())
    for _ in range(_SWEEPS):
        root = scale * np.sqrt(trust)
        found = least_squares(lambda x, root=root: root * error(x), found, bounds=bounds).x
        trust = np.minimum(1.0, _SOFTNESS / np.maximum(np.abs(error(found)), 1e-12))
    latency, row, stretch, fused_latency, share, dense = found * _ATTENTION_SCALE
    values = {
        "private_latency_ns": latency,
        "private_row_ns": row,
        "private_memory_efficiency": 1 / stretch,
        "fused_latency_ns": fused_latency,
        "fused_exposed_share": share,
        "dense_step_efficiency": 1 / dense,
    }
    return Finding({name: float(value) for name, value in values.items()}, steps.height)


def find_shared_pages(
    runs: Sequence[RecordedRun], decodes: pl.DataFrame, params: GpuParams, hardware: Hardware
) -> Finding:
    """The factor on the cost of shared pages with the least median error of stock steps.

    It comes as the value of `shared_page_cost`; `with_shared_factor` applies it.
    """
    stock = [run.name for run in runs if run.is_stock]
    paged = decodes.filter((pl.col("mode") == SHARED_PAGES) & pl.col("run").is_in(stock))
    if paged.height < LEAST_STEPS:
        text = f"The cost of shared pages is kept: only {paged.height} stock steps with sharing."
        return Finding({}, paged.height, text)
    tried = [with_shared_factor(params, factor) for factor in _SHARED_FACTORS.tolist()]
    best = float(_SHARED_FACTORS[_nearest(runs, paged, tried, hardware)])
    return Finding({"shared_page_cost": best}, paged.height)


def find_rereads(
    runs: Sequence[RecordedRun], decodes: pl.DataFrame, params: GpuParams, hardware: Hardware
) -> Finding:
    """What a token that another row reads too costs in GraniKV's private pass: the share with the
    least median error of steps that read shared tokens there.
    """
    ours = [run.name for run in runs if not run.is_stock]
    paged = decodes.filter("reads_shared" & pl.col("run").is_in(ours))
    if paged.height < LEAST_STEPS:
        text = f"The cost of further reads is kept: only {paged.height} steps read shared tokens."
        return Finding({}, paged.height, text)
    values = [{"private_reread_share": share} for share in _REREAD_SHARES.tolist()]
    tried = [with_values(params, value) for value in values]
    return Finding(values[_nearest(runs, paged, tried, hardware)], paged.height)


def _nearest(
    runs: Sequence[RecordedRun],
    decodes: pl.DataFrame,
    tried: Sequence[GpuParams],
    hardware: Hardware,
) -> int:
    """Which of these parameters leaves the least median error of the steps of `decodes`."""
    chosen = []
    for run in runs:
        steps = run.steps.join(decodes.filter(run=run.name), on=("replica", "iter"), how="semi")
        chosen.append(replace(run, steps=steps))
    errors = []
    for params in tried:
        steps = price_decodes(chosen, params, hardware)
        error = np.abs(steps["predicted_ns"] / (steps["gpu_ns"] + steps["gap_ns"]) - 1)
        errors.append(float(np.median(error)))
    return int(np.argmin(errors))


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
