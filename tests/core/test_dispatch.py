"""The dispatcher against every plan there is, its rules, and its promise of equal plans."""

import itertools
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from granikv.core.cost_table import CostTable, FloatArray
from granikv.core.dispatch import DISPATCH_CHOICES, READS_COLD, DispatchChoice, Dispatcher
from granikv.core.step import Launch, Mode, Segment, StepPlan, StepShape
from granikv.cost_models.dispatch_table import build_cost_table
from granikv.cost_models.models import load_model
from granikv.cost_models.params import load_params
from granikv.cost_models.step import StepCost

_SETUPS = (
    ("h200-sxm", "llama-3.1-8b", 1),
    ("a100-sxm4-80gb", "llama-3.1-8b", 1),
    ("h200-sxm", "qwen2.5-32b", 4),
)


@cache
def _cost(setup: int) -> StepCost:
    gpu, model, tp = _SETUPS[setup]
    return StepCost(load_params(gpu), load_model(model), tp=tp)


@cache
def _table(setup: int, *, fused: bool = True) -> CostTable:
    table = build_cost_table(_cost(setup))
    return table if fused else replace(table, fused_latency_ns=None)


@cache
def _table_exposing(setup: int, share: float) -> CostTable:
    return replace(_table(setup), fused_exposed_share=share)


@cache
def _dispatcher(setup: int, choice: DispatchChoice, *, fused: bool = True) -> Dispatcher:
    return Dispatcher(_table(setup, fused=fused), choice, "off")


def _shape(setup: int, rows: int, private_tokens: int, *segments: Segment) -> StepShape:
    heads = _cost(setup).heads
    return StepShape(
        rows, rows, private_tokens, private_tokens, segments, heads.q, heads.kv, heads.head_dim
    )


# ---------------------------------------------------------------------- the objective, again


def _bucket(value: int) -> int:
    """Cells are four to the octave."""
    return math.floor(4 * math.log2(value) + 1e-9) if value > 1 else 0


def _bucket_start(bucket: int) -> int:
    start = max(1, int(2 ** (bucket / 4)) - 2)
    while _bucket(start) < bucket:
        start += 1
    return start


class _Objective:
    """Predicted attention time of one layer, from the table alone, at the middles of the cells."""

    def __init__(self, table: CostTable, shape: StepShape) -> None:
        self.table = table
        self.rows = shape.rows
        bucket = _bucket(shape.private_tokens)
        tokens = math.sqrt(_bucket_start(bucket) * _bucket_start(bucket + 1))
        rate = float(np.interp(shape.rows, table.rows, table.private_ns_per_token))
        self.private_ns = tokens * rate
        # Of each segment in each mode: time of its own pass, and in the private pass.
        self.terms = [
            [
                (
                    self._part(table.prefix_ns[mode], segment),
                    self._part(table.private_ns[mode], segment),
                )
                for mode in Mode
            ]
            for segment in shape.segments
        ]

    def _part(self, grid: FloatArray, segment: Segment) -> float:
        length = 2 ** ((_bucket(segment.length) + 0.5) / 4)
        rows = 2 ** ((_bucket(segment.rows) + 0.5) / 4)
        by_length = [np.interp(rows, self.table.rows, line) for line in grid]
        at_length = float(np.interp(length, self.table.lengths, by_length))
        return at_length * max(1.0, length / float(self.table.lengths[-1]))

    def ns(self, modes: tuple[int, ...], launch: Launch) -> float:
        table, parts = self.table, [self.terms[i][mode] for i, mode in enumerate(modes)]
        prefix = sum(own for own, _ in parts)
        private = sum(paged for _, paged in parts) + self.private_ns
        if not any(modes):
            return table.private_latency_ns + private
        if launch == Launch.FUSED:
            assert table.fused_latency_ns is not None
            # Cascades share the private pass's launch; dense passes run beside it in their own.
            prefix += float(table.pass_latency_ns[Mode.DENSE]) * (Mode.DENSE in modes)
            exposed = table.fused_exposed_share * min(prefix, private)
            return table.fused_latency_ns + max(prefix, private) + exposed
        passes = sum(float(table.pass_latency_ns[mode]) for mode in (1, 2) if mode in modes)
        merge = float(np.interp(self.rows, table.rows, table.merge_ns))
        return table.private_latency_ns + prefix + private + passes + merge

    def of(self, plan: StepPlan) -> float:
        return self.ns(plan.modes, plan.launch)

    def best(self, shape: StepShape) -> float:
        """The least time over all modes of all segments (COLD ones are paged) and both launches."""
        fused = (Launch.FUSED,) if self.table.fused_latency_ns is not None else ()
        modes = [tuple(Mode) if s.base else (Mode.PAGED,) for s in shape.segments]
        return min(
            self.ns(chosen, launch)
            for chosen in itertools.product(*modes)
            for launch in (Launch.TWO_CALL, *fused)
        )


@st.composite
def _shapes(draw: st.DrawFn) -> tuple[int, bool, StepShape]:
    setup = draw(st.sampled_from(range(len(_SETUPS))))
    rows = draw(st.integers(2, 600))
    base, segments = 1, []
    for _ in range(draw(st.integers(1, 5))):
        length = int(2 ** draw(st.floats(5, 16)))
        readers = draw(st.integers(2, rows))
        segments.append(Segment(draw(st.sampled_from([base, base, base, 0])), length, readers))
        base += length
    private_tokens = int(2 ** draw(st.floats(0, 20)))
    return setup, draw(st.booleans()), _shape(setup, rows, private_tokens, *segments)


_LOPSIDED = _shape(0, 21, 13, Segment(1, 4931, 9), Segment(4932, 1105, 18))
_ALIKE = _shape(
    1,
    2,
    19900,
    Segment(0, 1942, 2),
    Segment(0, 8998, 2),
    Segment(10941, 15332, 2),
    Segment(26273, 53, 2),
    Segment(26326, 24325, 2),
)
_SMALL = _shape(1, 3, 6, Segment(1, 43, 2))
# Alone none of both segments is better anywhere else: both must change at once.
_PARTED = _shape(2, 2, 1, Segment(1, 16_384, 2), Segment(16_385, 65_536, 2))


@settings(max_examples=300)
@given(_shapes())
@example((0, False, _LOPSIDED))
@example((1, True, _ALIKE))
@example((1, True, _SMALL))
def test_cost_is_never_worse_than_a_fixed_choice(case: tuple[int, bool, StepShape]) -> None:
    setup, fused, shape = case
    objective = _Objective(_table(setup, fused=fused), shape)
    cost_ns = objective.of(_dispatcher(setup, "cost", fused=fused).plan(shape))
    for choice in ("paged", "cascade", "dense", "threshold"):
        fixed_ns = objective.of(_dispatcher(setup, choice, fused=fused).plan(shape))
        assert cost_ns <= fixed_ns * (1 + 1e-9)


@settings(max_examples=300)
@given(_shapes())
@example((0, False, _LOPSIDED))
@example((1, True, _ALIKE))
@example((1, True, _SMALL))
def test_cost_is_as_good_as_the_best_of_all_plans(case: tuple[int, bool, StepShape]) -> None:
    """Exactly: of so few segments every mix of a fused launch is tried too."""
    setup, fused, shape = case
    objective = _Objective(_table(setup, fused=fused), shape)
    plan = _dispatcher(setup, "cost", fused=fused).plan(shape)
    assert objective.of(plan) <= objective.best(shape) * (1 + 1e-9)


@settings(max_examples=200)
@given(_shapes(), st.sampled_from([0.0, 0.1, 0.4, 1.0]))
@example((1, True, _ALIKE), 0.4)
@example((2, True, _PARTED), 0.0)
def test_cost_is_as_good_whatever_a_launch_leaves_exposed(
    case: tuple[int, bool, StepShape], share: float
) -> None:
    """As the two tests above: no worse than a fixed choice, nor than any other plan."""
    setup, _, shape = case
    table = _table_exposing(setup, share)
    objective = _Objective(table, shape)
    cost_ns = objective.of(Dispatcher(table, "cost", "off").plan(shape))
    assert cost_ns <= objective.best(shape) * (1 + 1e-9)
    for choice in ("paged", "cascade", "dense", "threshold"):
        fixed_ns = objective.of(Dispatcher(table, choice, "off").plan(shape))
        assert cost_ns <= fixed_ns * (1 + 1e-9)


def test_a_share_that_stays_exposed_never_makes_two_calls_better() -> None:
    """Even if it hides nothing, a launch saves the private pass's own and the merge."""
    for share in (0.4, 1.0):
        dispatcher = Dispatcher(_table_exposing(0, share), "cost", "off")
        for rows, tokens in [(64, 60_000), (256, 250_000), (256, 4_000_000)]:
            shape = _shape(0, rows, tokens, Segment(1, 16_384, rows))
            assert dispatcher.plan(shape) == StepPlan((Mode.DENSE,), Launch.FUSED)


# ---------------------------------------------------------------------- rules


@pytest.mark.parametrize("setup", [0, 1])
def test_threshold_is_dense_from_m_sat_on(setup: int) -> None:
    table = _table(setup)
    saturated = -(-table.m_sat // table.group)
    for rows, mode in [(saturated - 1, Mode.CASCADE), (saturated, Mode.DENSE)]:
        shape = _shape(setup, 2 * saturated, 1000, Segment(1, 8192, rows))
        assert _dispatcher(setup, "threshold").plan(shape).modes == (mode,)


def test_threshold_looks_at_each_segment_alone() -> None:
    table = _table(1)
    many = table.m_sat // table.group
    segments = (Segment(1, 100, many), Segment(101, 30_000, 2), Segment(40_000, 5, many + 7))
    plan = _dispatcher(1, "threshold").plan(_shape(1, many + 9, 1000, *segments))
    assert plan.modes == (Mode.DENSE, Mode.CASCADE, Mode.DENSE)


@given(_shapes(), st.sampled_from(sorted(set(DISPATCH_CHOICES) - READS_COLD)))
def test_cold_segments_stay_paged(
    case: tuple[int, bool, StepShape], choice: DispatchChoice
) -> None:
    setup, fused, shape = case
    plan = _dispatcher(setup, choice, fused=fused).plan(shape)
    assert len(plan.modes) == len(shape.segments)
    for segment, mode in zip(shape.segments, plan.modes, strict=True):
        assert segment.base > 0 or mode == Mode.PAGED


@given(_shapes())
def test_fixed_choices_use_their_mode_for_every_hot_segment(
    case: tuple[int, bool, StepShape],
) -> None:
    setup, fused, shape = case
    for choice, mode in [("cascade", Mode.CASCADE), ("dense", Mode.DENSE), ("paged", Mode.PAGED)]:
        plan = _dispatcher(setup, choice, fused=fused).plan(shape)
        assert all(
            m == (mode if s.base else Mode.PAGED)
            for s, m in zip(shape.segments, plan.modes, strict=True)
        )


@given(_shapes())
def test_a_rule_takes_the_faster_launch(case: tuple[int, bool, StepShape]) -> None:
    setup, fused, shape = case
    objective = _Objective(_table(setup, fused=fused), shape)
    for choice in ("cascade", "dense", "threshold"):
        plan = _dispatcher(setup, choice, fused=fused).plan(shape)
        if not fused or not any(plan.modes):
            assert plan.launch == Launch.TWO_CALL
            continue
        other = min(objective.ns(plan.modes, launch) for launch in Launch)
        assert objective.of(plan) == pytest.approx(other, rel=1e-9)


def test_cascade_global_reads_what_all_rows_share() -> None:
    """COLD or not: batch-global engines read scattered pages."""
    segments = (Segment(1, 500, 8), Segment(501, 300, 5), Segment(0, 200, 8))
    plan = _dispatcher(0, "cascade_global").plan(_shape(0, 8, 100, *segments))
    assert plan.modes == (Mode.CASCADE, Mode.PAGED, Mode.CASCADE)


def test_no_segments_no_modes() -> None:
    for choice in DISPATCH_CHOICES:
        assert _dispatcher(0, choice).plan(_shape(0, 4, 100)) == StepPlan(())


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="choice must be one of cost, threshold"):
        Dispatcher(_table(0), "dens")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- row split


@settings(max_examples=200)
@given(_shapes())
def test_a_row_split_needs_collectives_and_a_gain(case: tuple[int, bool, StepShape]) -> None:
    """Both halves read the weights and the segments again; that must cost less than it hides.

    A segment's pass over half of its rows, twice, is charged for what it takes beyond the whole.
    """
    setup, fused, shape = case
    table = _table(setup, fused=fused)
    plan = Dispatcher(table, "cost", "auto").plan(shape)
    unsplit = Dispatcher(table, "cost", "off").plan(shape)
    assert (plan.modes, plan.launch) == (unsplit.modes, unsplit.launch)
    assert unsplit.row_split == ()
    if not plan.row_split:
        return
    burst, follow = plan.row_split
    assert table.collective_ns.max() > 0
    assert burst >= follow >= 1
    assert burst + follow == shape.rows

    def at(values: FloatArray, rows: int) -> float:
        return float(np.interp(rows, table.rows, values))

    compute = at(table.gemm_ns, burst) + at(table.gemm_ns, follow)
    collective = at(table.collective_ns, burst) + at(table.collective_ns, follow)
    whole = at(table.gemm_ns, shape.rows) + at(table.collective_ns, shape.rows)
    assert max(compute, collective) < whole
    halves = replace(
        shape, segments=tuple(s._replace(rows=max(1, s.rows // 2)) for s in shape.segments)
    )
    whole_terms, half_terms = (_Objective(table, of).terms for of in (shape, halves))
    rereads = sum(
        max(0.0, 2 * sum(half_terms[i][mode]) - sum(whole_terms[i][mode]))
        for i, mode in enumerate(plan.modes)
        if mode != Mode.PAGED
    )
    assert max(compute + table.num_layers * rereads, collective) < whole * (1 + 1e-9)


def test_row_splits_appear_under_tensor_parallelism() -> None:
    """A case where they pay, so that the test above cannot pass by never splitting."""
    always = Dispatcher(_table(2), "cost", "always")
    split = always.plan(_shape(2, 256, 1000)).row_split
    assert sum(split) == 256
    assert len(split) == 2
    assert always.plan(_shape(2, 1, 1000)).row_split == ()
    alone = Dispatcher(_table(0), "cost", "always").plan(_shape(0, 256, 1000))
    assert alone.row_split == ()


# ---------------------------------------------------------------------- equal plans


@settings(max_examples=150)
@given(_shapes(), st.sampled_from(DISPATCH_CHOICES), st.integers(0, 1 << 30))
def test_private_tokens_limit_is_exact(
    case: tuple[int, bool, StepShape], choice: DispatchChoice, pick: int
) -> None:
    """Up to the limit a dispatcher that has seen nothing plans the same and names that limit."""
    setup, fused, shape = case
    table = _table(setup, fused=fused)
    limit = _dispatcher(setup, choice, fused=fused).private_tokens_limit(shape.private_tokens)
    assert limit > shape.private_tokens
    between = shape.private_tokens + pick % (limit - shape.private_tokens)
    later = replace(shape, private_tokens=between, max_private_tokens=between)
    fresh = Dispatcher(table, choice, "off")
    assert fresh.plan(later) == _dispatcher(setup, choice, fused=fused).plan(shape)
    assert fresh.private_tokens_limit(between) == limit
    assert fresh.private_tokens_limit(limit) > limit


@pytest.mark.parametrize("start", [0, 1, 2, 3, 15, 16, 1000])
def test_limits_cover_every_count(start: int) -> None:
    """The limits cut the counts into intervals without gaps."""
    dispatcher = _dispatcher(0, "cost")
    limit = dispatcher.private_tokens_limit(start)
    for tokens in range(start, start + 300):
        if tokens == limit:
            limit = dispatcher.private_tokens_limit(tokens)
        assert dispatcher.private_tokens_limit(tokens) == limit


def test_one_plan_object_while_nothing_changes() -> None:
    dispatcher = Dispatcher(_table(0), "cost")
    shape = _shape(0, 64, 10_000, Segment(1, 8192, 64))
    plan = dispatcher.plan(shape)
    assert dispatcher.plan(replace(shape, private_tokens=10_001)) is plan
    other = dispatcher.plan(replace(shape, segments=(Segment(1, 64, 2),)))
    assert dispatcher.plan(shape) == plan
    assert other != plan


@settings(max_examples=30)
@given(st.lists(_shapes(), min_size=2, max_size=6))
def test_plans_do_not_depend_on_what_was_planned_before(
    cases: list[tuple[int, bool, StepShape]],
) -> None:
    shapes = [shape for setup, _, shape in cases if setup == cases[0][0]]
    used = Dispatcher(_table(cases[0][0]), "cost")
    for shape in [*shapes, *reversed(shapes)]:
        assert used.plan(shape) == Dispatcher(_table(cases[0][0]), "cost").plan(shape)


def test_many_segments_are_planned_like_few() -> None:
    """64 segments, more than the memo and the descent take: still no worse than fixed choices."""
    rng = np.random.default_rng(3)
    segments, base = [], 1
    for _ in range(64):
        length = int(2 ** rng.uniform(6, 13))
        segments.append(Segment(base, length, int(rng.integers(2, 64))))
        base += length
    shape = _shape(0, 128, 20_000, *segments)
    objective = _Objective(_table(0), shape)
    cost_ns = objective.of(_dispatcher(0, "cost").plan(shape))
    for choice in ("paged", "cascade", "dense", "threshold"):
        assert cost_ns <= objective.of(_dispatcher(0, choice).plan(shape))
