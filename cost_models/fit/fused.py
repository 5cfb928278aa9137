"""fit_fused: what an overlapped launch takes beyond its work, from rows of the whole operator."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from granikv.core.step import Launch, Mode, Segment, StepPlan, StepShape
from granikv.cost_models.fit.held_out import ErrorSummary, folds_of, summarise
from granikv.cost_models.hardware import Hardware
from granikv.cost_models.models import load_model
from granikv.cost_models.params import GpuParams
from granikv.cost_models.piecewise import piece_at
from granikv.cost_models.step import StepCost
from granikv.cost_models.surface import FloatArray

CELL = ("num_q_heads", "num_kv_heads", "head_dim", "rows", "segments_json", "private_tokens")
_MODEL = "llama-3.1-8b"  # any will do: only attention is asked, with the heads of each row
_SOFTNESS = 0.1  # relative error from which a row counts less
_SWEEPS = 50
_CASCADE_SHARES = np.geomspace(0.05, 1.0, 61)  # of the stated rates
_CASCADE_RATES = ("cascade_compute_efficiency", "reread_bytes_per_s")


@dataclass(frozen=True, slots=True)
class FusedFit:
    """The latency in ns, and relative errors of whole calls with it.

    Attributes:
        spread: one sigma of what single calls would give for the latency, as a share of it.
        residual: median absolute relative error of calls.
        error: the same of calls predicted without any of their heads and prefix length.
        rows: calls used.
    """

    latency_ns: float
    spread: float
    residual: float
    error: ErrorSummary
    rows: int


def fit_fused(frame: pl.DataFrame, params: GpuParams, hardware: Hardware) -> FusedFit:
    """Robust least squares of relative error over one latency.

    `frame` holds rows of `own_rows.operator_rows` that ran dense; of each batch the fastest
    overlapped call counts. `params` has everything but this term.
    """
    calls = _fastest_overlapped(frame)
    measured, names = _measured_ns(calls), _shape_names(calls)
    work = np.array(work_ns(calls, params, hardware))
    latency = _latency_ns(measured, work)
    held_out = np.empty(len(measured))
    fold = folds_of(names)
    for held in np.unique(fold):
        hidden = fold == held
        held_out[hidden] = work[hidden] + _latency_ns(measured[~hidden], work[~hidden])
    errors = np.abs((work + latency) / measured - 1)
    spread = 1.4826 * float(np.median(np.abs(measured - work - latency))) / max(latency, 1.0)
    error = summarise(held_out, measured, names)
    return FusedFit(latency, spread, float(np.median(errors)), error, calls.height)


@dataclass(frozen=True, slots=True)
class CascadeFit:
    """The share of its stated rates that a cascade reaches; the rest is as in `FusedFit`."""

    share: float
    residual: float
    error: ErrorSummary
    rows: int


def fit_cascade(frame: pl.DataFrame, params: GpuParams, hardware: Hardware) -> CascadeFit:
    """The one share of both tile rates of a cascade that leaves the least median error.

    `frame` holds rows of `own_rows.operator_rows` that ran as cascades in one overlapped launch;
    `params` has everything else, the fused latency included.
    """
    calls = _fastest_overlapped(frame)
    measured, names = _measured_ns(calls), _shape_names(calls)
    times = np.array(
        [
            work_ns(calls, slowed(params, share), hardware, Mode.CASCADE)
            for share in _CASCADE_SHARES.tolist()
        ]
    )
    times += params.terms.fused_latency_ns.value
    errors = np.abs(times / measured - 1)
    held_out, fold = np.empty(len(measured)), folds_of(names)
    for held in np.unique(fold):
        hidden = fold == held
        seen = int(np.median(errors[:, ~hidden], axis=1).argmin()) if (~hidden).any() else -1
        held_out[hidden] = times[seen, hidden]
    residuals = np.median(errors, axis=1)
    best = int(residuals.argmin())
    error = summarise(held_out, measured, names)
    return CascadeFit(float(_CASCADE_SHARES[best]), float(residuals[best]), error, calls.height)


def slowed(params: GpuParams, share: float) -> GpuParams:
    """The same parameters with a share of a cascade's rates."""
    return _with_values(
        params, {name: getattr(params.terms, name).value * share for name in _CASCADE_RATES}
    )


def work_ns(
    calls: pl.DataFrame, params: GpuParams, hardware: Hardware, mode: Mode = Mode.DENSE
) -> list[float]:
    """Predicted attention time of one layer's fused call without its launch."""
    params = _with_values(params, {"fused_latency_ns": 0.0})
    costs: dict[tuple[int, ...], StepCost] = {}
    times = []
    for q, kv, head_dim, rows, segments_json, private in calls.select(CELL).iter_rows():
        heads = (q, kv, head_dim)
        if heads not in costs:
            sizes = {"q_heads": q, "kv_heads": kv, "head_dim": head_dim}
            costs[heads] = StepCost(params, load_model(_MODEL).model_copy(update=sizes), hardware)
        segments = tuple(Segment(*segment) for segment in json.loads(segments_json))
        shape = StepShape(rows, rows, private, private // rows, segments, *heads)
        plan = StepPlan((mode,) * len(segments), Launch.FUSED)
        line = costs[heads].decode(shape, plan).attention
        _, a, b = line[piece_at(line, private)]
        times.append((a + b * private) / costs[heads].model.layers)
    return times


def _with_values(params: GpuParams, values: Mapping[str, float]) -> GpuParams:
    terms = params.terms
    items = {
        name: getattr(terms, name).model_copy(update={"value": value})
        for name, value in values.items()
    }
    return params.model_copy(update={"terms": terms.model_copy(update=items)})


def _fastest_overlapped(frame: pl.DataFrame) -> pl.DataFrame:
    """One call of each batch."""
    calls = frame.filter("is_overlapped").sort("time_us").unique(CELL, keep="first")
    return calls.sort(CELL)


def _measured_ns(calls: pl.DataFrame) -> FloatArray:
    return calls["time_us"].to_numpy() * 1e3


def _shape_names(calls: pl.DataFrame) -> NDArray[Any]:
    """What is held out together: heads and prefix length."""
    shape = calls.select(pl.format("{}x{}, {}", "num_q_heads", "num_kv_heads", "length"))
    return shape.to_series().to_numpy()


def _latency_ns(measured: FloatArray, work: FloatArray) -> float:
    """Weighted mean of what calls leave over; far ones count less, and it is not negative."""
    left = measured - work
    latency = float(np.median(left))
    for _ in range(_SWEEPS):
        error = np.abs(left - latency) / measured
        weight = np.minimum(1.0, _SOFTNESS / np.maximum(error, 1e-9)) / measured**2
        latency = float((weight * left).sum() / weight.sum())
    return max(0.0, latency)
