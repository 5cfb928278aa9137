"""The terms that are fitted as surfaces: which rows, over which sizes, against which ideal time."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import polars as pl

from granikv.cost_models import ideal
from granikv.cost_models.fit import own_rows
from granikv.cost_models.fit.surface_fit import Grid, Ideal, Samples
from granikv.cost_models.ideal import EXTEND_TILE_ROWS, Peaks

_MAX_GEMM_M = 16384
# Our own rows are few beside the public ones, and are of the shapes and calls that will be asked.
_OWN_WEIGHT = 8.0
_LEAST_ROWS = 50  # fewer own rows do not carry a surface alone
# Latency of the ideal time: just below the shortest measured time, which nothing beats.
_LATENCY_QUANTILE = 0.002


def octaves(first: int, last: int, step: int = 1) -> tuple[float, ...]:
    """Powers of two from `2**first` to `2**last`."""
    return tuple(2.0**power for power in range(first, last + 1, step))


@dataclass(frozen=True, slots=True)
class Term:
    """One fitted term.

    Attributes:
        name: field of the parameter file.
        grid: axes of its surface.
        ideal_of: ideal time as a function of peaks, latency and one argument for each axis.
        samples_of: turns rows in the columns of the public cut into samples.
        own_of: our own rows in those columns; None when our sweep has none.
        goal: median and 90th percentile of the absolute held-out error to reach, if there is one.
        unit: what a whole shape is.
    """

    name: str
    grid: Grid
    ideal_of: Callable[..., ideal.FloatArray]
    samples_of: Callable[[pl.DataFrame], Samples]
    own_of: Callable[[pl.DataFrame], pl.DataFrame] | None
    goal: tuple[float, float] | None
    unit: str

    def ideal(self, peaks: Peaks, latency_ns: float) -> Ideal:
        """The ideal time on one GPU."""
        return partial(self.ideal_of, peaks, latency_ns)


def latency_of(samples: Samples) -> float:
    """The launch latency to assume, in ns."""
    return round(float(np.quantile(samples.time_ns, _LATENCY_QUANTILE)), 0)


def _samples(sizes: list[pl.Series], frame: pl.DataFrame, shape: pl.Expr) -> Samples:
    return Samples(
        np.column_stack([size.cast(pl.Float64).to_numpy() for size in sizes]),
        frame["time_us"].cast(pl.Float64).to_numpy() * 1e3,
        frame.select(shape.alias("shape"))["shape"].to_numpy(),
        np.ones(frame.height),
    )


_HEADS = pl.format("{}x{}x{}", "num_q_heads", "num_kv_heads", "head_dim")


def gemm_samples(frame: pl.DataFrame) -> Samples:
    """Matrix products up to m = 16384; a shape is an `(n, k)` column."""
    frame = frame.filter(pl.col("m") <= _MAX_GEMM_M)
    return _samples([frame[name] for name in "mnk"], frame, pl.format("{}x{}", "n", "k"))


def paged_samples(frame: pl.DataFrame) -> Samples:
    """Paged decode over private pages; a shape is a set of heads."""
    sizes = [
        frame["rows"] * frame["num_kv_heads"],
        frame["tokens"],
        frame["num_q_heads"] / frame["num_kv_heads"],
        frame["head_dim"],
    ]
    return _samples(sizes, frame, _HEADS)


def extend_samples(frame: pl.DataFrame) -> Samples:
    """Causal attention of new tokens, over a cached prefix if the rows have one."""
    if "cached" not in frame.columns:
        frame = frame.with_columns(cached=0)
    group = frame["num_q_heads"] / frame["num_kv_heads"]
    packed = (frame["tokens"] * group).clip(lower_bound=EXTEND_TILE_ROWS)
    sizes = [
        frame["rows"] * frame["num_kv_heads"] * packed,
        frame["cached"] + (frame["tokens"] + 1) / 2,
        group,
        frame["head_dim"],
    ]
    return _samples(sizes, frame, _HEADS)


def all_reduce_samples(frame: pl.DataFrame) -> Samples:
    """All-reduces in CUDA graphs; a shape is a message size, over all numbers of GPUs."""
    sizes = [frame["bytes"], frame["num_gpus"]]
    return _samples(sizes, frame, pl.format("{} bytes", "bytes"))


GEMM = Term(
    "gemm",
    Grid(("m", "n", "k"), (octaves(0, 14), octaves(5, 16), octaves(5, 16)), (1.0, 1.0, 1.0), 3),
    ideal.gemm_ns,
    gemm_samples,
    own_rows.gemm_rows,
    (0.08, 0.20),
    "(n, k) columns",
)
ALL_REDUCE = Term(
    "all_reduce",
    Grid(("bytes", "gpus"), (octaves(8, 30), (2.0, 4.0, 8.0)), (0.02, 0.001), 2),
    ideal.all_reduce_ns,
    all_reduce_samples,
    None,
    (0.10, 0.25),
    "message sizes",
)


def paged_term(head_dims: tuple[float, ...]) -> Term:
    """Paged decode attention with an axis for the head dims that were measured."""
    tokens = (2.0, *octaves(6, 17))  # shorter rows all take as long as 64 tokens do
    knots = (octaves(0, 17), tokens, (1.0, 4.0, 16.0, 64.0, 128.0), head_dims)
    grid = Grid(("tiles", "tokens", "group", "head_dim"), knots, (0.1, 0.1, 0.1, 0.1), 2)
    rows = (paged_samples, own_rows.paged_rows)
    return Term("paged", grid, ideal.paged_ns, *rows, (0.08, 0.20), "sets of heads")


def extend_term(head_dims: tuple[float, ...]) -> Term:
    """Extend attention with an axis for the head dims that were measured."""
    keys = (1.0, 4.0, *octaves(4, 16))
    knots = (octaves(7, 24), keys, (1.0, 4.0, 16.0, 128.0), head_dims)
    grid = Grid(("queries", "keys", "group", "head_dim"), knots, (0.1, 0.1, 0.1, 0.1), 2)
    rows = (extend_samples, own_rows.extend_rows)
    return Term("extend", grid, ideal.extend_ns, *rows, (0.08, 0.20), "sets of heads")


def collect(term: Term, public: pl.DataFrame | None, own: pl.DataFrame) -> Samples | None:
    """All samples of a term; None when there are too few to fit.

    Public attention times are brought to the level of ours where we have rows to compare.
    """
    mine = own.clear() if term.own_of is None else term.own_of(own)
    parts = []
    if public is not None:
        if term.name in ("paged", "extend") and mine.height:
            overhead = own_rows.ATTENTION_OVERHEAD_US
            public = public.with_columns(time_us=pl.col("time_us").cast(pl.Float64) - overhead)
        parts.append(term.samples_of(public))
    if mine.height >= (_LEAST_ROWS if public is None else 1):
        parts.append(replace(term.samples_of(mine), weight=np.full(mine.height, _OWN_WEIGHT)))
    if not parts:
        return None
    return Samples(
        np.concatenate([part.sizes for part in parts]),
        np.concatenate([part.time_ns for part in parts]),
        np.concatenate([part.shape for part in parts]),
        np.concatenate([part.weight for part in parts]),
    )


def fitted_terms(gpu: str) -> tuple[Term, ...]:
    """The terms that are fitted as surfaces of the whole time, on one GPU."""
    head_dims = (64.0, 128.0, 192.0, 256.0) if gpu == "h200-sxm" else (128.0,)
    return GEMM, paged_term(head_dims), extend_term(head_dims), ALL_REDUCE
