"""fit_traffic: bandwidth share and latency of kernels that only move memory."""

from dataclasses import dataclass

import numpy as np
import polars as pl
import scipy.optimize

from granikv.cost_models.surface import FloatArray

_SOFTNESS = 0.1  # log error from which a row counts less


@dataclass(frozen=True, slots=True)
class Traffic:
    """`time = bytes / (efficiency * peak) + latency`, and how well it fits.

    Attributes:
        residual: median absolute relative error.
        rows: number of rows used.
    """

    efficiency: float
    latency_ns: float
    residual: float
    rows: int


def fit_traffic(frame: pl.DataFrame, hbm_bytes_per_ns: float) -> Traffic:
    """Robust least squares of log time over `bytes` and `time_us`."""
    moved = frame["bytes"].cast(pl.Float64).to_numpy()
    measured = frame["time_us"].to_numpy() * 1e3

    def predict(parameters: FloatArray) -> FloatArray:
        efficiency, latency_ns = np.exp(parameters)
        return np.asarray(moved / (efficiency * hbm_bytes_per_ns) + latency_ns)

    found = scipy.optimize.least_squares(
        lambda parameters: np.log(predict(parameters) / measured),
        np.log([0.7, measured.min()]),
        bounds=([np.log(0.01), 0.0], [0.0, np.inf]),
        loss="soft_l1",
        f_scale=_SOFTNESS,
    )
    efficiency, latency_ns = np.exp(found.x)
    residual = float(np.median(np.abs(predict(found.x) / measured - 1)))
    return Traffic(float(efficiency), float(latency_ns), residual, frame.height)
