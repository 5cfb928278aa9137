"""fit_fused: what an overlapped launch takes beyond its work, from rows of the whole operator."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from granikv.core.step import Launch, Mode, Segment, StepPlan, StepShape
from granikv.cost_models.fit.held_out import ErrorSummary, predict_unseen, summarise
from granikv.cost_models.fit.robust import bounded_fit
from granikv.cost_models.hardware import Hardware
from granikv.cost_models.models import load_model
from granikv.cost_models.params import GpuParams
from granikv.cost_models.piecewise import piece_at
from granikv.cost_models.step import StepCost
from granikv.cost_models.surface import FloatArray

CELL = ("num_q_heads", "num_kv_heads", "head_dim", "rows", "segments_json", "private_tokens")
_MODEL = "llama-3.1-8b"  # any will do: only attention is asked, with the heads of each row
_SOFTNESS = 0.1  # relative error from which a row counts less
_CASCADE_SHARES = np.geomspace(0.05, 1.0, 61)  # of the stated rates
_CASCADE_RATES = ("cascade_compute_efficiency", "reread_bytes_per_s")


@dataclass(frozen=True, slots=True)
class FusedFit:
    """Latency and exposed share of an overlapped launch, and errors of whole calls with them.

    Attributes:
        latency_ns: fixed time of a launch.
        exposed_share: of the shorter of prefix and private passes, what a launch does not hide.
        spread: one sigma of what single calls would give for the latency, as a share of it.
        residual: median absolute relative error of calls.
        error: the same of calls predicted without any of their heads and prefix length.
        rows: calls used.
    """

    latency_ns: float
    exposed_share: float
    spread: float
    residual: float
    error: ErrorSummary
    rows: int


def fit_fused(frame: pl.DataFrame, params: GpuParams, hardware: Hardware) -> FusedFit:
    """Robust least squares of relative error over one latency and one exposed share.

    `frame` holds rows of `own_rows.operator_rows` that ran dense; of each batch the fastest
    overlapped call counts. `params` has everything but these two terms.
    """
    calls = _fastest_overlapped(frame)
    measured, names = _measured_ns(calls), shape_names(calls)
    parts = _Parts.of(calls, params, hardware)
    found = parts.fit(measured)
    held_out = predict_unseen(
        names, lambda hidden: parts.take(hidden).ns(parts.take(~hidden).fit(measured[~hidden]))
    )
    left = measured - parts.ns(found)
    spread = 1.4826 * float(np.median(np.abs(left))) / max(float(found[0]), 1.0)
    error = summarise(held_out, measured, names)
    residual = float(np.median(np.abs(left) / measured))
    return FusedFit(float(found[0]), float(found[1]), spread, residual, error, calls.height)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Of each call in one layer, the longer and the shorter of `StepCost.fused_parts_ns`."""

    longer_ns: FloatArray
    shorter_ns: FloatArray

    @classmethod
    def of(cls, calls: pl.DataFrame, params: GpuParams, hardware: Hardware) -> "_Parts":
        """By these parameters, as dense calls."""
        parts = [
            sorted(cost.attention.fused_parts_ns(shape, plan), reverse=True)
            for cost, shape, plan in _steps(calls, params, hardware, Mode.DENSE)
        ]
        return cls(*(np.array(parts) / load_model(_MODEL).layers).T)

    def take(self, chosen: NDArray[np.bool_]) -> "_Parts":
        """Some of the calls."""
        return _Parts(self.longer_ns[chosen], self.shorter_ns[chosen])

    def fit(self, measured: FloatArray) -> FloatArray:
        """Latency in ns and exposed share."""
        columns = (1 / measured, self.shorter_ns / measured)
        target = 1 - self.longer_ns / measured
        return bounded_fit(columns, target, _SOFTNESS, (np.inf, 1.0))

    def ns(self, found: FloatArray) -> FloatArray:
        """Time of each call."""
        return np.asarray(found[0] + self.longer_ns + found[1] * self.shorter_ns)


@dataclass(frozen=True, slots=True)
class ShareFit:
    """A share that calls have in common; the rest is as in `FusedFit`."""

    share: float
    residual: float
    error: ErrorSummary
    rows: int


def fit_cascade(frame: pl.DataFrame, params: GpuParams, hardware: Hardware) -> ShareFit:
    """The one share of both stated tile rates of a cascade that leaves the least median error.

    `frame` holds rows of `own_rows.operator_rows` that ran as cascades in one overlapped launch;
    `params` has everything else, the fused terms included.
    """
    calls = _fastest_overlapped(frame)
    measured, names = _measured_ns(calls), shape_names(calls)
    times = np.array(
        [
            work_ns(calls, slowed(params, share), hardware, Mode.CASCADE)
            for share in _CASCADE_SHARES.tolist()
        ]
    )
    times += params.terms.fused_latency_ns.value
    errors = np.abs(times / measured - 1)

    def unseen(hidden: NDArray[np.bool_]) -> FloatArray:
        seen = int(np.median(errors[:, ~hidden], axis=1).argmin()) if (~hidden).any() else -1
        return np.asarray(times[seen, hidden])

    held_out = predict_unseen(names, unseen)
    residuals = np.median(errors, axis=1)
    best = int(residuals.argmin())
    error = summarise(held_out, measured, names)
    return ShareFit(float(_CASCADE_SHARES[best]), float(residuals[best]), error, calls.height)


def slowed(params: GpuParams, share: float) -> GpuParams:
    """The same parameters with a share of a cascade's rates."""
    return with_values(
        params, {name: getattr(params.terms, name).value * share for name in _CASCADE_RATES}
    )


def work_ns(
    calls: pl.DataFrame, params: GpuParams, hardware: Hardware, mode: Mode = Mode.DENSE
) -> list[float]:
    """Predicted attention time of one layer's fused call without its launch."""
    params = with_values(params, {"fused_latency_ns": 0.0})
    times = []
    for cost, shape, plan in _steps(calls, params, hardware, mode):
        line = cost.decode(shape, plan).attention
        _, a, b = line[piece_at(line, shape.private_tokens)]
        times.append((a + b * shape.private_tokens) / cost.model.layers)
    return times


def _steps(
    calls: pl.DataFrame, params: GpuParams, hardware: Hardware, mode: Mode
) -> Iterator[tuple[StepCost, StepShape, StepPlan]]:
    """Each call as a fused step of a model with its heads, all segments in one mode."""
    costs: dict[tuple[int, ...], StepCost] = {}
    for q, kv, head_dim, rows, segments_json, private in calls.select(CELL).iter_rows():
        heads = (q, kv, head_dim)
        if heads not in costs:
            sizes = {"q_heads": q, "kv_heads": kv, "head_dim": head_dim}
            costs[heads] = StepCost(params, load_model(_MODEL).model_copy(update=sizes), hardware)
        segments = tuple(Segment(*segment) for segment in json.loads(segments_json))
        shape = StepShape(rows, rows, private, private // rows, segments, *heads)
        yield costs[heads], shape, StepPlan((mode,) * len(segments), Launch.FUSED)


def with_values(params: GpuParams, values: Mapping[str, float]) -> GpuParams:
    """The same parameters with other values of some terms."""
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


def shape_names(calls: pl.DataFrame) -> NDArray[Any]:
    """What is held out together: heads and prefix length."""
    shape = calls.select(pl.format("{}x{}, {}", "num_q_heads", "num_kv_heads", "length"))
    return shape.to_series().to_numpy()
