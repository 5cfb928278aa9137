"""Host time of each layer of an extend step, from answers of a live engine."""

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.optimize import least_squares

from granikv.cost_models.hardware import Hardware
from granikv.cost_models.models import load_model
from granikv.cost_models.params import GpuParams
from granikv.cost_models.step import StepCost

FloatArray = NDArray[np.float64]


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
