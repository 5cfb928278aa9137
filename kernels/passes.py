"""Launches of one layer's passes with the lists of a planned step."""

import math
from dataclasses import dataclass
from typing import Any

from granikv.kernels import hopper, launches, stream
from granikv.kernels.configs import Config
from granikv.kernels.shapes import Heads
from granikv.kernels.tables import DecodeTables
from granikv.kernels.workspace import Workspace

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's tensors, the step that it belongs to, and what is derived from them.

    Attributes:
        q: `[rows, num_q_heads, head_dim]`.
        k: `[slots, num_kv_heads, head_dim]`.
        v: like `k`.
        tables: of the step.
        out: like `q`.
        lse: `[rows, num_q_heads]` float32 or None.
        heads: of this rank.
        config: tiles.
        step: the planner's lists and the parts.
        sms: of the device.
    """

    q: Any
    k: Any
    v: Any
    tables: DecodeTables
    out: Any
    lse: Any
    heads: Heads
    config: Config
    step: Workspace
    sms: int

    @property
    def scale_log2(self) -> float:
        """Softmax scale in base-2 units."""
        return self.heads.dim**-0.5 * _LOG2_E

    @property
    def lse_or_out(self) -> Any:
        """A pointer is passed even where no LSE is written."""
        return self.out if self.lse is None else self.lse

    @property
    def strides(self) -> tuple[int, ...]:
        """Row strides of q, k, v and out, then both strides of the LSE, in elements."""
        lse = (0, 0) if self.lse is None else self.lse.stride()
        return (self.q.stride(0), self.k.stride(0), self.v.stride(0), self.out.stride(0), *lse)

    @property
    def sizes(self) -> dict[str, int]:
        """Compile-time sizes that every launch has."""
        heads = self.heads
        return {"HQ": heads.q, "HKV": heads.kv, "D": heads.dim, "DP": self.config.head_dim}


def fused_step(layer: Layer) -> None:
    """Everything in one launch."""
    config, step = layer.config, layer.step
    launches.fused_step[(layer.sms * config.fused_per_sm,)](
        layer.q, layer.k, layer.v, layer.out, layer.lse_or_out, step.part_out, step.part_lse,
        step.counts, step.dense_items, step.cascade_items, step.private_items, step.members,
        step.entry_part, step.row_part, step.row_parts, step.arrivals, step.queues,
        layer.tables.private_slots, layer.scale_log2, *layer.strides, layer.tables.width,
        **layer.sizes, GP=config.group,
        DENSE_BM=config.dense_bm, DENSE_BN=config.fused_bn, CASCADE_BM=config.cascade_bm,
        CASCADE_BN=config.fused_bn, PRIVATE_BN=config.fused_bn, LSE=layer.lse is not None,
        num_warps=config.fused_warps, num_stages=config.fused_stages,
    )  # fmt: skip


def triton_prefix_pass(layer: Layer, early: bool, pdl: bool) -> None:
    """All dense tiles in Triton.

    Args:
        layer: whose parts are written.
        early: the launch may begin before the kernel ahead of it has ended.
        pdl: let the next kernel start beside this one.
    """
    config, step = layer.config, layer.step
    launches.prefix_pass[(layer.sms,)](
        layer.q, layer.k, layer.v, step.part_out, step.part_lse, step.dense_items, step.counts,
        step.members, step.entry_part, layer.scale_log2, *layer.strides[:3], **layer.sizes,
        BM=config.dense_bm, BN=config.dense_bn, EARLY=early, PDL=pdl,
        num_warps=config.dense_warps, num_stages=config.dense_stages, launch_pdl=early,
    )  # fmt: skip


def hopper_prefix_pass(layer: Layer, beside: bool, early: bool, pdl: bool) -> None:
    """All dense tiles on sm_90; with `beside`, in blocks that leave room for others on an SM."""
    step = layer.step
    hopper.prefix_pass(
        layer.q, layer.k, layer.v, step.part_out, step.part_lse, step.dense_items, step.counts,
        step.members, step.entry_part, layer.scale_log2, layer.sms, early, pdl,
        hopper.shape_for(layer.heads.dim, beside),
    )  # fmt: skip


def stream_pass(layer: Layer, shape: stream.Shape, **how: bool) -> None:
    """All memory-bound tiles on a card; `how` is `early`, `pdl`, `beside` and `alone` of
    `stream.stream_pass`.
    """
    same_row = layer.k.stride(0) == layer.v.stride(0)
    stream.stream_pass(
        _memory_bound(layer), layer.sms, shape, **how, **layer.sizes, LSE=layer.lse is not None,
        SAME_ROW=same_row,
    )  # fmt: skip


def triton_private_pass(layer: Layer) -> None:
    """The same in Triton, for its interpreter."""
    config = layer.config
    launches.private_pass[(layer.sms * config.private_per_sm,)](
        *_memory_bound(layer), **layer.sizes, LSE=layer.lse is not None, GP=config.group,
        CASCADE_BM=config.cascade_bm, BN=config.private_bn, num_warps=config.private_warps,
        num_stages=config.private_stages,
    )  # fmt: skip


def merge_pass(layer: Layer, pdl: bool) -> None:
    """Results of all rows with several parts; with `pdl` its blocks may be there early."""
    step, rows = layer.step, layer.config.merge_rows
    launches.merge_pass[(layer.tables.rows, layer.heads.kv)](
        layer.out, layer.lse_or_out, step.part_out, step.part_lse, step.row_part, step.row_parts,
        step.queues, *layer.strides[3:], **layer.sizes, GP=rows, LSE=layer.lse is not None,
        PDL=pdl, num_warps=min(4, rows), launch_pdl=pdl,
    )  # fmt: skip


def _memory_bound(layer: Layer) -> tuple[Any, ...]:
    step = layer.step
    return (
        layer.q, layer.k, layer.v, layer.out, layer.lse_or_out, step.part_out, step.part_lse,
        step.private_items, step.cascade_items, step.counts, step.members, step.entry_part,
        step.queues, layer.tables.private_slots, layer.scale_log2, *layer.strides,
        layer.tables.width,
    )  # fmt: skip
