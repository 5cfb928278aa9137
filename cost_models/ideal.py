"""Ideal times: what datasheet peaks alone allow, in ns; an efficiency divides them.

Each is `latency + max(bytes / bandwidth, flops / rate)` and never falls when an argument grows. The
arguments may be numpy arrays that broadcast.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from granikv.cost_models.hardware import Hardware

FloatArray = NDArray[np.float64]

ELEMENT_BYTES = 2  # bf16, of weights, activations and KV
# Query rows of one kv head that an attention tile computes, filled or not.
DECODE_TILE_ROWS = 64
EXTEND_TILE_ROWS = 128
# Keys that a tile reads at least, as far as measured times show: they are flat below.
LEAST_DECODE_TOKENS = 64
LEAST_EXTEND_KEYS = 32


@dataclass(frozen=True, slots=True)
class Peaks:
    """Datasheet rates of one GPU, per ns."""

    hbm_bytes: float
    flops: float
    nvlink_bytes: float

    @classmethod
    def of(cls, hardware: Hardware) -> "Peaks":
        """The peaks of a hardware file."""
        return cls(
            hardware.hbm_bytes_per_s * 1e-9,
            hardware.bf16_flops_per_s * 1e-9,
            hardware.nvlink_bytes_per_s * 1e-9,
        )


def gemm_ns(
    peaks: Peaks, latency_ns: float, m: ArrayLike, n: ArrayLike, k: ArrayLike
) -> FloatArray:
    """`[m, k] x [k, n]`: weights and activations read, result written once."""
    m, n, k = (np.asarray(size, np.float64) for size in (m, n, k))
    moved = ELEMENT_BYTES * (n * k + m * (n + k))
    return latency_ns + np.maximum(moved / peaks.hbm_bytes, 2 * m * n * k / peaks.flops)


def paged_ns(
    peaks: Peaks,
    latency_ns: float,
    tiles: ArrayLike,
    tokens: ArrayLike,
    group: ArrayLike,
    head_dim: ArrayLike,
) -> FloatArray:
    """Paged decode attention: `tiles` = rows x kv heads, each over `tokens` KV tokens."""
    tiles, tokens, group, head_dim = (
        np.asarray(size, np.float64) for size in (tiles, tokens, group, head_dim)
    )
    tokens = np.maximum(tokens, LEAST_DECODE_TOKENS)
    moved = 2 * ELEMENT_BYTES * tiles * head_dim * tokens
    flops = 4 * head_dim * tiles * tokens * np.maximum(group, DECODE_TILE_ROWS)
    return latency_ns + np.maximum(moved / peaks.hbm_bytes, flops / peaks.flops)


def extend_ns(
    peaks: Peaks,
    latency_ns: float,
    queries: ArrayLike,
    keys: ArrayLike,
    group: ArrayLike,
    head_dim: ArrayLike,
) -> FloatArray:
    """Causal attention: `queries` = new tokens x query heads, each over `keys` keys on average.

    The group changes the bytes of K and V only, which are few beside the queries'.
    """
    queries, keys, head_dim = (np.asarray(size, np.float64) for size in (queries, keys, head_dim))
    del group
    keys = np.maximum(keys, LEAST_EXTEND_KEYS)
    moved = 2 * ELEMENT_BYTES * queries * head_dim
    flops = 4 * head_dim * queries * keys
    return latency_ns + np.maximum(moved / peaks.hbm_bytes, flops / peaks.flops)


def all_reduce_ns(
    peaks: Peaks, latency_ns: float, num_bytes: ArrayLike, gpus: ArrayLike
) -> FloatArray:
    """One all-reduce: each GPU moves `2 (gpus - 1) / gpus` of the message over its links."""
    num_bytes, gpus = np.asarray(num_bytes, np.float64), np.asarray(gpus, np.float64)
    return np.asarray(latency_ns + 2 * (gpus - 1) / gpus * num_bytes / peaks.nvlink_bytes)


def dense_ns(
    peaks: Peaks, tile_rows: ArrayLike, tokens: ArrayLike, kv_heads: ArrayLike, head_dim: float
) -> tuple[FloatArray, FloatArray]:
    """One prefix pass without latency, compute and memory apart; `tile_rows` = rows x group."""
    tile_rows, tokens, kv_heads = (
        np.asarray(size, np.float64) for size in (tile_rows, tokens, kv_heads)
    )
    flops = 4 * head_dim * kv_heads * tokens * np.maximum(tile_rows, EXTEND_TILE_ROWS)
    moved = 2 * ELEMENT_BYTES * kv_heads * tokens * head_dim
    return np.asarray(flops / peaks.flops), np.asarray(moved / peaks.hbm_bytes)
