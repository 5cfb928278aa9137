"""Endless random streams, drawn in numpy blocks and handed out as plain Python numbers."""

from collections.abc import Callable, Iterator
from itertools import chain, count, cycle, repeat

import numpy as np
from numpy.typing import NDArray

from granikv.traces.spec import (
    Arrivals,
    BurstArrivals,
    ConstantArrivals,
    ConstantLength,
    EvenPopularity,
    GammaArrivals,
    Length,
    LognormalLength,
    PrefixLevel,
    TableLength,
    UniformLength,
    UniformPopularity,
    ZipfLengths,
    ZipfPopularity,
)

_BLOCK = 4096


def _flat(draw: Callable[[], NDArray[np.generic]]) -> Iterator[float]:
    """The numbers of endlessly many blocks, one by one, at C speed."""
    return chain.from_iterable(draw().tolist() for _ in repeat(None))


def _lengths(
    spec: ConstantLength | UniformLength | LognormalLength, rng: np.random.Generator, size: int
) -> NDArray[np.int64]:
    if isinstance(spec, ConstantLength):
        return np.full(size, spec.tokens, np.int64)
    if isinstance(spec, UniformLength):
        return rng.integers(spec.low, spec.high, size, np.int64, endpoint=True)
    drawn = spec.median * np.exp(spec.sigma * rng.standard_normal(size))
    return np.clip(np.rint(drawn), 1, spec.largest).astype(np.int64)


def lengths(spec: Length, rng: np.random.Generator) -> Iterator[int]:
    """An endless stream of lengths in tokens."""
    if isinstance(spec, ConstantLength):
        return repeat(spec.tokens)
    if isinstance(spec, TableLength):
        values = getattr(spec.load(), spec.column)
        return _flat(lambda: values[rng.integers(0, len(values), _BLOCK)])  # type: ignore[return-value]
    return _flat(lambda: _lengths(spec, rng, _BLOCK))  # type: ignore[return-value]


def prefix_lengths(level: PrefixLevel, nodes: int, rng: np.random.Generator) -> list[int]:
    """Tokens of each of the `nodes` prefixes of one level (a multiple of `level.count`)."""
    spec = level.tokens
    if isinstance(spec, list):
        return spec * (nodes // level.count)
    if isinstance(spec, ZipfLengths):
        ranks = np.arange(1, level.count + 1, dtype=np.float64)
        tokens = np.maximum(np.rint(spec.largest * ranks**-spec.exponent), 1).astype(np.int64)
        return [int(value) for value in tokens] * (nodes // level.count)
    return [int(value) for value in _lengths(spec, rng, nodes)]


def choices(level: PrefixLevel, stride: int, rng: np.random.Generator) -> Iterator[int]:
    """An endless stream of prefix indices in 0..count-1; an even one moves on every `stride`."""
    popularity = level.popularity
    if level.count == 1:
        return repeat(0)
    if isinstance(popularity, EvenPopularity):
        return cycle([index for index in range(level.count) for _ in range(stride)])
    if isinstance(popularity, UniformPopularity):
        return _flat(lambda: rng.integers(0, level.count, _BLOCK))  # type: ignore[return-value]
    if isinstance(popularity, ZipfPopularity):
        weights = np.arange(1, level.count + 1, dtype=np.float64) ** -popularity.exponent
    else:
        weights = np.asarray(popularity.weights, np.float64)
    bounds = np.cumsum(weights) / weights.sum()
    bounds[-1] = 1.0
    return _flat(  # type: ignore[return-value]
        lambda: np.searchsorted(bounds, rng.random(_BLOCK), side="right")
    )


def arrivals(spec: Arrivals, rng: np.random.Generator) -> Iterator[float]:
    """An endless stream of ascending arrival times in seconds."""
    if isinstance(spec, ConstantArrivals):
        return (index / spec.rate_per_s for index in count())
    if isinstance(spec, BurstArrivals):
        return (index // spec.size * spec.period_s for index in count())
    shape = spec.burstiness if isinstance(spec, GammaArrivals) else 1.0
    scale = 1.0 / (spec.rate_per_s * shape)
    now_s = 0.0

    def block() -> NDArray[np.float64]:
        nonlocal now_s
        # The sum of a block's gaps starts where the block before ended.
        times = now_s + np.cumsum(rng.gamma(shape, scale, _BLOCK))
        now_s = float(times[-1])
        return times

    return _flat(block)


def pauses(mean_s: float, exponential: bool, rng: np.random.Generator) -> Iterator[float]:
    """An endless stream of think times in seconds."""
    if not exponential or not mean_s:
        return repeat(mean_s)
    return _flat(lambda: rng.exponential(mean_s, _BLOCK))
