"""Roofline terms: pure functions for the time of each part of a step, in ns.

Every term is `max(bytes / rate, flops / rate) + latency`. Attention passes return compute and
memory time apart, because a fused launch overlaps the sums and a two-call launch does not. Tile
padding is a floor (`max(rows, tile)`), not a rounding, so that every term is continuous and never
falls when an argument grows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from granikv.core.step import Mode
from granikv.cost_models.hardware import Hardware
from granikv.cost_models.params import GpuParams, Parameter

PAGED_TILE_ROWS = 64  # query rows of one kv head that a paged or split-KV tile always computes
DENSE_TILE_ROWS = 128  # the same for the dense pass and for extend attention
COLLECTIVE_GPUS = (2, 4, 8)  # GPU counts that the parameter file covers


@dataclass(frozen=True, slots=True)
class Rates:
    """Absolute rates in bytes or flops per ns, and latencies in ns: a parameter file on one GPU.

    `collective_latency_ns` and `collective_bytes_per_ns` map the number of GPUs to its value.
    """

    gemm_bytes_per_ns: float
    gemm_flops_per_ns: float
    gemm_latency_ns: float
    elementwise_bytes_per_ns: float
    elementwise_latency_ns: float
    extend_flops_per_ns: float
    extend_latency_ns: float
    private_bytes_per_ns: float
    private_flops_per_ns: float
    private_latency_ns: float
    private_tile_ns: float
    paged_shared_bytes_per_ns: float
    contiguous_bytes_per_ns: float
    reread_bytes_per_ns: float
    cascade_flops_per_ns: float
    cascade_latency_ns: float
    dense_flops_per_ns: float
    dense_latency_ns: float
    fused_latency_ns: float
    merge_bytes_per_ns: float
    merge_latency_ns: float
    collective_latency_ns: dict[int, float]
    collective_bytes_per_ns: dict[int, float]
    host_decode_ns: float
    host_extend_ns: float
    host_extend_layer_ns: float
    copy_bytes_per_ns: float
    copy_latency_ns: float


class Heads(NamedTuple):
    """Attention sizes of one rank; `kv_bytes` is K and V of one token in one layer."""

    q: int
    kv: int
    head_dim: int
    kv_bytes: int


PassTime = tuple[float, float]  # (compute_ns, memory_ns) of one attention pass, without its latency


def rates_of(params: GpuParams, hardware: Hardware) -> Rates:
    """Turn fractions of a peak into absolute rates."""
    terms = params.terms
    hbm = hardware.hbm_bytes_per_s * 1e-9
    peak = hardware.bf16_flops_per_s * 1e-9
    by_name: dict[str, Parameter] = dict(terms.items())
    return Rates(
        gemm_bytes_per_ns=hbm * terms.gemm_memory_efficiency.value,
        gemm_flops_per_ns=peak * terms.gemm_compute_efficiency.value,
        gemm_latency_ns=terms.gemm_latency_ns.value,
        elementwise_bytes_per_ns=hbm * terms.elementwise_memory_efficiency.value,
        elementwise_latency_ns=terms.elementwise_latency_ns.value,
        extend_flops_per_ns=peak * terms.extend_compute_efficiency.value,
        extend_latency_ns=terms.extend_latency_ns.value,
        private_bytes_per_ns=hbm * terms.private_memory_efficiency.value,
        private_flops_per_ns=peak * terms.private_compute_efficiency.value,
        private_latency_ns=terms.private_latency_ns.value,
        private_tile_ns=terms.private_tile_ns.value,
        paged_shared_bytes_per_ns=terms.paged_shared_bytes_per_s.value * 1e-9,
        contiguous_bytes_per_ns=hbm * terms.contiguous_memory_efficiency.value,
        reread_bytes_per_ns=terms.reread_bytes_per_s.value * 1e-9,
        cascade_flops_per_ns=peak * terms.cascade_compute_efficiency.value,
        cascade_latency_ns=terms.cascade_latency_ns.value,
        dense_flops_per_ns=peak * terms.dense_compute_efficiency.value,
        dense_latency_ns=terms.dense_latency_ns.value,
        fused_latency_ns=terms.fused_latency_ns.value,
        merge_bytes_per_ns=hbm * terms.merge_memory_efficiency.value,
        merge_latency_ns=terms.merge_latency_ns.value,
        collective_latency_ns={
            gpus: by_name[f"collective_latency_ns_{gpus}"].value for gpus in COLLECTIVE_GPUS
        },
        collective_bytes_per_ns={
            gpus: by_name[f"collective_bytes_per_s_{gpus}"].value * 1e-9 for gpus in COLLECTIVE_GPUS
        },
        host_decode_ns=terms.host_decode_ns.value,
        host_extend_ns=terms.host_extend_ns.value,
        host_extend_layer_ns=terms.host_extend_layer_ns.value,
        copy_bytes_per_ns=hbm * terms.copy_memory_efficiency.value,
        copy_latency_ns=terms.copy_latency_ns.value,
    )


def gemm_ns(rates: Rates, m: float, n: int, k: int, dtype_bytes: int = 2) -> float:
    """One matrix product `[m, k] x [k, n]`: weights and activations read, result written once."""
    memory = dtype_bytes * (n * k + m * (n + k)) / rates.gemm_bytes_per_ns
    compute = 2 * m * n * k / rates.gemm_flops_per_ns
    return max(memory, compute) + rates.gemm_latency_ns


def elementwise_ns(rates: Rates, traffic_bytes: float) -> float:
    """The small kernels of one layer: norms, rotary embedding, KV write, activation."""
    return traffic_bytes / rates.elementwise_bytes_per_ns + rates.elementwise_latency_ns


def private_pass(rates: Rates, heads: Heads, rows: float, tokens: float) -> PassTime:
    """Paged decode attention over `tokens` KV tokens that no other row reads, summed over rows.

    Each row and kv head costs one tile of fixed time besides its bytes, which is why short rows
    never reach the bandwidth that long rows do.
    """
    return (
        tokens * private_compute_ns_per_token(rates, heads),
        rows * heads.kv * rates.private_tile_ns
        + tokens * private_memory_ns_per_token(rates, heads),
    )


def private_compute_ns_per_token(rates: Rates, heads: Heads) -> float:
    """Tensor-core time of one private token, tile padding included."""
    tile_rows = max(heads.q / heads.kv, PAGED_TILE_ROWS)
    return 4 * heads.head_dim * heads.kv * tile_rows / rates.private_flops_per_ns


def private_memory_ns_per_token(rates: Rates, heads: Heads) -> float:
    """HBM time of one private token."""
    return heads.kv_bytes / rates.private_bytes_per_ns


def shared_pass(
    rates: Rates, heads: Heads, mode: Mode, length: float, rows: float, contiguous: bool = True
) -> PassTime:
    """One decode pass of `rows` requests over `length` tokens that they all read.

    PAGED: every row reads the same physical pages, so bytes count once per row, but at the higher
    rate of re-reads; one HBM read is the least. CASCADE and DENSE read the segment once; further M
    tiles of a cascade re-read it from L2. Without `contiguous` (scattered COLD slots) a cascade
    cannot beat the gather rate of private pages.
    """
    segment_bytes = length * heads.kv_bytes
    tile_rows = rows * heads.q / heads.kv
    if mode == Mode.PAGED:
        return (
            rows * length * private_compute_ns_per_token(rates, heads),
            max(
                rows
                * segment_bytes
                / max(rates.paged_shared_bytes_per_ns, rates.private_bytes_per_ns),
                segment_bytes / rates.private_bytes_per_ns,
            ),
        )
    flops_per_row = 4 * heads.head_dim * heads.kv * length
    if mode == Mode.DENSE:
        return (
            flops_per_row * max(tile_rows, DENSE_TILE_ROWS) / rates.dense_flops_per_ns,
            segment_bytes / rates.contiguous_bytes_per_ns,
        )
    first_read = rates.contiguous_bytes_per_ns
    if not contiguous:
        first_read = min(first_read, rates.private_bytes_per_ns)
    tile_rows = max(tile_rows, PAGED_TILE_ROWS)
    return (
        flops_per_row * tile_rows / rates.cascade_flops_per_ns,
        max(
            segment_bytes / first_read,
            tile_rows / PAGED_TILE_ROWS * segment_bytes / rates.reread_bytes_per_ns,
        ),
    )


def pass_latency_ns(rates: Rates, mode: Mode) -> float:
    """Fixed time of one two-call launch; PAGED segments ride in the private pass's launch."""
    if mode == Mode.PAGED:
        return rates.private_latency_ns
    return rates.cascade_latency_ns if mode == Mode.CASCADE else rates.dense_latency_ns


def merge_ns(rates: Rates, heads: Heads, rows: float) -> float:
    """Merging two partial results: two outputs read, one written, three fp32 LSE values a head."""
    traffic_bytes = rows * heads.q * (3 * heads.head_dim * 2 + 3 * 4)
    return traffic_bytes / rates.merge_bytes_per_ns + rates.merge_latency_ns


def extend_attention_ns(
    rates: Rates, heads: Heads, extend_lens: Sequence[int], prefix_lens: Sequence[int]
) -> float:
    """Causal attention of one layer: new tokens over their cached prefix and over themselves."""
    pairs = 0.0
    kv_tokens = 0
    least_tokens = DENSE_TILE_ROWS * heads.kv / heads.q
    for extend_len, prefix_len in zip(extend_lens, prefix_lens, strict=True):
        pairs += max(extend_len, least_tokens) * prefix_len + 0.5 * extend_len * (extend_len + 1)
        kv_tokens += extend_len + prefix_len
    compute = 4 * heads.head_dim * heads.q * pairs / rates.extend_flops_per_ns
    memory = kv_tokens * heads.kv_bytes / rates.private_bytes_per_ns
    return max(compute, memory) + rates.extend_latency_ns


def all_reduce_ns(rates: Rates, num_bytes: float, gpus: int) -> float:
    """One all-reduce of `num_bytes` over `gpus` GPUs; nothing for a single GPU."""
    if gpus == 1:
        return 0.0
    bus_bytes = 2 * (gpus - 1) / gpus * num_bytes
    return bus_bytes / rates.collective_bytes_per_ns[gpus] + rates.collective_latency_ns[gpus]


def copy_ns(rates: Rates, num_bytes: float) -> float:
    """Copying KV inside one GPU: `num_bytes` read and written; nothing for zero."""
    if num_bytes == 0:
        return 0.0
    return 2 * num_bytes / rates.copy_bytes_per_ns + rates.copy_latency_ns
