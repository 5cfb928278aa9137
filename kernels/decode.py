"""Decode attention over shared segments and private slots: the operator an engine calls.

`plan` runs once a step, `run` once a layer; both only launch kernels, so that a step can be
captured in a CUDA graph and replayed after the tables have changed.
"""

from functools import cache
from typing import Any, Literal, get_args

import torch  # type: ignore[import-not-found,unused-ignore]
import triton  # type: ignore[import-not-found,unused-ignore]

from granikv.kernels import fa3, passes, planner, stream, workspace
from granikv.kernels.checks import DecodeLimits, check_call, check_tables
from granikv.kernels.configs import Config, config_for
from granikv.kernels.overlap import Overlap
from granikv.kernels.shapes import Heads
from granikv.kernels.tables import DecodeTables

LaunchChoice = Literal["fused", "two_call"]
PrefixBackend = Literal["triton", "hopper", "fa3", "none"]

_WHOLE_SEGMENT = 1 << 28  # tokens of a chunk


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
        dependent_launch: passes overlap by programmatic dependent launch (sm_90); False forks a
            stream. By default where the device has it.

    Raises:
        ValueError: a limit is not positive.
        NotImplementedError: heads or dtype without a kernel, or a device without dependent launch.
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
        dependent_launch: bool | None = None,
        config: Config | None = None,
    ) -> None:
        self.limits = DecodeLimits(max_rows, heads, max_groups, max_private_tokens, dtype, device)
        self.deterministic = deterministic
        self._sms = _sm_count(str(device))
        self.config = config or config_for(heads, _capability(str(device)))
        self._work = workspace.allocate(self.limits, max_segment_tokens if deterministic else None)
        self._sequences: fa3.Sequences | None = None
        self._max_segment_tokens = max_segment_tokens
        self._side_stream = torch.cuda.Stream(device) if _on_card(device) else None
        self._dependent_launch = (
            _is_hopper(device) if dependent_launch is None else dependent_launch
        )
        if self._dependent_launch and not _is_hopper(device):
            raise NotImplementedError("programmatic dependent launch needs sm_90")
        self._overlap: Overlap = "serial"
        self._prefix: PrefixBackend = self._default_prefix()

    @property
    def workspace_bytes(self) -> int:
        """Device memory of the work lists and the parts."""
        return self._work.num_bytes

    def plan(
        self,
        tables: DecodeTables,
        overlap: Overlap = "serial",
        prefix: PrefixBackend | None = None,
    ) -> None:
        """Make the step's work lists from the tables, for the layers that follow; one launch.

        Args:
            tables: of the step.
            overlap: of the dense pass and the memory-bound pass: one after the other; at the same
                time on SMs that the plan divides between them (`split`); or on all SMs side by
                side (`beside`, sm_90: less of the tensor cores' rate, more of the memory's).
            prefix: kernel of the dense pass. `hopper` needs sm_90 and is taken there if none is
                named; `fa3` is FlashAttention-3's, with the limits that `granikv.kernels.fa3`
                names; `none` leaves the pass out and runs dense segments as cascades, one launch
                less for few rows. A fused launch has its own.

        Raises:
            ValueError: a table has a wrong shape, dtype, device or stride, or there is no such
                choice.
            NotImplementedError: this device, head_dim or installation has no such part.
        """
        check_tables(self.limits, tables)
        prefix = self._default_prefix() if prefix is None else prefix
        self._check_choice(overlap, prefix)
        self._overlap, self._prefix = overlap, prefix
        heads, config, step, shape = self.limits.heads, self.config, self._work, self._stream_shape
        planner.plan_step[(1,)](
            tables.segment_base, tables.segment_length, tables.segment_group, tables.group_mode,
            tables.private_row, tables.private_start, tables.private_length, step.counts,
            step.dense_items, step.cascade_items, step.private_items, step.members,
            step.entry_part, step.row_part, step.row_parts, step.group_scratch,
            tables.rows, tables.groups, workspace.part_budget(tables.rows, heads.q),
            *self._fixed_chunks(), int(overlap == "split"), int(prefix != "none"),
            HKV=heads.kv,
            DENSE_ROWS=config.dense_bm // self.limits.group, DENSE_BLOCK=config.dense_block,
            CASCADE_ROWS=config.cascade_bm // self.limits.group, CASCADE_BLOCK=shape.tokens,
            SMS=self._sms, SLOTS=self._sms * shape.blocks_at_first,
            R=workspace.padded(tables.rows),
            G=workspace.padded(tables.groups),
            S=triton.next_power_of_2(self._sms), ITEM_BLOCK=256, num_warps=8,
        )  # fmt: skip
        if prefix == "fa3":
            fa3.plan(self._fa3_sequences(), step, tables, config.dense_block)

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        tables: DecodeTables,
        out: Any = None,
        lse: Any = None,
        launch: LaunchChoice = "two_call",
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

        Returns:
            O, of `q`'s shape.

        Raises:
            ValueError: a tensor has a wrong shape, dtype, device or stride, or there is no such
                launch.
        """
        check_call(self.limits, q, k, v, tables, out, lse)
        if launch not in get_args(LaunchChoice):
            raise ValueError(f"launch must be fused or two_call, got {launch!r}")
        out = torch.empty_like(q) if out is None else out
        layer = self._layer(q, k, v, tables, out, lse)
        if launch == "fused":
            passes.fused_step(layer)
        else:
            self._two_call(layer)
        return out

    def prefix_pass(self, q: Any, k: Any, v: Any, tables: DecodeTables) -> None:
        """The dense pass of a layer alone, for measurements; its parts stay inside."""
        self._dense_pass(self._layer(q, k, v, tables, q, None), self._dependent_launch, False)

    def private_pass(self, q: Any, k: Any, v: Any, tables: DecodeTables, out: Any) -> None:
        """The memory-bound pass alone, for measurements."""
        layer = self._layer(q, k, v, tables, out, None)
        self._stream_pass(layer, early=self._dependent_launch, alone=True)

    def counters(self) -> dict[str, int]:
        """Tiles of the last plan by mode; waits for the device."""
        *items, _ = self._work.counts.tolist()
        tiles = [count * self.limits.heads.kv for count in items]
        return dict(zip(("dense", "cascade", "private"), tiles, strict=True))

    def _default_prefix(self) -> PrefixBackend:
        return "hopper" if self._has_hopper() else "triton"

    def _has_hopper(self) -> bool:
        return _is_hopper(self.limits.device) and self.limits.heads.dim != 96

    def _check_choice(self, overlap: str, prefix: str) -> None:
        if overlap not in get_args(Overlap):
            raise ValueError(f"overlap must be serial, split or beside, got {overlap!r}")
        if prefix not in get_args(PrefixBackend):
            raise ValueError(f"prefix must be triton, hopper, fa3 or none, got {prefix!r}")
        if overlap != "serial" and self._side_stream is None:
            raise NotImplementedError("an overlap needs a CUDA device")
        if (prefix == "hopper" or overlap == "beside") and not self._has_hopper():
            raise NotImplementedError(
                "the hopper prefix pass, and beside, need sm_90 and head_dim 64, 128 or 256"
            )
        if prefix == "fa3":
            self._check_fa3(overlap)

    def _check_fa3(self, overlap: str) -> None:
        if overlap != "serial":
            raise NotImplementedError(f"the fa3 prefix pass is serial only, got {overlap}")
        if self.deterministic:
            raise NotImplementedError("the fa3 prefix pass splits segments as the batch asks for")
        fa3.load()

    def _fixed_chunks(self) -> tuple[int, int, int]:
        """Tokens of dense, cascade and private tiles; 0 where the planner chooses."""
        if self.deterministic:
            prefix, private = workspace.PREFIX_CHUNK, workspace.PRIVATE_CHUNK
            return prefix, prefix, private
        return (_WHOLE_SEGMENT if self._prefix == "fa3" else 0), 0, 0

    def _layer(
        self, q: Any, k: Any, v: Any, tables: DecodeTables, out: Any, lse: Any
    ) -> passes.Layer:
        heads, config = self.limits.heads, self.config
        return passes.Layer(q, k, v, tables, out, lse, heads, config, self._work, self._sms)

    def _two_call(self, layer: passes.Layer) -> None:
        """The passes with the overlap that was planned, then the merge.

        With dependent launch a kernel is on the card when the one ahead of it ends, the
        memory-bound pass starts once every block of the dense one has, and blocks of the merge may
        be there before that pass ends.
        """
        pdl = self._dependent_launch
        overlapped = self._prefix != "none" and self._overlap != "serial"
        if overlapped and not pdl:
            self._forked(layer)
        else:
            if self._prefix != "none":
                self._dense_pass(layer, pdl, pdl and overlapped)
            self._stream_pass(layer, early=pdl, pdl=pdl, beside=overlapped)
        passes.merge_pass(layer, pdl)

    def _forked(self, layer: passes.Layer) -> None:
        main, side = torch.cuda.current_stream(), self._side_stream
        side.wait_stream(main)
        self._dense_pass(layer, False, False)
        with torch.cuda.stream(side):
            self._stream_pass(layer, beside=True)
        main.wait_stream(side)

    def _dense_pass(self, layer: passes.Layer, early: bool, pdl: bool) -> None:
        if self._prefix == "fa3":
            fa3.prefix_pass(
                self._fa3_sequences(), self._work, layer.q, layer.k, layer.v, layer.tables,
                self._max_segment_tokens, self._sms,
            )  # fmt: skip
        elif self._prefix == "hopper":
            passes.hopper_prefix_pass(layer, self._overlap == "beside", early, pdl)
        else:
            passes.triton_prefix_pass(layer, early, pdl)

    def _stream_pass(
        self,
        layer: passes.Layer,
        early: bool = False,
        pdl: bool = False,
        beside: bool = False,
        alone: bool = False,
    ) -> None:
        if not _on_card(self.limits.device):
            passes.triton_private_pass(layer)
            return
        passes.stream_pass(
            layer, self._stream_shape, early=early, pdl=pdl, beside=beside, alone=alone
        )

    @property
    def _stream_shape(self) -> stream.Shape:
        return stream.shape_for(self.config.head_dim, self._overlap == "beside")

    def _fa3_sequences(self) -> fa3.Sequences:
        """Made when they are first needed: few operators run FA3."""
        if self._sequences is None:
            self._sequences = fa3.allocate(self.limits)
        return self._sequences


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
