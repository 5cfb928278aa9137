"""What rows have in common outside of a dense pass: COLD tokens, cascades, whole waves."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from granikv.core.step import Launch, Mode, Segment, StepPlan, StepShape
from granikv.cost_models import roofline
from granikv.cost_models.fit.fused import with_values
from granikv.cost_models.models import load_model
from granikv.cost_models.params import load_params
from granikv.cost_models.passes import RereadCost, ShareCost
from granikv.cost_models.step import StepCost

LLAMA = load_model("llama-3.1-8b")
OURS = StepCost(load_params("h200-sxm"), LLAMA)
STOCK = OURS.in_engine(is_stock=True)
PAGED = StepPlan((Mode.PAGED,))


def _shape(rows: int, private_tokens: int, *segments: Segment) -> StepShape:
    return StepShape(rows, rows, private_tokens, 0, segments, 32, 8, 128)


def _with(cost: StepCost, **values: float) -> StepCost:
    params = with_values(cost.params, values)
    return StepCost(params, LLAMA, cost.hardware, is_stock=cost.is_stock)


def test_memory_is_read_once_for_all_and_l2_once_for_each() -> None:
    cost = RereadCost(0.3)
    assert cost.of(1, 64, 1000) == 1.0
    assert cost.of(0.5, 64, 1000) == 1.0  # a part of a row split reads all of it
    assert cost.of(2, 64, 1000) == 0.5
    assert cost.of(4, 64, 1000) == 0.3
    assert cost.of(16, 16, 8) == cost.of(16, 256, 100_000) == 0.3


@given(st.floats(0, 1), st.floats(1, 512), st.floats(0, 64))
def test_more_readers_pay_less_each_and_no_less_together(
    share: float, sharers: float, more: float
) -> None:
    cost = RereadCost(share)
    here, there = cost.of(sharers, 512, 4096), cost.of(sharers + more, 512, 4096)
    assert share * (1 - 1e-9) <= there <= here * (1 + 1e-9)
    assert (sharers + more) * there >= sharers * here * (1 - 1e-9)


def test_a_cold_segment_is_read_in_the_private_pass_at_that_cost() -> None:
    """32 readers of 1,000 tokens at a share of a quarter are 8,000 private tokens: of 4,096 bytes,
    at half of 4.8 TB/s, in each of 32 layers.
    """
    values = {"private_reread_share": 0.25, "private_memory_efficiency": 0.5}
    cost = _with(OURS, **values, private_compute_efficiency=1.0)
    without = cost.step_ns(_shape(64, 32_000), StepPlan(()))
    shared = cost.step_ns(_shape(64, 32_000, Segment(0, 1000, 32)), PAGED)
    assert shared - without == pytest.approx(32 * 8000 * 4096 / 2400, abs=2)
    assert shared == cost.step_ns(_shape(64, 40_000), StepPlan(()))


def test_only_our_own_engine_reads_shared_tokens_so() -> None:
    assert isinstance(OURS.attention.share_cost, RereadCost)
    assert isinstance(STOCK.attention.share_cost, ShareCost)
    shape = _shape(64, 32_000, Segment(0, 8192, 64))
    dearer = {cost.is_stock: _with(cost, private_reread_share=0.9) for cost in (OURS, STOCK)}
    assert dearer[False].step_ns(shape, PAGED) > OURS.step_ns(shape, PAGED)
    assert dearer[True].step_ns(shape, PAGED) == STOCK.step_ns(shape, PAGED)


def test_a_cascade_by_hand() -> None:
    """64 rows of 32 heads are 2,048 queries, where the rates hold. 256 of them a kv head take
    4 * 128 * 8 * 1000 * 256 flops; 8 tiles of 32 read 1,000 tokens of 4 KiB again.
    """
    rates = replace(
        OURS.rates,
        cascade_flops_per_ns=1e5,
        contiguous_bytes_per_ns=4e3,
        reread_bytes_per_ns=5e3,
    )
    compute, memory = roofline.cascade_pass(rates, OURS.heads, 1000, 64)
    assert compute == pytest.approx(10_485.76)
    assert memory == pytest.approx(8 * 1000 * 4096 / 5e3)
    # Four times the queries in the batch fill the card better by 4 ** 0.22.
    fuller = roofline.cascade_pass(rates, OURS.heads, 1000, 64, batch_rows=256)
    assert fuller == pytest.approx((10_485.76 / 1.35660, 6553.6 / 1.35660), rel=1e-4)
    # 16 rows and fewer are alike: 512 queries, a quarter.
    few, fewer = (
        roofline.cascade_pass(rates, OURS.heads, 1000, 8, batch_rows=rows) for rows in (16, 8)
    )
    assert few == fewer == roofline.cascade_pass(rates, OURS.heads, 1000, 8)
    assert few[0] == pytest.approx(1310.72 * 1.35660, rel=1e-4)
    # The first read from memory is no faster for it.
    first = roofline.cascade_pass(rates, OURS.heads, 1000, 8, batch_rows=256)
    assert first[1] == pytest.approx(1000 * 4096 / 4e3)


def test_a_cascade_is_part_of_the_private_pass() -> None:
    for rows, length in ((8, 512), (64, 8192)):
        parts = roofline.cascade_pass(OURS.rates, OURS.heads, length, rows)
        assert OURS.attention.shared_pass(Mode.CASCADE, length, rows) == (0.0, max(parts))
        dense = max(OURS.attention.dense.ns(length, rows))
        assert OURS.attention.shared_pass(Mode.DENSE, length, rows) == (dense, 0.0)
    shape = _shape(64, 10**6, Segment(1, 8192, 64))
    plan = StepPlan((Mode.CASCADE,), Launch.FUSED)
    prefix_ns, private_ns = OURS.attention.fused_parts_ns(shape, plan)
    alone_ns = OURS.attention.fused_parts_ns(_shape(64, 10**6), StepPlan((), Launch.FUSED))[1]
    assert prefix_ns == 0.0
    assert private_ns - alone_ns == pytest.approx(OURS.attention.cascades_ns(shape, plan))
    # Nothing runs beside it that could hide: neither share of exposure matters.
    hidden, exposed = (_with(OURS, fused_exposed_share=share) for share in (0.0, 1.0))
    assert hidden.step_ns(shape, plan) == exposed.step_ns(shape, plan)


def _attention_ns(cost: StepCost, rows: int, *segments: Segment) -> float:
    """Of rows with 500 private tokens each."""
    plan = StepPlan((Mode.PAGED,) * len(segments))
    line = cost.decode(_shape(rows, rows * 500, *segments), plan)
    return line.ns(rows * 500) - line.host_ns - line.gemm_ns


def test_rows_behind_one_prefix_take_whole_waves_on_a_stock_engine() -> None:
    """132 SMs run 16.5 rows of 8 kv heads at once: 17 to 33 rows are two waves, 14 to 16 one."""

    def alike(rows: int) -> float:
        return _attention_ns(STOCK, rows, Segment(1, 8192, rows))

    assert alike(17) == pytest.approx(alike(33), abs=3)
    assert alike(25) == pytest.approx(alike(33), abs=3)
    assert alike(14) == pytest.approx(alike(16), abs=3)
    assert alike(17) > 1.3 * alike(16)
    # Below 0.8 of the SMs (13.2 rows) the kernel splits rows instead.
    assert alike(12) < alike(13) < 0.95 * alike(14)


def test_rows_that_are_not_alike_and_our_own_fill_the_gaps() -> None:
    def ours(rows: int) -> float:
        return _attention_ns(OURS, rows, Segment(1, 8192, rows))

    def several(rows: int) -> float:
        return _attention_ns(
            STOCK, rows, Segment(1, 8192, rows // 2), Segment(9001, 8192, rows // 2)
        )

    def most(rows: int) -> float:  # 0.88 of them
        return _attention_ns(STOCK, rows, Segment(1, 8192, int(0.88 * rows)))

    def none(rows: int) -> float:
        return _attention_ns(STOCK, rows)

    for kind in (ours, several, most, none):
        assert kind(18) < 0.95 * kind(26) < 0.9 * kind(33), kind


def test_another_row_never_takes_less_across_waves() -> None:
    steps = [
        STOCK.step_ns(_shape(rows, rows * 500, Segment(1, 8192, rows)), PAGED)
        for rows in range(2, 140)
    ]
    assert steps == sorted(steps)


def test_a_row_split_looks_at_its_own_part_of_the_readers() -> None:
    """Half of the rows read the prefix, in each half of the batch too, so that none are alike. 4 kv
    heads of a rank run 33 rows at once: 43 rows are 1.3 waves, all of one prefix would take two.
    """
    cost = StepCost(OURS.params, load_model("qwen2.5-14b"), tp=2, is_stock=True)
    assert cost.heads.kv == 4
    whole = cost.attention._whole_waves(43, (Segment(1, 8192, 86),), 0.5)
    assert whole == pytest.approx(66 / 43)
    assert cost.attention._whole_waves(43, (Segment(1, 8192, 43),), 0.5) == 1.0
