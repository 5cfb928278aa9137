"""fit_dense: the prefix pass over one contiguous segment, its latency apart from its work."""

from dataclasses import dataclass

import numpy as np
import polars as pl

from granikv.cost_models import ideal
from granikv.cost_models.fit.held_out import predict_held_out
from granikv.cost_models.fit.surface_fit import Grid, Samples, fit_surface
from granikv.cost_models.fit.terms import octaves
from granikv.cost_models.ideal import Peaks
from granikv.cost_models.surface import FloatArray, Surface

GRID = Grid(
    ("tile_rows", "tokens", "kv_heads"),
    ((1.0, *octaves(4, 11)), octaves(8, 16), octaves(0, 3)),
    (0.03, 0.03, 0.03),
    2,
)
_HEAD_DIM = 128
_LATENCY_SHARE = 0.96  # of the shortest time: what the launch takes when nothing is read
_LEAST_WORK_SHARE = 0.05  # rows that are all latency say nothing about work


@dataclass(frozen=True, slots=True)
class DenseFit:
    """A fitted prefix pass beside its rows; `held_out_ns` has not seen a row's set of heads."""

    surface: Surface
    latency_ns: float
    samples: Samples
    predicted_ns: FloatArray
    held_out_ns: FloatArray


def fit_dense(frame: pl.DataFrame, peaks: Peaks) -> DenseFit:
    """Fit `latency + max(compute, memory) / efficiency` to rows of `own_rows.dense_rows`."""

    def work_ns(tile_rows: FloatArray, tokens: FloatArray, kv_heads: FloatArray) -> FloatArray:
        return np.maximum(*ideal.dense_ns(peaks, tile_rows, tokens, kv_heads, _HEAD_DIM))

    frame = frame.filter(pl.col("head_dim") == _HEAD_DIM)
    time_ns = frame["time_us"].to_numpy() * 1e3
    latency_ns = round(float(time_ns.min()) * _LATENCY_SHARE, 0)
    sizes = np.column_stack(
        [
            (frame["rows"] * frame["num_q_heads"] / frame["num_kv_heads"]).to_numpy(),
            frame["length"].cast(pl.Float64).to_numpy(),
            frame["num_kv_heads"].cast(pl.Float64).to_numpy(),
        ]
    )
    shape = frame.select(pl.format("{}x{}x{}", "num_q_heads", "num_kv_heads", "head_dim"))
    work_share = 1 - latency_ns / time_ns
    samples = Samples(sizes, time_ns, shape.to_series().to_numpy(), work_share**2)
    samples = samples.take(work_share > _LEAST_WORK_SHARE)
    work = Samples(samples.sizes, samples.time_ns - latency_ns, samples.shape, samples.weight)
    surface = fit_surface(GRID, work, work_ns)
    columns = samples.sizes.T
    predicted_ns = latency_ns + work_ns(*columns) / surface.efficiency(*columns)
    held_out_ns = latency_ns + predict_held_out(GRID, work, work_ns)
    return DenseFit(surface, latency_ns, samples, predicted_ns, held_out_ns)
