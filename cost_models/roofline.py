"""Roofline terms without fitted surfaces: pure functions for the time of each part, in ns.

Every term is `max(bytes / rate, flops / rate) + latency`.
Tile padding is a floor (`max(rows, tile)`), not a rounding, so that every term is continuous and
never falls when an argument grows.
"""

from dataclasses import dataclass
from typing import NamedTuple

from granikv.cost_models.hardware import Hardware
from granikv.cost_models.ideal import DECODE_TILE_ROWS
from granikv.cost_models.params import GpuParams

CASCADE_TILE_ROWS = 32  # query rows of one kv head that a split-KV tile always computes
# A cascade's rates hold at so many query rows in the batch. More of them fill the card better, by
# this power; the power, like the tile, leaves the least error of the rows that `fit_cascade` uses.
CASCADE_QUERIES = 2048
_CASCADE_FILL, _LEAST_QUERIES = 0.22, 512
COLLECTIVE_GPUS = (2, 4, 8)  # GPU counts that all-reduces were measured on


@dataclass(frozen=True, slots=True)
class Rates:
    """Absolute rates in bytes or flops per ns, and latencies in ns: a parameter file on one GPU.

    `fused_exposed_share` is what a fused launch does not hide of the shorter of its passes over
    prefixes and its private pass. `private_bytes_per_ns`, `private_latency_ns`, `private_row_ns`
    and `private_reread_share` are of GraniKV's private pass, `stock_row_ns` of a stock engine's
    step. `dense_step_efficiency` and `extend_step_efficiency` are the shares of their kernels'
    rates that dense passes and whole extend steps reach in a server.
    """

    elementwise_bytes_per_ns: float
    elementwise_latency_ns: float
    dense_step_efficiency: float
    private_flops_per_ns: float
    private_bytes_per_ns: float
    private_latency_ns: float
    private_row_ns: float
    private_reread_share: float
    contiguous_bytes_per_ns: float
    gather_bytes_per_ns: float
    reread_bytes_per_ns: float
    cascade_flops_per_ns: float
    cascade_latency_ns: float
    fused_latency_ns: float
    fused_exposed_share: float
    merge_bytes_per_ns: float
    merge_latency_ns: float
    host_decode_ns: float
    stock_row_ns: float
    host_extend_ns: float
    host_extend_layer_ns: float
    host_extend_graph_ns: float
    extend_step_efficiency: float
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
    return Rates(
        elementwise_bytes_per_ns=hbm * terms.elementwise_memory_efficiency.value,
        elementwise_latency_ns=terms.elementwise_latency_ns.value,
        dense_step_efficiency=terms.dense_step_efficiency.value,
        private_flops_per_ns=peak * terms.private_compute_efficiency.value,
        private_bytes_per_ns=hbm * terms.private_memory_efficiency.value,
        private_latency_ns=terms.private_latency_ns.value,
        private_row_ns=terms.private_row_ns.value,
        private_reread_share=terms.private_reread_share.value,
        contiguous_bytes_per_ns=hbm * terms.contiguous_memory_efficiency.value,
        gather_bytes_per_ns=hbm * terms.gather_memory_efficiency.value,
        reread_bytes_per_ns=terms.reread_bytes_per_s.value * 1e-9,
        cascade_flops_per_ns=peak * terms.cascade_compute_efficiency.value,
        cascade_latency_ns=terms.cascade_latency_ns.value,
        fused_latency_ns=terms.fused_latency_ns.value,
        fused_exposed_share=terms.fused_exposed_share.value,
        merge_bytes_per_ns=hbm * terms.merge_memory_efficiency.value,
        merge_latency_ns=terms.merge_latency_ns.value,
        host_decode_ns=terms.host_decode_ns.value,
        stock_row_ns=terms.stock_row_ns.value,
        host_extend_ns=terms.host_extend_ns.value,
        host_extend_layer_ns=terms.host_extend_layer_ns.value,
        host_extend_graph_ns=terms.host_extend_graph_ns.value,
        extend_step_efficiency=terms.extend_step_efficiency.value,
        copy_bytes_per_ns=hbm * terms.copy_memory_efficiency.value,
        copy_latency_ns=terms.copy_latency_ns.value,
    )


def elementwise_ns(rates: Rates, traffic_bytes: float) -> float:
    """The small kernels of one layer: norms, rotary embedding, KV write, activation."""
    return traffic_bytes / rates.elementwise_bytes_per_ns + rates.elementwise_latency_ns


def private_compute_ns_per_token(rates: Rates, heads: Heads) -> float:
    """Tensor-core time of one private token, tile padding included."""
    tile_rows = max(heads.q / heads.kv, DECODE_TILE_ROWS)
    return 4 * heads.head_dim * heads.kv * tile_rows / rates.private_flops_per_ns


def cascade_pass(
    rates: Rates,
    heads: Heads,
    length: float,
    rows: float,
    contiguous: bool = True,
    batch_rows: float | None = None,
) -> PassTime:
    """A split-KV pass of `rows` requests over `length` tokens that they all read, in a batch of
    `batch_rows` (of `rows` when None).

    Read once; further M tiles re-read the segment from L2. Without `contiguous` (scattered COLD
    slots) the first read cannot beat the gather rate of private pages.
    """
    segment_bytes = length * heads.kv_bytes
    first_read = rates.contiguous_bytes_per_ns
    if not contiguous:
        first_read = min(first_read, rates.gather_bytes_per_ns)
    tile_rows = max(rows * heads.q / heads.kv, CASCADE_TILE_ROWS)
    flops = 4 * heads.head_dim * heads.kv * length * tile_rows
    reread = tile_rows / CASCADE_TILE_ROWS * segment_bytes / rates.reread_bytes_per_ns
    queries = max((batch_rows or rows) * heads.q, _LEAST_QUERIES)
    filled = (queries / CASCADE_QUERIES) ** _CASCADE_FILL
    memory = max(segment_bytes / first_read, reread / filled)
    return flops / (rates.cascade_flops_per_ns * filled), memory


def merge_ns(rates: Rates, heads: Heads, rows: float) -> float:
    """Merging two partial results: two outputs read, one written, three fp32 LSE values a head."""
    traffic_bytes = rows * heads.q * (3 * heads.head_dim * 2 + 3 * 4)
    return traffic_bytes / rates.merge_bytes_per_ns + rates.merge_latency_ns


def copy_ns(rates: Rates, num_bytes: float) -> float:
    """Copying KV inside one GPU: `num_bytes` read and written; nothing for zero."""
    if num_bytes == 0:
        return 0.0
    return 2 * num_bytes / rates.copy_bytes_per_ns + rates.copy_latency_ns
