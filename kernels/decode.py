"""Decode attention over shared segments and private slots: the operator an engine calls.

`plan` runs once a step, `run` once a layer; both only launch kernels, so that a step can be
captured in a CUDA graph and replayed after the tables have changed.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch  # type: ignore[import-not-found,unused-ignore]
import triton  # type: ignore[import-not-found,unused-ignore]

from granikv.kernels import hopper, launches, planner, stream, workspace
from granikv.kernels.checks import DecodeLimits, check_call, check_tables
from granikv.kernels.configs import Config, config_for
from granikv.kernels.shapes import Heads
from granikv.kernels.tables import DecodeTables

LaunchChoice = Literal["fused", "two_call"]
Overlap = Literal["serial", "split", "beside"]
PrefixBackend = Literal["triton", "hopper"]

_LOG2_E = math.log2(math.e)
FORKED = False
_FIXED_CHUNKS = (workspace.PREFIX_CHUNK, workspace.PRIVATE_CHUNK)


class SharedPrefixDecode:
    """One decode step's attention for batches of up to `max_rows` rows; not thread-safe.

    Args:
        max_rows: rows of the largest batch, padding included.
        heads: of this rank.
        max_groups: room for groups in the tables.
        max_private_tokens: longest private slot table.
        dtype: torch.bfloat16 or torch.float16.
        device: where everything lives.
        deterministic: chunks have a fixed number of tokens and every segment runs as it is marked,
            so that a row's bits do not depend on the batch around it.
        max_segment_tokens: of all segments of a row; bounds its parts when deterministic.

    Raises:
        ValueError: a limit is not positive.
        NotImplementedError: heads or dtype without a kernel.
    """

    def __init__(
        self,
        max_rows: int,
        heads: Heads,
        max_groups: int,
        max_private_tokens: int,
        dtype: Any,
        device: Any,
        *,
        deterministic: bool = False,
        max_segment_tokens: int = 32_768,
        config: Config | None = None,
    ) -> None:
        self.limits = DecodeLimits(max_rows, heads, max_groups, max_private_tokens, dtype, device)
        self.deterministic = deterministic
        self._sms = _sm_count(str(device))
        self.config = config or config_for(heads, _capability(str(device)))
        self._work = workspace.allocate(self.limits, max_segment_tokens if deterministic else None)
        self._side_stream = torch.cuda.Stream(device) if _on_card(device) else None
        self._overlap: Overlap = "serial"
        self._with_dense = True

    @property
    def workspace_bytes(self) -> int:
        """Device memory of the work lists and the parts."""
        return self._work.num_bytes

    def plan(
        self, tables: DecodeTables, overlap: Overlap = "serial", with_dense: bool = True
    ) -> None:
        """Make the step's work lists from the tables; one launch.

        Args:
            tables: of the step.
            overlap: of the dense pass and the memory-bound pass in the layers that follow: one
                after the other; at the same time on SMs that the plan divides between them
                (`split`); or on all SMs side by side (`beside`, sm_90: less of the tensor cores'
                rate and more of the memory's).
            with_dense: False leaves the dense pass out, segments marked dense run as cascades:
                one launch less for batches of few rows.

        Raises:
            ValueError: a table has a wrong shape, dtype, device or stride, or there is no such
                overlap.
            NotImplementedError: this device has no such overlap.
        """
        check_tables(self.limits, tables)
        self._check_overlap(overlap)
        self._overlap, self._with_dense = overlap, with_dense
        shape = self._stream_shape()
        heads, config, step = self.limits.heads, self.config, self._work
        fixed = _FIXED_CHUNKS if self.deterministic else (0, 0)
        planner.plan_step[(1,)](
            tables.segment_base, tables.segment_length, tables.segment_group, tables.group_mode,
            tables.private_length, step.counts, step.dense_items, step.cascade_items,
            step.private_items, step.members, step.entry_part, step.row_part, step.row_parts,
            step.group_scratch, tables.rows, tables.groups, workspace.part_budget(tables.rows),
            *fixed, int(overlap == "split"), int(with_dense),
            HKV=heads.kv,
            DENSE_ROWS=config.dense_bm // self.limits.group, DENSE_BLOCK=config.dense_block,
            CASCADE_ROWS=config.cascade_bm // self.limits.group, CASCADE_BLOCK=shape.tokens,
            SMS=self._sms, SLOTS=self._sms * shape.blocks_per_sm,
            R=workspace.padded(tables.rows),
            G=workspace.padded(tables.groups),
            S=triton.next_power_of_2(self._sms), ITEM_BLOCK=256, num_warps=8,
        )  # fmt: skip

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        tables: DecodeTables,
        out: Any = None,
        lse: Any = None,
        launch: LaunchChoice = "two_call",
        prefix: PrefixBackend | None = None,
    ) -> Any:
        """Attention of one layer, by the lists of the last `plan` with the same tables.

        Args:
            q: `[rows, num_q_heads, head_dim]`.
            k: `[slots, num_kv_heads, head_dim]`, rows may be strided.
            v: like `k`.
            tables: those that were planned.
            out: like `q`; made if not given.
            lse: `[rows, num_q_heads]` float32, base e; written if given.
            launch: one launch for all, or dense pass, memory-bound pass and merge.
            prefix: kernel of the dense tiles of two calls; `hopper` needs sm_90 and is taken there
                if none is named. A fused launch has its own.

        Returns:
            O, of `q`'s shape.

        Raises:
            ValueError: a tensor has a wrong shape, dtype, device or stride.
            NotImplementedError: this device or launch has no such part.
        """
        check_call(self.limits, q, k, v, tables, out, lse)
        if prefix is None:
            prefix = "hopper" if launch == "two_call" and self._has_hopper() else "triton"
        self._check_parts(launch, prefix)
        out = torch.empty_like(q) if out is None else out
        call = _Call(q, k, v, tables, out, lse, self.limits.heads)
        if launch == "fused":
            self._fused(call)
        else:
            self._two_call(call, prefix)
        return out

    def prefix_pass(
        self, q: Any, k: Any, v: Any, tables: DecodeTables, prefix: PrefixBackend
    ) -> None:
        """The first part of a two-call layer alone, for measurements; its parts stay inside."""
        self._dense_pass(_Call(q, k, v, tables, q, None, self.limits.heads), prefix, False)

    def private_pass(self, q: Any, k: Any, v: Any, tables: DecodeTables, out: Any) -> None:
        """The second part alone, for measurements."""
        self._stream_pass(_Call(q, k, v, tables, out, None, self.limits.heads), False, False)

    def counters(self) -> dict[str, int]:
        """Tiles of the last plan by mode; waits for the device."""
        *items, _ = self._work.counts.tolist()
        tiles = [count * self.limits.heads.kv for count in items]
        return dict(zip(("dense", "cascade", "private"), tiles, strict=True))

    def _check_overlap(self, overlap: str) -> None:
        if overlap not in ("serial", "split", "beside"):
            raise ValueError(f"overlap must be serial, split or beside, got {overlap!r}")
        if overlap == "split" and self._side_stream is None:
            raise NotImplementedError("an overlap needs a CUDA device")
        if overlap == "beside" and not self._has_hopper():
            raise NotImplementedError("a beside overlap needs sm_90 and head_dim 64, 128 or 256")

    def _check_parts(self, launch: str, prefix: str) -> None:
        if launch not in ("fused", "two_call"):
            raise ValueError(f"launch must be fused or two_call, got {launch!r}")
        if prefix not in ("triton", "hopper"):
            raise ValueError(f"prefix must be triton or hopper, got {prefix!r}")
        if launch == "fused" and prefix != "triton":
            raise NotImplementedError(f"a fused launch has no {prefix} prefix pass")
        if prefix == "hopper" and not self._has_hopper():
            raise NotImplementedError(
                "the hopper prefix pass needs sm_90 and head_dim 64, 128 or 256"
            )

    def _has_hopper(self) -> bool:
        return _is_hopper(self.limits.device) and self.limits.heads.dim != 96

    def _fused(self, call: "_Call") -> None:
        config, step, heads = self.config, self._work, self.limits.heads
        launches.fused_step[(self._sms * config.fused_per_sm,)](
            call.q, call.k, call.v, call.out, call.lse_or_out, step.part_out, step.part_lse,
            step.counts, step.dense_items, step.cascade_items, step.private_items, step.members,
            step.entry_part, step.row_part, step.row_parts, step.arrivals, step.queues,
            call.tables.private_slots, call.scale_log2, *call.strides, call.tables.width,
            HQ=heads.q, HKV=heads.kv, D=heads.dim, DP=config.head_dim, GP=config.group,
            DENSE_BM=config.dense_bm, DENSE_BN=config.fused_bn, CASCADE_BM=config.cascade_bm,
            CASCADE_BN=config.fused_bn, PRIVATE_BN=config.fused_bn, LSE=call.lse is not None,
            num_warps=config.fused_warps, num_stages=config.fused_stages,
        )  # fmt: skip

    def _two_call(self, call: "_Call", prefix: str) -> None:
        """The passes with the overlap that was planned, then the merge.

        On sm_90 a launch may begin while the one before it runs (programmatic dependent launch):
        the memory-bound pass beside the dense one, and the merge's blocks before that pass ends.
        """
        overlapped = self._with_dense and self._overlap != "serial"
        pdl = _is_hopper(self.limits.device) and not (FORKED and overlapped)
        if overlapped and not pdl:
            self._forked(call, prefix)
        else:
            if self._with_dense:
                self._dense_pass(call, prefix, pdl and overlapped)
            self._stream_pass(call, pdl, pdl and overlapped)
        self._merge(call, pdl)

    def _forked(self, call: "_Call", prefix: str) -> None:
        main, side = torch.cuda.current_stream(), self._side_stream
        side.wait_stream(main)
        self._dense_pass(call, prefix, False)
        with torch.cuda.stream(side):
            self._stream_pass(call, False, True)
        main.wait_stream(side)

    def _dense_pass(self, call: "_Call", prefix: str, pdl: bool) -> None:
        config, step, heads = self.config, self._work, self.limits.heads
        if prefix == "hopper":
            hopper.prefix_pass(
                call.q, call.k, call.v, step.part_out, step.part_lse, step.dense_items, step.counts,
                step.members, step.entry_part, call.scale_log2, self._sms, pdl,
                hopper.shape_for(heads.dim, self._overlap == "beside"),
            )  # fmt: skip
            return
        launches.prefix_pass[(self._sms,)](
            call.q, call.k, call.v, step.part_out, step.part_lse, step.dense_items, step.counts,
            step.members, step.entry_part, call.scale_log2, *call.strides[:3],
            HQ=heads.q, HKV=heads.kv, D=heads.dim, DP=config.head_dim, BM=config.dense_bm,
            BN=config.dense_bn, num_warps=config.dense_warps, num_stages=config.dense_stages,
        )  # fmt: skip

    def _stream_pass(self, call: "_Call", pdl: bool, beside: bool) -> None:
        config, step, heads = self.config, self._work, self.limits.heads
        arguments = (
            call.q, call.k, call.v, call.out, call.lse_or_out, step.part_out, step.part_lse,
            step.private_items, step.cascade_items, step.counts, step.members, step.entry_part,
            step.queues, call.tables.private_slots, call.scale_log2, *call.strides,
            call.tables.width,
        )  # fmt: skip
        sizes = {"HQ": heads.q, "HKV": heads.kv, "D": heads.dim, "DP": config.head_dim}
        sizes["LSE"] = call.lse is not None
        if _on_card(self.limits.device):
            same_row = call.k.stride(0) == call.v.stride(0)
            stream.stream_pass(
                arguments, self._sms, self._stream_shape(), pdl, beside, **sizes, SAME_ROW=same_row
            )
            return
        launches.private_pass[(self._sms * config.private_per_sm,)](
            *arguments, **sizes, GP=config.group, CASCADE_BM=config.cascade_bm,
            BN=config.private_bn, num_warps=config.private_warps,
            num_stages=config.private_stages,
        )  # fmt: skip

    def _stream_shape(self) -> stream.Shape:
        return stream.shape_for(self.config.head_dim, self._overlap == "beside")

    def _merge(self, call: "_Call", pdl: bool) -> None:
        config, step, heads = self.config, self._work, self.limits.heads
        launches.merge_pass[(call.tables.rows, heads.kv)](
            call.out, call.lse_or_out, step.part_out, step.part_lse, step.row_part, step.row_parts,
            *call.strides[3:],
            HQ=heads.q, HKV=heads.kv, D=heads.dim, DP=config.head_dim, GP=config.merge_rows,
            LSE=call.lse is not None, PDL=pdl, num_warps=min(4, config.merge_rows), launch_pdl=pdl,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Call:
    """One layer's tensors and what is derived from them."""

    q: Any
    k: Any
    v: Any
    tables: DecodeTables
    out: Any
    lse: Any
    heads: Heads

    @property
    def scale_log2(self) -> float:
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


def _on_card(device: Any) -> bool:
    return bool(torch.device(device).type == "cuda")


@cache
def _sm_count(device: str) -> int:
    if not _on_card(device):
        return 4  # Triton's interpreter: a few blocks show every path
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _capability(device: str) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if _on_card(device) else (0, 0)


def _is_hopper(device: Any) -> bool:
    return _capability(str(device))[0] == 9
