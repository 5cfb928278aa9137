"""Timelines: step rows as series that are small enough to draw and to keep in a JSON file."""

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from granikv.sim.config import ServerConfig

POINTS = 400
_RATE_BINS = 120
# Less than any step takes: a step ends before the next one's boundary, whatever floats make of it.
_TICK_S = 1e-7


def pools_over_time(
    steps: pl.LazyFrame, server: ServerConfig, boundary: Sequence[tuple[float, int]]
) -> dict[str, list[float]]:
    """Pools and decode rows of the first replica, at up to 400 evenly spaced records.

    `boundary` says from when HOT had how many tokens (`RunOutcome.boundaries`). Columns: time_s,
    hot_used, cold_used, hot_tokens, rows.
    """
    frame = (
        steps.filter((pl.col("replica") == 0) & (pl.col("kind") == "decode"))
        .select("start_s", "gpu_us", "hot_used", "cold_free", "rows")
        .collect()
    )
    if frame.height > POINTS:
        frame = frame.gather_every(-(-frame.height // POINTS))
    # Pools are written down as they stand at the end of a record.
    ends_s = (frame["start_s"] + frame["gpu_us"] / 1e6).to_numpy() - _TICK_S
    moved_s, sizes = zip(*boundary, strict=True)
    places = np.searchsorted(np.asarray(moved_s), ends_s, side="right") - 1
    hot_tokens = np.asarray(sizes)[np.maximum(places, 0)]
    return {
        "time_s": frame["start_s"].to_list(),
        "hot_used": frame["hot_used"].to_list(),
        "cold_used": (server.size_tokens - hot_tokens - frame["cold_free"].to_numpy()).tolist(),
        "hot_tokens": hot_tokens.tolist(),
        "rows": frame["rows"].to_list(),
    }


def rate_over_time(steps: pl.LazyFrame) -> dict[str, list[float]]:
    """Decoded tokens per second of all replicas, in 120 equal parts of the run.

    Columns: time_s (the start of a part), tokens_per_s.
    """
    frame = (
        steps.filter(pl.col("kind") == "decode")
        .select("replica", "start_s", "gpu_us", tokens=pl.col("rows") * pl.col("steps"))
        .collect()
    )
    if not frame.height:
        return {"time_s": [], "tokens_per_s": []}
    ends_s = (frame["start_s"] + frame["gpu_us"] / 1e6).to_numpy()
    edges_s = np.linspace(0.0, float(ends_s.max()), _RATE_BINS + 1)
    tokens = np.zeros(_RATE_BINS)
    for _, part in frame.group_by("replica"):
        tokens += np.diff(_decoded(part, edges_s))
    return {
        "time_s": edges_s[:-1].tolist(),
        "tokens_per_s": (tokens / np.diff(edges_s)).tolist(),
    }


def _decoded(frame: pl.DataFrame, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Tokens of one replica by each time; a record's are spread evenly over it."""
    starts_s = frame["start_s"].to_numpy()
    ends_s = starts_s + frame["gpu_us"].to_numpy() / 1e6
    after = frame["tokens"].cum_sum().to_numpy().astype(np.float64)
    before = after - frame["tokens"].to_numpy()
    # A record may start a rounding error before the last one ends.
    knots = np.maximum.accumulate(np.stack([starts_s, ends_s], axis=1).ravel())
    decoded: NDArray[np.float64] = np.interp(
        times_s, knots, np.stack([before, after], axis=1).ravel()
    )
    return decoded
