"""StepCost: what one decode or extend step costs, in integer nanoseconds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from granikv.core.errors import ConfigError
from granikv.core.step import Launch, Mode, Segment, StepPlan, StepShape
from granikv.cost_models import roofline
from granikv.cost_models.decode_line import DecodeLine
from granikv.cost_models.hardware import Hardware, load_hardware
from granikv.cost_models.ideal import Peaks
from granikv.cost_models.models import ModelShape
from granikv.cost_models.params import GpuParams
from granikv.cost_models.passes import (
    AllReduceTime,
    DensePass,
    ExtendTime,
    GemmTime,
    PagedTime,
    PrivatePass,
    RereadCost,
    ShareCost,
)
from granikv.cost_models.piecewise import (
    Pieces,
    overlapped,
    piece_at,
    scaled,
    shifted,
    upper,
    upper_line,
    weighted_sum,
)

_PAGED, _CASCADE, _DENSE = Mode  # looking a member up costs as much as comparing it
_UNSPLIT_OCCUPANCY = 0.8
_ALIKE = 0.9  # share of rows behind one prefix from which all are taken to be alike
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
        self.paged: PagedTime | PrivatePass = (
            PagedTime(terms.paged, peaks, self.heads)
            if is_stock
            else PrivatePass(self.rates, self.heads)
        )
        self.dense = DensePass(terms.dense, peaks, self.heads, self.rates.dense_step_efficiency)
        self.share_cost: ShareCost | RereadCost = (
            ShareCost(terms.shared_page_cost, self.heads, self.hardware.sm_count)
            if is_stock
            else RereadCost(self.rates.private_reread_share)
        )
        self._extend = ExtendTime(terms.extend, peaks, self.heads)
        self._all_reduce = AllReduceTime(terms.all_reduce, peaks, tp)
        self._gemms = [GemmTime(terms.gemm, peaks, gemm) for gemm in model.gemms(tp)]
        self._lm_head = GemmTime(terms.gemm, peaks, model.lm_head(tp))
        self._launch_ns = self.paged.line(1)[0][1]
        self._elementwise_bytes_per_token = _elementwise_bytes_per_token(model, tp)
        # One entry for each number of tokens that a step can have, so a bounded number.
        self._layers_by_tokens: dict[int, float] = {}
        self._gemm_by_tokens: dict[int, float] = {}
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
        gemm = slowed * (self._layers_gemm_ns(tokens) + self._lm_head.ns(len(extend_lens)))
        attention = slowed * layers * self._extend.ns(extend_lens, prefix_lens)
        collective = self.collective_ns(tokens)
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

    def gemm_ns(self, rows: int) -> float:
        """Matrix products and element-wise kernels of a decode step, all layers and the head."""
        cached = self._gemm_by_tokens.get(rows)
        if cached is None:
            cached = self._layers_gemm_ns(rows) + self._lm_head.ns(rows)
            self._gemm_by_tokens[rows] = cached
        return cached

    def collective_ns(self, tokens: int) -> float:
        """All-reduces of a step of that many tokens: two a layer under tensor parallelism."""
        num_bytes = tokens * self.model.hidden * self.model.dtype_bytes
        return 2 * self.model.layers * self._all_reduce.ns(num_bytes)

    def shared_pass(
        self, mode: Mode, length: int, rows: float, contiguous: bool = True
    ) -> tuple[float, float]:
        """One segment alone in one layer: time of its own pass, and in the private pass; in ns,
        without latency.

        A PAGED segment rides in the private pass: what it costs when nothing else is in there. So
        does a CASCADE of a fused launch: one kernel works on both.
        """
        if mode == Mode.DENSE:
            return max(self.dense.ns(length, rows)), 0.0
        if mode == Mode.CASCADE:
            parts = roofline.cascade_pass(self.rates, self.heads, length, rows, contiguous)
            return 0.0, max(parts)
        reads = rows * length * self.share_cost.of(rows, rows, length)
        line = self.paged.line(rows)
        _, a, b = line[piece_at(line, reads)]
        return 0.0, max(a + b * reads, self.paged.alone_ns(length)) - line[0][1]

    def pass_latency_ns(self, mode: Mode) -> float:
        """Fixed time of one two-call launch; PAGED segments ride in the private pass's launch."""
        if mode == Mode.PAGED:
            return self._launch_ns
        return self.rates.cascade_latency_ns if mode == Mode.CASCADE else self.dense.latency_ns

    def _layers_gemm_ns(self, tokens: int) -> float:
        cached = self._layers_by_tokens.get(tokens)
        if cached is None:
            layer = sum([gemm.ns(tokens) for gemm in self._gemms])
            layer += roofline.elementwise_ns(self.rates, tokens * self._elementwise_bytes_per_token)
            cached = self._layers_by_tokens[tokens] = self.model.layers * layer
        return cached

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
            self.gemm_ns(shape.padded_rows),
            self.collective_ns(shape.padded_rows),
            self._attention(shape.rows, shape.segments, plan, 1.0),
        )

    def _split_line(self, shape: StepShape, plan: StepPlan) -> DecodeLine:
        """Two sub-batches, each hiding its collectives behind the other's compute; not measured.

        Time = host + max(both computes, both collectives) + the first layer's compute
        + the last collective.
        Private tokens and segment rows are taken to split in proportion to the rows.
        """
        first, second = plan.row_split
        layers = self.model.layers
        gemm_first, gemm_second = self.gemm_ns(first), self.gemm_ns(second)
        gemm = gemm_first + gemm_second
        exposed_collective = self.collective_ns(second) / (2 * layers)
        collectives = self.collective_ns(first) + self.collective_ns(second)
        attention_first = self._attention(first, shape.segments, plan, first / shape.rows)
        attention_second = self._attention(second, shape.segments, plan, second / shape.rows)
        fill = gemm_first / layers
        compute_bound = weighted_sum(attention_first, attention_second, 1 + 1 / layers, fill)
        communication_bound = scaled(attention_first, 1 / layers, collectives - gemm + fill)
        return DecodeLine(
            self.host_ns(shape.rows),
            gemm,
            exposed_collective,
            upper(compute_bound, communication_bound),
        )

    def _sums(
        self, rows: float, segments: tuple[Segment, ...], plan: StepPlan, share: float
    ) -> tuple[list[float], float, int]:
        """One layer's passes over prefixes by mode in ns; of the paged segments, what reading them
        costs in private tokens, and the longest.
        """
        passes = [0.0, 0.0, 0.0]
        paged_reads, longest = 0.0, 0
        for (base, length, segment_rows), mode in zip(segments, plan.modes, strict=True):
            part_rows = segment_rows * share
            if mode == _PAGED:
                paged_reads += part_rows * length * self.share_cost.of(part_rows, rows, length)
                longest = max(longest, length)
            elif mode == _DENSE:
                passes[mode] += max(self.dense.ns(length, part_rows))
            else:
                parts = roofline.cascade_pass(
                    self.rates, self.heads, length, part_rows, base > 0, rows
                )
                passes[mode] += max(parts)
        return passes, paged_reads, longest

    def fused_parts_ns(self, shape: StepShape, plan: StepPlan) -> tuple[float, float]:
        """All layers' dense passes, and private pass with its cascades, of a fused launch without
        its latency; the plan has no row split.
        """
        self._check(shape, plan)
        passes, reads, _ = self._sums(shape.rows, shape.segments, plan, 1.0)
        line = self.private_line(shape.rows, reads, passes[_CASCADE], 1.0)
        _, a, b = line[piece_at(line, shape.private_tokens)]
        prefix_ns = passes[_DENSE] + self._dense_launch_ns(plan)
        return self.model.layers * prefix_ns, a + b * shape.private_tokens

    def cascades_ns(self, shape: StepShape, plan: StepPlan) -> float:
        """All layers' cascades of a step without a row split."""
        passes, _, _ = self._sums(shape.rows, shape.segments, plan, 1.0)
        return self.model.layers * passes[_CASCADE]

    def _dense_launch_ns(self, plan: StepPlan) -> float:
        """A dense pass beside the private one is a launch of its own; cascades share its launch."""
        return self.dense.latency_ns if _DENSE in plan.modes else 0.0

    def private_line(self, rows: float, reads: float, cascades_ns: float, share: float) -> Pieces:
        """All layers' private pass without its launch, with `reads` more tokens and cascades that
        take so long in a layer.
        """
        # What many short rows take beyond one row is work; only the launch is saved.
        extra = cascades_ns - self._launch_ns
        return shifted(self.paged.line(rows), share, reads, self.model.layers, extra)

    def _whole_waves(self, rows: float, segments: tuple[Segment, ...], share: float) -> float:
        """Whole waves of work over the work there is, where a stock engine's rows are alike.

        FlashAttention-3 gives a row of one kv head to one SM (split-KV only below
        `_UNSPLIT_OCCUPANCY` of them: hopper/heuristics.h, num_splits_heuristic). Rows behind one
        long prefix end together; rows of unlike length fill each other's gaps.
        """
        if not self.is_stock or len(segments) != 1 or segments[0].rows * share < _ALIKE * rows:
            return 1.0
        waves = rows * self.heads.kv / self.hardware.sm_count
        return math.ceil(waves) / waves if waves >= _UNSPLIT_OCCUPANCY else 1.0

    def _attention(
        self, rows: float, segments: tuple[Segment, ...], plan: StepPlan, share: float
    ) -> Pieces:
        """All layers' attention for `rows` rows with `share` of private tokens and segment rows."""
        stretch = self._whole_waves(rows, segments, share)
        if stretch > 1.0:
            # The last wave takes as long as if it were full.
            rows, share = rows * stretch, share * stretch
        modes, layers, rates = plan.modes, self.model.layers, self.rates
        passes, paged_reads, longest = self._sums(rows, segments, plan, share)
        used = [mode for mode in (_CASCADE, _DENSE) if mode in modes]
        if plan.launch is Launch.FUSED and used:
            line = self.private_line(rows, paged_reads, passes[_CASCADE], share)
            prefix_ns = layers * (passes[_DENSE] + self._dense_launch_ns(plan))
            latency_ns = layers * rates.fused_latency_ns
            return overlapped(line, prefix_ns, rates.fused_exposed_share, latency_ns)
        extra = sum([passes[mode] + self.pass_latency_ns(mode) for mode in used])
        if used:
            extra += roofline.merge_ns(rates, self.heads, rows)
        line = shifted(self.paged.line(rows), share, paged_reads, layers, extra)
        if not longest:
            return line
        # However little the sharing leaves to read, it takes as long as one row alone does.
        floor_ns = layers * (self.paged.alone_ns(longest) + extra)
        start, a, b = line[0]
        is_above = a + b * max(start, 0.0) >= floor_ns
        return line if is_above else upper_line(line, floor_ns, 0.0)


def _check_dense(segments: tuple[Segment, ...], modes: tuple[Mode, ...]) -> None:
    for segment, mode in zip(segments, modes, strict=True):
        if mode == _DENSE and segment.base == 0:
            raise ValueError("a dense pass must have a contiguous segment, got base 0 (COLD slots)")


def _elementwise_bytes_per_token(model: ModelShape, tp: int) -> int:
    """Traffic of one token and layer outside matrix products and attention.

    Two norms with residual (two reads, two writes each), rotary embedding and KV write, gated
    activation.
    """
    q_width = model.q_heads_per_rank(tp) * model.head_dim
    kv_width = model.kv_heads_per_rank(tp) * model.head_dim
    elements = 8 * model.hidden + 2 * (q_width + 2 * kv_width) + 3 * model.intermediate // tp
    return elements * model.dtype_bytes
