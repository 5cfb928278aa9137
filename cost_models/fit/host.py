"""What steps of a stock engine take beyond their kernels, from its answers: of each row of a decode
step, of each layer of an extend step.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.optimize import least_squares

from granikv.core.step import Mode, Segment, StepPlan, StepShape
from granikv.cost_models.hardware import Hardware
from granikv.cost_models.memory import server_defaults
from granikv.cost_models.models import load_model
from granikv.cost_models.params import GpuParams
from granikv.cost_models.step import StepCost

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RowFit:
    """Time per row in ns, and relative errors of whole steps with it.

    Attributes:
        residual: median absolute error over the rows used.
        held_out: absolute errors of each row predicted from the others, ascending.
    """

    row_ns: float
    residual: float
    held_out: FloatArray


def fit_stock_row(steps: pl.DataFrame, params: GpuParams, hardware: Hardware) -> RowFit:
    """Least squares of relative error over one factor: (measured - kernels) / measured on rows.

    `steps` are measured rows of op `step` and backend `sglang_fa3_decode`; the last word of their
    source is the model. `params` has everything but this term.
    """
    measured, kernels, rows = (
        np.array(column, np.float64) for column in _steps(steps, params, hardware)
    )
    weight = rows / measured
    gap = (measured - kernels) / measured
    row_ns = max(0.0, float(weight @ gap / (weight @ weight)))
    # Leaving one row out of a one-parameter least squares has a closed form.
    others = (weight @ gap - weight * gap) / (weight @ weight - weight**2)
    held_out = np.sort(np.abs(np.maximum(others, 0.0) * weight - gap))
    return RowFit(row_ns, float(np.median(np.abs(row_ns * weight - gap))), held_out)


def step_of(row: dict[str, Any], hardware: Hardware) -> tuple[StepShape, StepPlan]:
    """The step that a measured row of a stock engine ran, graph padding included."""
    segments = tuple(Segment(*segment) for segment in json.loads(row["segments_json"]))
    rows, private = row["rows"], row["private_tokens"]
    heads = (row["num_q_heads"], row["num_kv_heads"], row["head_dim"])
    padded = server_defaults(hardware).padded_rows(rows)
    shape = StepShape(rows, padded, private, private // rows, segments, *heads)
    return shape, StepPlan((Mode.PAGED,) * len(segments))


def _steps(
    steps: pl.DataFrame, params: GpuParams, hardware: Hardware
) -> tuple[list[float], list[float], list[int]]:
    """Measured and kernel time in ns, and rows, of every step."""
    measured, kernels, rows = [], [], []
    costs: dict[str, StepCost] = {}
    for row in steps.iter_rows(named=True):
        name = row["source"].split()[-1]
        if name not in costs:
            costs[name] = StepCost(params, load_model(name), hardware, is_stock=True)
        cost = costs[name]
        shape, plan = step_of(row, hardware)
        measured.append(float(np.median(row["times_us"])) * 1e3)
        kernels.append(float(cost.step_ns(shape, plan)))
        rows.append(shape.rows)
    return measured, kernels, rows


@dataclass(frozen=True, slots=True)
class LaunchFit:
    """Extend steps of a live engine: `round_trip + max(GPU time, layers x layer_ns)`.

    Attributes:
        layer_ns: host time to launch one layer; short extends wait for it.
        round_trip_ns: what an answer takes besides its step (messages between processes).
        residual: median absolute relative error of answers.
    """

    layer_ns: float
    round_trip_ns: float
    residual: float


def fit_launch(answers: pl.DataFrame, params: GpuParams, hardware: Hardware) -> LaunchFit:
    """Least squares of relative error over both numbers.

    `answers` are measured rows of op `step` and backend `sglang_fa3_extend`: one request of `m` new
    tokens, `private_tokens - m` cached ones, one output token.
    """
    measured, gpu, layers = [], [], []
    costs: dict[str, StepCost] = {}
    for row in answers.iter_rows(named=True):
        name = row["source"].split()[-1]
        cost = costs.setdefault(name, StepCost(params, load_model(name), hardware))
        step = cost.extend([row["m"]], [row["private_tokens"] - row["m"]])
        measured.append(float(np.median(row["times_us"])) * 1e3)
        gpu.append(step.total_ns - step.host_ns)
        layers.append(cost.model.layers)
    answer, work, depth = np.array(measured), np.array(gpu), np.array(layers)

    def error(numbers: FloatArray) -> FloatArray:
        return np.asarray((numbers[0] + np.maximum(work, depth * numbers[1])) / answer - 1)

    # In units of their size, so that the solver's steps suit both.
    start = np.array([5e6, 2e5])
    found = least_squares(lambda x: error(x * start), np.ones(2), bounds=(0.0, np.inf)).x * start
    return LaunchFit(float(found[1]), float(found[0]), float(np.median(np.abs(error(found)))))
