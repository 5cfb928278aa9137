"""Terms of extend steps, fitted to recorded steps of live servers.

Older recordings hold only sums of an extend step, which give its gap but not its work; newer ones
say `{"extend": [[new tokens, cached tokens], ...]}` in the place of a plan.
"""

import json
from collections.abc import Sequence

import numpy as np
import polars as pl

from granikv.cost_models.fit.recorded_steps import RecordedRun, timed_steps
from granikv.cost_models.fit.step_terms import LEAST_STEPS, Finding
from granikv.cost_models.hardware import Hardware
from granikv.cost_models.params import GpuParams
from granikv.cost_models.step import StepCost
from granikv.cost_models.surface import FloatArray

_LONGEST_GAP = 0.95  # gaps above this quantile count as it
_LAYER_NS = np.geomspace(1e4, 1e6, 401)


def find_extend_host(runs: Sequence[RecordedRun]) -> Finding:
    """Host time of an extend step: the mean gap until the decode step after it.

    A mean, because most gaps are hidden and a few are milliseconds, and both are paid.
    """
    steps = pl.concat([timed_steps(run, "extend") for run in runs])
    gaps, gpu = steps["gap_ns"].to_numpy(), steps["gpu_ns"].to_numpy()
    if len(gaps) < LEAST_STEPS:
        text = f"Host time of an extend step is kept: only {len(gaps)} timed ones."
        return Finding({}, len(gaps), text)
    host = float(np.clip(gaps, 0.0, np.quantile(gaps, _LONGEST_GAP)).mean())
    residual = float(np.median(np.abs(host - gaps) / (gpu + gaps)))
    return Finding({"host_extend_ns": host}, len(gaps), residual=residual)


def find_launch_floor(
    runs: Sequence[RecordedRun], params: GpuParams, hardware: Hardware
) -> Finding:
    """Host time to launch a layer: extends take at least `layers x` it on the GPU."""
    frames = [timed_steps(run, "extend") for run in runs]
    parts = [_priced(run, frame, params, hardware) for run, frame in zip(runs, frames, strict=True)]
    measured, work, layers = np.concatenate(parts).T
    best, errors = _floor_of(measured, work, layers)
    waited = int((work < layers * best).sum())
    if waited < LEAST_STEPS:
        steps = sum(frame.height for frame in frames)
        text = (
            f"The launch floor of an extend step is kept: of {steps} timed ones "
            f"{steps - len(work)} do not say what they extended, and only {waited} of the others "
            "waited for the host."
        )
        return Finding({}, waited, text)
    residual = float(np.median(errors))
    return Finding({"host_extend_layer_ns": best}, len(work), residual=residual)


def _floor_of(
    measured: FloatArray, work: FloatArray, layers: FloatArray
) -> tuple[float, FloatArray]:
    """The time a layer with the least mean error, and each step's; 0 when there is no step."""
    if not len(work):
        return 0.0, work
    floors = layers[:, None] * _LAYER_NS
    errors = np.abs(np.maximum(work[:, None], floors) / measured[:, None] - 1)
    best = int(errors.mean(axis=0).argmin())
    return float(_LAYER_NS[best]), errors[:, best]


def _priced(
    run: RecordedRun, steps: pl.DataFrame, params: GpuParams, hardware: Hardware
) -> FloatArray:
    """`[n, 3]`: time on the GPU, predicted work there and layers, of steps that say their work."""
    cost = StepCost(params, run.model, hardware, run.tp)
    rows = []
    for gpu_ns, text in steps.select("gpu_ns", "plan_json").iter_rows():
        requests = json.loads(text).get("extend")
        if requests:
            step = cost.extend(*map(list, zip(*requests, strict=True)))
            rows.append((gpu_ns, step.total_ns - step.host_ns, cost.model.layers))
    return np.array(rows, np.float64).reshape(-1, 3)
