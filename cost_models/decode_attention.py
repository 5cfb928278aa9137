"""DecodeAttention: attention of a decode step, its passes together, on one rank."""

import math

from granikv.core.step import Launch, Mode, Segment, StepPlan, StepShape
from granikv.cost_models import roofline
from granikv.cost_models.ideal import Peaks
from granikv.cost_models.params import Terms
from granikv.cost_models.passes import DensePass, PagedTime, PrivatePass, RereadCost, ShareCost
from granikv.cost_models.piecewise import Pieces, overlapped, piece_at, shifted, upper_line
from granikv.cost_models.roofline import Heads, Rates

_PAGED, _CASCADE, _DENSE = Mode  # looking a member up costs as much as comparing it
_UNSPLIT_OCCUPANCY = 0.8
_ALIKE = 0.9  # share of rows behind one prefix from which all are taken to be alike


class DecodeAttention:
    """Attention of a decode step as a line in private tokens.

    Attributes:
        paged: the pass that reads each row's tokens by itself.
        dense: the pass over a contiguous prefix.
        share_cost: what tokens that several rows read cost in the first.
    """

    def __init__(
        self, terms: Terms, peaks: Peaks, rates: Rates, heads: Heads, layers: int, sm_count: int,
        *, is_stock: bool,
    ) -> None:  # fmt: skip
        """`is_stock`: it is SGLang's own, with FlashAttention-3, not GraniKV's."""
        self.paged: PagedTime | PrivatePass = (
            PagedTime(terms.paged, peaks, heads) if is_stock else PrivatePass(rates, heads)
        )
        self.dense = DensePass(terms.dense, peaks, heads, rates.dense_step_efficiency)
        self.share_cost: ShareCost | RereadCost = (
            ShareCost(terms.shared_page_cost, heads, sm_count)
            if is_stock
            else RereadCost(rates.private_reread_share)
        )
        self._rates, self._heads, self._layers = rates, heads, layers
        self._sm_count, self._is_stock = sm_count, is_stock
        self._launch_ns = self.paged.line(1)[0][1]

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
            parts = roofline.cascade_pass(self._rates, self._heads, length, rows, contiguous)
            return 0.0, max(parts)
        reads = rows * length * self.share_cost.of(rows, rows, length)
        line = self.paged.line(rows)
        _, a, b = line[piece_at(line, reads)]
        return 0.0, max(a + b * reads, self.paged.alone_ns(length)) - line[0][1]

    def alone_pass_ns(self, mode: Mode, length: int, rows: float) -> float:
        """One contiguous segment alone in one layer, its launch included."""
        return max(self.shared_pass(mode, length, rows)) + self.pass_latency_ns(mode)

    def dense_wins_from(self, length: int, most_rows: int) -> int | None:
        """The fewest rows from which a dense pass beats a cascade, both alone; None up to
        `most_rows`.
        """
        for rows in range(1, most_rows + 1):
            dense_ns = self.alone_pass_ns(Mode.DENSE, length, rows)
            if dense_ns < self.alone_pass_ns(Mode.CASCADE, length, rows):
                return rows
        return None

    def pass_latency_ns(self, mode: Mode) -> float:
        """Fixed time of one two-call launch; PAGED segments ride in the private pass's launch."""
        if mode == Mode.PAGED:
            return self._launch_ns
        return self._rates.cascade_latency_ns if mode == Mode.CASCADE else self.dense.latency_ns

    def line(
        self, rows: float, segments: tuple[Segment, ...], plan: StepPlan, share: float
    ) -> Pieces:
        """All layers' attention for `rows` rows with `share` of private tokens and segment rows."""
        stretch = self._whole_waves(rows, segments, share)
        if stretch > 1.0:
            # The last wave takes as long as if it were full.
            rows, share = rows * stretch, share * stretch
        modes, layers, rates = plan.modes, self._layers, self._rates
        passes, paged_reads, longest = self._sums(rows, segments, plan, share)
        used = [mode for mode in (_CASCADE, _DENSE) if mode in modes]
        if plan.launch is Launch.FUSED and used:
            line = self._private_line(rows, paged_reads, passes[_CASCADE], share)
            prefix_ns = layers * (passes[_DENSE] + self._dense_launch_ns(plan))
            latency_ns = layers * rates.fused_latency_ns
            return overlapped(line, prefix_ns, rates.fused_exposed_share, latency_ns)
        extra = sum([passes[mode] + self.pass_latency_ns(mode) for mode in used])
        if used:
            extra += roofline.merge_ns(rates, self._heads, rows)
        line = shifted(self.paged.line(rows), share, paged_reads, layers, extra)
        if not longest:
            return line
        # However little the sharing leaves to read, it takes as long as one row alone does.
        floor_ns = layers * (self.paged.alone_ns(longest) + extra)
        start, a, b = line[0]
        is_above = a + b * max(start, 0.0) >= floor_ns
        return line if is_above else upper_line(line, floor_ns, 0.0)

    def fused_parts_ns(self, shape: StepShape, plan: StepPlan) -> tuple[float, float]:
        """All layers' dense passes, and private pass with its cascades, of a fused launch without
        its latency; the plan has no row split.
        """
        passes, reads, _ = self._sums(shape.rows, shape.segments, plan, 1.0)
        line = self._private_line(shape.rows, reads, passes[_CASCADE], 1.0)
        _, a, b = line[piece_at(line, shape.private_tokens)]
        prefix_ns = passes[_DENSE] + self._dense_launch_ns(plan)
        return self._layers * prefix_ns, a + b * shape.private_tokens

    def cascades_ns(self, shape: StepShape, plan: StepPlan) -> float:
        """All layers' cascades of a step without a row split."""
        passes, _, _ = self._sums(shape.rows, shape.segments, plan, 1.0)
        return self._layers * passes[_CASCADE]

    def _dense_launch_ns(self, plan: StepPlan) -> float:
        """A dense pass beside the private one is a launch of its own; cascades share its launch."""
        return self.dense.latency_ns if _DENSE in plan.modes else 0.0

    def _private_line(self, rows: float, reads: float, cascades_ns: float, share: float) -> Pieces:
        """All layers' private pass without its launch, with `reads` more tokens and cascades that
        take so long in a layer.
        """
        # What many short rows take beyond one row is work; only the launch is saved.
        extra = cascades_ns - self._launch_ns
        return shifted(self.paged.line(rows), share, reads, self._layers, extra)

    def _whole_waves(self, rows: float, segments: tuple[Segment, ...], share: float) -> float:
        """Whole waves of work over the work there is, where a stock engine's rows are alike.

        FlashAttention-3 gives a row of one kv head to one SM (split-KV only below
        `_UNSPLIT_OCCUPANCY` of them: hopper/heuristics.h, num_splits_heuristic). Rows behind one
        long prefix end together; rows of unlike length fill each other's gaps.
        """
        if not self._is_stock or len(segments) != 1 or segments[0].rows * share < _ALIKE * rows:
            return 1.0
        waves = rows * self._heads.kv / self._sm_count
        return math.ceil(waves) / waves if waves >= _UNSPLIT_OCCUPANCY else 1.0

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
                    self._rates, self._heads, length, part_rows, base > 0, rows
                )
                passes[mode] += max(parts)
        return passes, paged_reads, longest
