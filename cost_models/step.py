"""StepCost: what one decode or extend step costs, in integer nanoseconds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from granikv.core.errors import ConfigError
from granikv.core.step import Mode, Segment, StepPlan, StepShape
from granikv.cost_models import roofline
from granikv.cost_models.decode_attention import DecodeAttention
from granikv.cost_models.decode_line import DecodeLine
from granikv.cost_models.hardware import Hardware, load_hardware
from granikv.cost_models.ideal import Peaks
from granikv.cost_models.models import ModelShape
from granikv.cost_models.params import GpuParams
from granikv.cost_models.passes import ExtendTime
from granikv.cost_models.piecewise import scaled, upper, weighted_sum
from granikv.cost_models.products import Products

_MAX_CACHED_LINES = 4096  # shapes drift as requests come and go; old ones never return


@dataclass(frozen=True, slots=True)
class ExtendCost:
    """One extend (prefill) step; the parts sum to `total_ns` up to rounding down."""

    total_ns: int
    host_ns: float
    gemm_ns: float
    attention_ns: float
    collective_ns: float


class StepCost:
    """Step times of one model on one GPU type at one tensor-parallel degree.

    Attributes:
        products: matrix products, small kernels and collectives.
        attention: of decode steps.

    Raises:
        ConfigError: `tp` is not 1, 2, 4 or 8, or the model's heads cannot be split that way.
    """

    def __init__(
        self,
        params: GpuParams,
        model: ModelShape,
        hardware: Hardware | None = None,
        tp: int = 1,
        *,
        is_stock: bool = False,
    ) -> None:
        """Take rates from `params`, sizes from `model`, peaks from `hardware` (or its GPU).

        `is_stock`: decode attention is SGLang's own, with FlashAttention-3, not GraniKV's.
        """
        if tp != 1 and tp not in roofline.COLLECTIVE_GPUS:
            raise ConfigError(
                f"tp must be 1, 2, 4 or 8, got {tp}: only these are in the parameters."
            )
        self.params = params
        self.model = model
        self.hardware = hardware or load_hardware(params.gpu)
        self.tp = tp
        self.is_stock = is_stock
        self.rates = roofline.rates_of(params, self.hardware)
        self.heads = roofline.Heads(
            model.q_heads_per_rank(tp),
            model.kv_heads_per_rank(tp),
            model.head_dim,
            model.kv_bytes_per_token_layer(tp),
        )
        terms, peaks = params.terms, Peaks.of(self.hardware)
        self.products = Products(terms, peaks, self.rates, model, tp)
        self.attention = DecodeAttention(
            terms, peaks, self.rates, self.heads, model.layers, self.hardware.sm_count,
            is_stock=is_stock,
        )  # fmt: skip
        self._extend = ExtendTime(terms.extend, peaks, self.heads)
        self._lines: dict[tuple[object, ...], DecodeLine] = {}
        self._last: tuple[StepShape, StepPlan, DecodeLine] | None = None

    def in_engine(self, is_stock: bool) -> "StepCost":
        """The same in a stock engine, or in GraniKV's."""
        if is_stock == self.is_stock:
            return self
        return StepCost(self.params, self.model, self.hardware, self.tp, is_stock=is_stock)

    def decode(self, shape: StepShape, plan: StepPlan) -> DecodeLine:
        """The step as a line in private tokens; cached, so asking again is cheap.

        Neither `private_tokens` nor `max_private_tokens` matters: a paged kernel's work is the sum.

        Raises:
            ValueError: the plan does not fit the shape, or wants a dense pass over scattered slots.
        """
        last = self._last
        if last is not None:
            seen, its_plan, line = last
            if (
                shape.segments is seen.segments
                and plan is its_plan
                and shape.rows == seen.rows
                and shape.padded_rows == seen.padded_rows
            ):
                return line
        key = (
            shape.rows,
            shape.padded_rows,
            shape.segments,
            shape.num_q_heads,
            shape.num_kv_heads,
            plan.modes,
            plan.launch,
            plan.row_split,
        )
        cached = self._lines.get(key)
        if cached is None:
            self._check(shape, plan)
            cached = self._split_line(shape, plan) if plan.row_split else self._line(shape, plan)
            if len(self._lines) >= _MAX_CACHED_LINES:
                self._lines.clear()
            self._lines[key] = cached
        self._last = (shape, plan, cached)
        return cached

    def step_ns(self, shape: StepShape, plan: StepPlan) -> int:
        """Time of one decode step."""
        return self.decode(shape, plan).ns(shape.private_tokens)

    def segment(self, shape: StepShape, plan: StepPlan, k: int) -> NDArray[np.int64]:
        """End time of each of `k` decode steps; step i has `rows * i` more private tokens."""
        return self.decode(shape, plan).cumulative(shape.private_tokens, shape.rows, k)

    def extend(
        self, extend_lens: Sequence[int], prefix_lens: Sequence[int], padded_tokens: int = 0
    ) -> ExtendCost:
        """One extend step: each request computes `extend_len` tokens over `prefix_len` cached ones.

        `padded_tokens` are those of the CUDA graph that runs its matrix products, 0 without one.

        Raises:
            ValueError: no request, lists of different length, no new token, a negative prefix, or a
                graph that is too small.
        """
        if not extend_lens or len(extend_lens) != len(prefix_lens):
            raise ValueError(
                f"extend_lens and prefix_lens must be of one positive length, "
                f"got {len(extend_lens)} and {len(prefix_lens)}"
            )
        if min(extend_lens) < 1 or min(prefix_lens) < 0:
            raise ValueError("extend_lens must be positive and prefix_lens not negative")
        tokens = sum(extend_lens)
        if padded_tokens and padded_tokens < tokens:
            raise ValueError(f"a graph of {padded_tokens} tokens cannot run {tokens}")
        tokens = padded_tokens or tokens
        layers = self.model.layers
        slowed = 1 / self.rates.extend_step_efficiency
        gemm = slowed * self.products.extend_ns(tokens, len(extend_lens))
        attention = slowed * layers * self._extend.ns(extend_lens, prefix_lens)
        collective = self.products.collective_ns(tokens)
        gpu = gemm + attention + collective
        host = self.rates.host_extend_graph_ns
        if not padded_tokens:
            # The host launches layer by layer; a short batch waits for it.
            launch_wait = max(0.0, layers * self.rates.host_extend_layer_ns - gpu)
            host = self.rates.host_extend_ns + launch_wait
        return ExtendCost(math.floor(host + gpu), host, gemm, attention, collective)

    def copy_ns(self, tokens: int) -> int:
        """Time to copy the KV of `tokens` tokens, all layers of one rank (promotion, migration).

        Raises:
            ValueError: `tokens` is negative.
        """
        if tokens < 0:
            raise ValueError(f"tokens must not be negative, got {tokens}")
        num_bytes = tokens * self.model.kv_bytes_per_token(self.tp)
        return math.floor(roofline.copy_ns(self.rates, num_bytes))

    def _check(self, shape: StepShape, plan: StepPlan) -> None:
        if len(plan.modes) != len(shape.segments):
            raise ValueError(
                f"plan.modes must have one mode per segment, "
                f"got {len(plan.modes)} for {len(shape.segments)} segments"
            )
        heads = (shape.num_q_heads, shape.num_kv_heads, shape.head_dim)
        if heads != self.heads[:3]:
            raise ValueError(f"shape must have this rank's heads {self.heads[:3]}, got {heads}")
        if Mode.DENSE in plan.modes:
            _check_dense(shape.segments, plan.modes)
        split = plan.row_split
        if split and (self.tp == 1 or len(split) != 2 or sum(split) != shape.rows):
            raise ValueError(
                f"plan.row_split must be two parts of {shape.rows} rows under tensor parallelism, "
                f"got {split} at tp {self.tp}"
            )

    def host_ns(self, rows: int) -> float:
        """What a decode step takes beyond its kernels: the gap to the next one, and in a stock
        engine what every row adds.
        """
        return self.rates.host_decode_ns + (rows * self.rates.stock_row_ns if self.is_stock else 0)

    def _line(self, shape: StepShape, plan: StepPlan) -> DecodeLine:
        return DecodeLine(
            self.host_ns(shape.rows),
            self.products.decode_ns(shape.padded_rows),
            self.products.collective_ns(shape.padded_rows),
            self.attention.line(shape.rows, shape.segments, plan, 1.0),
        )

    def _split_line(self, shape: StepShape, plan: StepPlan) -> DecodeLine:
        """Two sub-batches, each hiding its collectives behind the other's compute; not measured.

        Time = host + max(both computes, both collectives) + the first layer's compute
        + the last collective.
        Private tokens and segment rows are taken to split in proportion to the rows.
        """
        first, second = plan.row_split
        layers = self.model.layers
        gemm_first, gemm_second = self.products.decode_ns(first), self.products.decode_ns(second)
        gemm = gemm_first + gemm_second
        exposed_collective = self.products.collective_ns(second) / (2 * layers)
        collectives = self.products.collective_ns(first) + self.products.collective_ns(second)
        attention_first = self.attention.line(first, shape.segments, plan, first / shape.rows)
        attention_second = self.attention.line(second, shape.segments, plan, second / shape.rows)
        fill = gemm_first / layers
        compute_bound = weighted_sum(attention_first, attention_second, 1 + 1 / layers, fill)
        communication_bound = scaled(attention_first, 1 / layers, collectives - gemm + fill)
        return DecodeLine(
            self.host_ns(shape.rows),
            gemm,
            exposed_collective,
            upper(compute_bound, communication_bound),
        )


def _check_dense(segments: tuple[Segment, ...], modes: tuple[Mode, ...]) -> None:
    for segment, mode in zip(segments, modes, strict=True):
        if mode == Mode.DENSE and segment.base == 0:
            raise ValueError("a dense pass must have a contiguous segment, got base 0 (COLD slots)")
