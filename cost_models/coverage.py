"""Coverage: whether the parts of a prediction lie inside what was measured."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from granikv.core.step import Mode, StepPlan, StepShape
from granikv.cost_models.params import FittedSurface, Parameter
from granikv.cost_models.step import StepCost

Coverage = Literal["measured range", "extrapolated", "datasheet"]
ORDER: tuple[Coverage, ...] = ("measured range", "extrapolated", "datasheet")
_SLACK = 1.001  # a size at the very edge of a range is inside of it


@dataclass(slots=True)
class SeenSizes:
    """Extremes of what a run asked of the cost model; `add_*` widens them.

    Attributes:
        ranges: `term.axis` to lowest and highest size.
        modes: modes of the shared segments that ran.
        has_fused: whether a fused launch ran.
    """

    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    modes: set[Mode] = field(default_factory=set)
    has_fused: bool = False

    def add_decode(self, cost: StepCost, shape: StepShape, plan: StepPlan) -> None:
        """Widen by one decode step."""
        kv_heads, group = cost.heads.kv, cost.heads.q / cost.heads.kv
        rows = shape.rows
        self._add("gemm.m", shape.padded_rows)
        self._add("all_reduce.bytes", _message_bytes(cost, shape.padded_rows))
        self._add("paged.tiles", rows * kv_heads)
        paged = shape.private_tokens
        for (_, length, sharers), mode in zip(shape.segments, plan.modes, strict=True):
            self.modes.add(mode)
            if mode == Mode.PAGED:
                waves = rows * kv_heads / cost.hardware.sm_count
                self._add("private_reread_share.rows", rows)
                self._add("shared_page_cost.in_flight", sharers / max(1.0, waves))
                self._add("shared_page_cost.waves", waves)
                self._add("shared_page_cost.tokens", length)
                paged += sharers * length
            elif mode == Mode.DENSE:
                self._add("dense.tile_rows", sharers * group)
                self._add("dense.tokens", length)
                self._add("dense.kv_heads", kv_heads)
        self._add("paged.tokens", max(paged / rows, 1))
        if plan.launch.name == "FUSED" and any(mode != Mode.PAGED for mode in plan.modes):
            self.has_fused = True
            self._add("fused_latency_ns.rows", rows)
            self._add("fused_exposed_share.rows", rows)

    def add_extend(self, cost: StepCost, new_tokens: int, cached_tokens: int, total: int) -> None:
        """Widen by one request of an extend step that computes `total` tokens in all."""
        self._add("gemm.m", total)
        self._add("all_reduce.bytes", _message_bytes(cost, total))
        self._add("extend.keys", cached_tokens + (new_tokens + 1) / 2)
        self._add("extend.queries", max(new_tokens * cost.heads.q, 128 * cost.heads.kv))

    def _add(self, name: str, size: float) -> None:
        low, high = self.ranges.get(name, (size, size))
        self.ranges[name] = min(low, size), max(high, size)


def seen_of_steps(cost: StepCost, steps: Iterable[Mapping[str, object]]) -> SeenSizes:
    """The extremes of a run from its step records (`traces.records`), decode and extend alike.

    Args:
        cost: the cost model that the run used.
        steps: rows with kind, rows, padded_rows, prefill_tokens, private_tokens, segments_json and
            plan_json; a sample of a long run will do, as extremes last.
    """
    seen = SeenSizes()
    for step in steps:
        rows, new = int(str(step["rows"])), int(str(step["prefill_tokens"] or 0))
        if new:
            seen.add_extend(cost, max(1, new // max(rows, 1)), 0, new)
            continue
        segments = json.loads(str(step["segments_json"]))
        modes = json.loads(str(step["plan_json"]))["modes"]
        launch = json.loads(str(step["plan_json"]))["launch"]
        shape = StepShape(
            rows,
            int(str(step["padded_rows"])),
            int(str(step["private_tokens"])),
            0,
            tuple(tuple(segment) for segment in segments),  # type: ignore[misc]
            *cost.heads[:3],
        )
        plan = StepPlan(tuple(Mode(mode) for mode in modes))
        seen.add_decode(cost, shape, plan)
        seen.has_fused |= launch == "fused" and any(modes)
    return seen


def coverage_of(cost: StepCost, seen: SeenSizes) -> dict[str, Coverage]:
    """Each term that the run used, with how well measurements cover what was asked of it.

    `measured range`: fitted to rows of this GPU, and all sizes inside of them. `extrapolated`:
    sizes outside, or the fit of another GPU. `datasheet`: no row is behind the term, only a stated
    value or a published figure. Host time is left out: it is always stated.
    """
    private = "paged" if cost.is_stock else "private_memory_efficiency"
    used = ["gemm", private, "elementwise_memory_efficiency"]
    used += ["extend"] * ("extend.keys" in seen.ranges)
    used += ["all_reduce"] * (cost.tp > 1)
    shared = "shared_page_cost" if cost.is_stock else "private_reread_share"
    used += [shared] * (Mode.PAGED in seen.modes)
    used += ["dense"] * (Mode.DENSE in seen.modes)
    used += ["cascade_compute_efficiency"] * (Mode.CASCADE in seen.modes)
    used += ["fused_latency_ns", "fused_exposed_share"] * seen.has_fused
    if seen.modes - {Mode.PAGED} and not seen.has_fused:
        used.append("merge_latency_ns")
    items = dict(cost.params.terms.items())
    sizes = dict(seen.ranges)
    fixed = {
        "paged.group": cost.heads.q / cost.heads.kv,
        "extend.group": cost.heads.q / cost.heads.kv,
        "paged.head_dim": cost.heads.head_dim,
        "extend.head_dim": cost.heads.head_dim,
        "all_reduce.gpus": cost.tp,
    }
    sizes |= {name: (size, size) for name, size in fixed.items()}
    for gemm in (*cost.model.gemms(cost.tp), cost.model.lm_head(cost.tp)):
        for axis, size in (("gemm.n", gemm.n), ("gemm.k", gemm.k)):
            low, high = sizes.get(axis, (size, size))
            sizes[axis] = min(low, size), max(high, size)
    return {name: _coverage(cost, name, items[name], sizes) for name in used}


def worst_coverage(parts: Mapping[str, Coverage]) -> Coverage:
    """An answer is as sound as its least sound part."""
    return max(parts.values(), key=ORDER.index)


def _coverage(
    cost: StepCost,
    name: str,
    item: Parameter | FittedSurface,
    sizes: Mapping[str, tuple[float, float]],
) -> Coverage:
    if cost.params.derived_from is not None and item.held_out is None and item.valid_range:
        return "extrapolated"
    if item.provenance != "fitted":
        return "datasheet"
    for axis, (low, high) in item.valid_range.items():
        asked = sizes.get(f"{name}.{axis}")
        if asked and (asked[0] < low / _SLACK or asked[1] > high * _SLACK):
            return "extrapolated"
    return "measured range"


def _message_bytes(cost: StepCost, tokens: int) -> int:
    return tokens * cost.model.hidden * cost.model.dtype_bytes
