"""StepCost: stepping equals jumping, launches compose as stated, and misuse is refused."""

import math

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from granikv.core.errors import ConfigError
from granikv.core.step import Launch, Mode, Segment, StepPlan, StepShape
from granikv.cost_models import roofline
from granikv.cost_models.decode_line import DecodeLine
from granikv.cost_models.hardware import load_hardware
from granikv.cost_models.ideal import Peaks
from granikv.cost_models.models import load_model
from granikv.cost_models.params import load_params
from granikv.cost_models.passes import AllReduceTime, PagedTime
from granikv.cost_models.readers.own import own_path, read_own
from granikv.cost_models.step import StepCost

LLAMA = load_model("llama-3.1-8b")
H200 = StepCost(load_params("h200-sxm"), LLAMA)
A100 = StepCost(load_params("a100-sxm4-40gb"), LLAMA)
QWEN_TP2 = StepCost(load_params("h200-sxm"), load_model("qwen2.5-14b"), tp=2)
QWEN_TP4 = StepCost(load_params("a100-sxm4-80gb"), load_model("qwen2.5-32b"), tp=4)
STOCK = H200.in_engine(is_stock=True)
STOCK_A100 = A100.in_engine(is_stock=True)
STOCK_TP4 = QWEN_TP4.in_engine(is_stock=True)
COSTS = [H200, A100, QWEN_TP2, QWEN_TP4, STOCK, STOCK_A100, STOCK_TP4]
ENGINES = pytest.mark.parametrize("cost", [H200, STOCK], ids=["granikv", "stock"])


def _shape(
    cost: StepCost, rows: int, private_tokens: int, segments: tuple[Segment, ...] = ()
) -> StepShape:
    return StepShape(rows, rows, private_tokens, private_tokens // rows, segments, *cost.heads[:3])


@st.composite
def _steps(draw: st.DrawFn) -> tuple[StepCost, StepShape, StepPlan]:
    cost = draw(st.sampled_from(COSTS))
    rows = draw(st.integers(2, 512))
    segments, modes = [], []
    for base in draw(st.lists(st.sampled_from([0, 1, 70_000]), max_size=4)):
        segments.append(Segment(base, draw(st.integers(1, 40_000)), draw(st.integers(2, rows))))
        modes.append(draw(st.sampled_from(list(Mode)[: 3 if base else 2])))
    split: tuple[int, ...] = ()
    if cost.tp > 1 and draw(st.booleans()):
        first = draw(st.integers(1, rows - 1))
        split = (first, rows - first)
    plan = StepPlan(tuple(modes), draw(st.sampled_from(list(Launch))), split)
    private_tokens = draw(st.integers(rows, rows * 20_000))
    return cost, _shape(cost, rows, private_tokens, tuple(segments)), plan


def _later(shape: StepShape, step: int) -> StepShape:
    return StepShape(
        shape.rows,
        shape.padded_rows,
        shape.private_tokens + shape.rows * step,
        shape.max_private_tokens + step,
        shape.segments,
        shape.num_q_heads,
        shape.num_kv_heads,
        shape.head_dim,
    )


@settings(max_examples=150, deadline=None)
@given(_steps(), st.integers(1, 60))
def test_k_single_steps_equal_one_segment(
    step: tuple[StepCost, StepShape, StepPlan], k: int
) -> None:
    cost, shape, plan = step
    jumped = cost.segment(shape, plan, k)
    assert jumped.dtype == np.int64
    elapsed = 0
    for i in range(k):
        elapsed += cost.step_ns(_later(shape, i), plan)
        assert jumped[i] == elapsed


@settings(max_examples=150, deadline=None)
@given(_steps(), st.integers(0, 5_000_000))
def test_python_and_numpy_floats_agree(
    step: tuple[StepCost, StepShape, StepPlan], private_tokens: int
) -> None:
    cost, shape, plan = step
    line = cost.decode(shape, plan)
    as_numpy = DecodeLine(
        np.float64(line.host_ns),
        np.float64(line.gemm_ns),
        np.float64(line.collective_ns),
        tuple((start, np.float64(a), np.float64(b)) for start, a, b in line.attention),
    )
    assert line.ns(private_tokens) == as_numpy.ns(private_tokens)
    assert line.ns(private_tokens) == line.cumulative(private_tokens, 1, 1)[0]
    assert type(line.ns(private_tokens)) is int


@settings(max_examples=150, deadline=None)
@given(_steps(), st.integers(1, 10_000))
def test_a_step_never_gets_cheaper_with_more_work(
    step: tuple[StepCost, StepShape, StepPlan], more: int
) -> None:
    cost, shape, plan = step
    here = cost.step_ns(shape, plan)
    assert here > 0
    line = cost.decode(shape, plan)
    assert line.ns(shape.private_tokens + more) >= here
    longer = tuple(segment._replace(length=segment.length + more) for segment in shape.segments)
    assert cost.step_ns(_shape(cost, shape.rows, shape.private_tokens, longer), plan) >= here
    padded = StepShape(
        shape.rows, shape.rows + more, shape.private_tokens, 1, shape.segments, *cost.heads[:3]
    )
    assert cost.step_ns(padded, plan) >= here


@settings(max_examples=150, deadline=None)
@given(_steps())
def test_two_calls_cost_at_least_the_fused_work(
    step: tuple[StepCost, StepShape, StepPlan],
) -> None:
    """Without latencies, overlap can only help: max of sums is at most the sum of maxima."""
    cost, shape, plan = step
    fused = cost.decode(shape, StepPlan(plan.modes, Launch.FUSED))
    two_call = cost.decode(shape, StepPlan(plan.modes, Launch.TWO_CALL))
    layers = cost.model.layers
    saved = layers * (cost.rates.fused_latency_ns - cost.attention.pass_latency_ns(Mode.PAGED))
    assert fused.ns(shape.private_tokens) <= two_call.ns(shape.private_tokens) + max(0, saved) + 1


def test_no_cache_changes_an_answer() -> None:
    segments = (Segment(1, 8192, 64), Segment(0, 512, 8))
    shape = _shape(H200, 64, 20_000, segments)
    plans = [
        StepPlan(modes, launch)
        for modes in ((Mode.PAGED, Mode.PAGED), (Mode.DENSE, Mode.CASCADE))
        for launch in Launch
    ]
    fresh = [StepCost(load_params("h200-sxm"), LLAMA).step_ns(shape, plan) for plan in plans]
    assert [H200.step_ns(shape, plan) for plan in plans for _ in range(2)] == [
        value for value in fresh for _ in range(2)
    ]
    assert H200.decode(shape, plans[0]) is H200.decode(shape, plans[0])


def test_old_lines_are_dropped_and_computed_again() -> None:
    cost = StepCost(load_params("h200-sxm"), LLAMA)
    plan = StepPlan((Mode.DENSE,))
    shapes = [_shape(cost, 64, 64, (Segment(1, length, 64),)) for length in range(1, 5000)]
    first = [cost.step_ns(shape, plan) for shape in shapes]
    assert len(cost._lines) < len(shapes)
    assert [cost.step_ns(shape, plan) for shape in shapes] == first


def _with(cost: StepCost, **values: float) -> StepCost:
    """The same engine with other values of some terms."""
    terms = cost.params.terms
    items = {
        name: getattr(terms, name).model_copy(update={"value": value})
        for name, value in values.items()
    }
    params = cost.params.model_copy(update={"terms": terms.model_copy(update=items)})
    return StepCost(params, cost.model, cost.hardware, cost.tp, is_stock=cost.is_stock)


def _private_ns(cost: StepCost, rows: int, tokens: float) -> float:
    """One layer's pass over `tokens` tokens of all rows together: FA3's or GraniKV's."""
    rates, heads = cost.rates, cost.heads
    if isinstance(cost.attention.paged, PagedTime):
        knots = cost.params.terms.paged.axes["tokens"]
        return float(np.interp(tokens / rows, knots, cost.attention.paged.knots_ns(rows)[0]))
    read_ns = 2 * heads.kv * heads.head_dim * 2 / rates.private_bytes_per_ns
    token_ns = max(read_ns, roofline.private_compute_ns_per_token(rates, heads))
    return rates.private_latency_ns + rows * rates.private_row_ns + tokens * token_ns


def test_engines_differ_in_their_decode_attention_and_what_a_row_adds() -> None:
    assert H200.in_engine(is_stock=False) is H200
    assert STOCK.in_engine(is_stock=True) is STOCK
    assert STOCK_TP4.is_stock
    assert (STOCK_TP4.tp, STOCK_TP4.model, STOCK_TP4.hardware) == (
        4,
        QWEN_TP4.model,
        QWEN_TP4.hardware,
    )
    assert (STOCK_TP4.params, STOCK_TP4.heads) == (QWEN_TP4.params, QWEN_TP4.heads)
    back = STOCK.in_engine(is_stock=False)
    terms = H200.params.terms
    for rows in (1, 256):
        shape = _shape(H200, rows, rows * 900)
        own, stock = H200.decode(shape, StepPlan(())), STOCK.decode(shape, StepPlan(()))
        assert back.decode(shape, StepPlan(())) == own
        assert (own.gemm_ns, own.collective_ns) == (
            stock.gemm_ns,
            stock.collective_ns,
        )
        assert own.host_ns == terms.host_decode_ns.value
        assert stock.host_ns == terms.host_decode_ns.value + rows * terms.stock_row_ns.value
    assert terms.stock_row_ns.value > 0


def test_a_private_pass_reads_at_its_rate_or_computes_at_its() -> None:
    """4 KiB a token of Llama; 4 flops for each of 128 elements, of tiles of 64 rows for each of its
    8 heads of keys and values.
    """
    shape = _shape(H200, 64, 64 * 1000)
    for memory, compute, token_ns in (
        (0.5, 1.0, 4096 / (0.5 * 4800)),
        (1.0, 0.01, 4 * 8 * 64 * 128 / (0.01 * 989_000)),
    ):
        cost = _with(
            H200,
            private_memory_efficiency=memory,
            private_compute_efficiency=compute,
            private_latency_ns=5000.0,
            private_row_ns=30.0,
        )
        line = cost.decode(shape, StepPlan(()))
        attention = line.ns(64_000) - line.host_ns - line.gemm_ns
        expected = 32 * (5000 + 64 * 30 + 64_000 * token_ns)
        assert attention == pytest.approx(expected, rel=1e-3)


@ENGINES
def test_a_step_of_shared_pages_is_one_paged_call(cost: StepCost) -> None:
    """All segments PAGED: one call over what is left to read, whatever the launch."""
    segments = (Segment(1, 8192, 256), Segment(0, 700, 32))
    shape = _shape(cost, 256, 65_536, segments)
    reads = 65_536 + sum(
        rows * length * cost.attention.share_cost.of(rows, 256, length)
        for _, length, rows in segments
    )
    expected = cost.host_ns(256) + cost.products.decode_ns(256) + 32 * _private_ns(cost, 256, reads)
    for launch in Launch:
        got = cost.step_ns(shape, StepPlan((Mode.PAGED, Mode.PAGED), launch))
        assert got == pytest.approx(expected, abs=2)


@ENGINES
def test_shared_pages_take_at_least_as_long_as_one_row_alone(cost: StepCost) -> None:
    shape = _shape(cost, 2, 2, (Segment(1, 32_768, 2),))
    step = cost.decode(shape, StepPlan((Mode.PAGED,)))
    attention = step.ns(2) - step.host_ns - step.gemm_ns
    assert attention >= 32 * _private_ns(cost, 1, 32_768) - 1


@ENGINES
def test_two_call_adds_passes_and_a_merge(cost: StepCost) -> None:
    rates, heads = cost.rates, cost.heads
    segments = (Segment(1, 8192, 128), Segment(20_000, 4096, 128), Segment(40_000, 512, 8))
    shape = _shape(cost, 256, 65_536, segments)
    dense = sum(max(cost.attention.dense.ns(length, 128)) for length in (8192, 4096))
    cascade = roofline.cascade_pass(rates, heads, 512, 8, batch_rows=256)
    layer = (
        _private_ns(cost, 256, 65_536)
        + (dense + cost.attention.pass_latency_ns(Mode.DENSE))
        + (max(cascade) + rates.cascade_latency_ns)
        + roofline.merge_ns(rates, heads, 256)
    )
    plan = StepPlan((Mode.DENSE, Mode.DENSE, Mode.CASCADE))
    expected = cost.host_ns(256) + cost.products.decode_ns(256) + 32 * layer
    assert cost.step_ns(shape, plan) == pytest.approx(expected, abs=2)


@pytest.mark.parametrize("mode", [Mode.CASCADE, Mode.DENSE])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("private", [20_000, 65_536, 300_000, 3_000_000])
def test_fused_overlaps_passes_but_for_a_share(share: float, private: int, mode: Mode) -> None:
    """The longer of dense and private passes and a share of the shorter one, after one launch; a
    dense pass is a launch of its own, whatever it runs beside, and cascades ride in the private
    pass: with no dense one there is nothing to overlap.
    """
    cost = _with(H200, fused_exposed_share=share)
    rates, heads = cost.rates, cost.heads
    segments = (Segment(1, 16_384, 256), Segment(20_000, 3000, 64), Segment(0, 700, 32))
    shape = _shape(cost, 256, private, segments)
    dense, cascades = 0.0, max(roofline.cascade_pass(rates, heads, 3000, 64, batch_rows=256))
    if mode is Mode.DENSE:
        dense = max(cost.attention.dense.ns(16_384, 256)) + cost.attention.dense.latency_ns
    else:
        cascades += max(roofline.cascade_pass(rates, heads, 16_384, 256))
    reads = 32 * 700 * cost.attention.share_cost.of(32, 256, 700)
    own = _private_ns(cost, 256, private + reads) - _private_ns(cost, 1, 0) + cascades
    layer = rates.fused_latency_ns + max(dense, own) + share * min(dense, own)
    expected = cost.host_ns(256) + cost.products.decode_ns(256) + 32 * layer
    plan = StepPlan((mode, Mode.CASCADE, Mode.PAGED), Launch.FUSED)
    assert cost.step_ns(shape, plan) == pytest.approx(expected, abs=2)
    prefix_ns, private_ns = cost.attention.fused_parts_ns(shape, plan)
    assert prefix_ns == pytest.approx(32 * dense)
    assert private_ns == pytest.approx(32 * own)
    assert cost.attention.cascades_ns(shape, plan) == pytest.approx(32 * cascades)


def test_paper_tpot_at_the_headline_cell() -> None:
    """A100 40 GB, B = 256, L_p = 8K: 109 ms default, 42 ms dense; the paper's claims, not ours."""
    shape = _shape(A100, 256, 256 * 256, (Segment(1, 8192, 256),))
    paged_ms = STOCK_A100.step_ns(shape, StepPlan((Mode.PAGED,))) / 1e6
    dense_ms = A100.step_ns(shape, StepPlan((Mode.DENSE,))) / 1e6
    assert paged_ms == pytest.approx(109, rel=0.15)
    assert dense_ms == pytest.approx(42, rel=0.18)


def test_two_call_plans_meet_rows_that_no_fit_has_used() -> None:
    """FA3's prefix pass, suffix pass and merge in a row, measured as one: 24 outside rows."""
    own = read_own([own_path("h200-sxm")]).filter(pl.col("backend") == "fa3_prefix_suffix_merge")
    qwen = StepCost(load_params("h200-sxm"), load_model("qwen2.5-32b"), tp=4, is_stock=True)
    costs = {8: STOCK, 2: qwen}
    errors = []
    for row in own.iter_rows(named=True):
        cost = costs[row["num_kv_heads"]]
        shape = _shape(
            cost,
            row["rows"],
            row["private_tokens"],
            (Segment(1, row["length"], row["rows"]),),
        )
        line = cost.decode(shape, StepPlan((Mode.DENSE,)))
        attention = line.ns(row["private_tokens"]) - line.host_ns - line.gemm_ns
        layer_us = (attention - line.collective_ns) / cost.model.layers / 1e3
        errors.append(abs(layer_us / row["time_us"] - 1))
    assert len(errors) == 24
    assert np.median(errors) < 0.07
    assert max(errors) < 0.13


def test_one_request_on_h200_reads_the_weights_once() -> None:
    step_s = H200.step_ns(_shape(H200, 1, 128), StepPlan(())) / 1e9
    floor_s = (LLAMA.weights_bytes(1) - LLAMA.vocab * LLAMA.hidden * 2) / 4.8e12
    assert floor_s < step_s < 2 * floor_s


def test_tensor_parallel_step_has_two_all_reduces_a_layer() -> None:
    line = QWEN_TP2.decode(_shape(QWEN_TP2, 64, 6400), StepPlan(()))
    peaks = Peaks.of(QWEN_TP2.hardware)
    one = AllReduceTime(QWEN_TP2.params.terms.all_reduce, peaks, 2).ns(64 * 5120 * 2)
    assert line.collective_ns == pytest.approx(96 * one)
    assert H200.decode(_shape(H200, 64, 6400), StepPlan(())).collective_ns == 0


@pytest.mark.parametrize("cost", [QWEN_TP4, STOCK_TP4], ids=["granikv", "stock"])
def test_row_split_follows_its_formula(cost: StepCost) -> None:
    layers = 64
    shape = _shape(cost, 256, 25_600)
    line = cost.decode(shape, StepPlan((), row_split=(192, 64)))
    attention = [layers * _private_ns(cost, rows, 100 * rows) for rows in (192, 64)]
    compute = cost.products.decode_ns(192) + cost.products.decode_ns(64) + sum(attention)
    collectives = cost.products.collective_ns(192) + cost.products.collective_ns(64)
    first_layer = (cost.products.decode_ns(192) + attention[0]) / layers
    last_collective = cost.products.collective_ns(64) / (2 * layers)
    expected = cost.host_ns(256) + max(compute, collectives) + first_layer + last_collective
    assert line.ns(25_600) == pytest.approx(expected, abs=2)


def test_row_split_loses_when_weights_dominate_and_wins_on_slow_links() -> None:
    def split_over_whole(cost: StepCost, rows: int) -> float:
        shape = _shape(cost, rows, 100 * rows)
        split = cost.step_ns(shape, StepPlan((), row_split=(rows // 2, rows // 2)))
        return split / cost.step_ns(shape, StepPlan(()))

    params = QWEN_TP4.params
    fitted = params.terms.all_reduce
    slower = tuple(value * 0.1 for value in fitted.efficiency)
    slow = fitted.model_copy(update={"efficiency": slower})
    terms = params.terms.model_copy(update={"all_reduce": slow})
    slow_links = StepCost(params.model_copy(update={"terms": terms}), QWEN_TP4.model, tp=4)
    assert split_over_whole(QWEN_TP4, 32) > 1.5
    assert split_over_whole(slow_links, 512) < 0.8


def test_extend_parts_sum_and_chunks_read_their_prefix() -> None:
    cost = H200.extend([512, 100], [4096, 0])
    parts = cost.host_ns + cost.gemm_ns + cost.attention_ns + cost.collective_ns
    assert cost.total_ns == math.floor(parts)
    assert H200.extend([512, 100], [30_000, 0]).total_ns > cost.total_ns
    assert H200.extend([512, 100], [30_000, 0]).gemm_ns == cost.gemm_ns


def test_a_whole_extend_step_reaches_a_share_of_its_kernels_rates() -> None:
    whole = _with(QWEN_TP2, extend_step_efficiency=1.0).extend([4096, 100], [4096, 0])
    half = _with(QWEN_TP2, extend_step_efficiency=0.5).extend([4096, 100], [4096, 0])
    assert half.gemm_ns == pytest.approx(2 * whole.gemm_ns)
    assert half.attention_ns == pytest.approx(2 * whole.attention_ns)
    assert (half.collective_ns, half.host_ns) == (whole.collective_ns, whole.host_ns)


def test_long_extend_is_compute_bound_and_short_one_waits_for_the_host() -> None:
    flops = 2 * 8192 * (LLAMA.weights_bytes(1) / 2 - 2 * LLAMA.vocab * LLAMA.hidden)
    long = H200.extend([8192], [0])
    assert flops / 989e12 < long.total_ns / 1e9 < 2 * flops / 989e12
    assert long.host_ns == H200.rates.host_extend_ns
    cost = StepCost(load_params("h200-sxm"), load_model("qwen2.5-14b"), tp=8)
    floor_ns = 48 * cost.rates.host_extend_layer_ns + cost.rates.host_extend_ns
    assert cost.extend([1], [0]).total_ns >= math.floor(floor_ns)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 30_000)), min_size=1, max_size=4))
def test_extend_never_gets_cheaper_with_more_tokens(requests: list[tuple[int, int]]) -> None:
    extend_lens, prefix_lens = map(list, zip(*requests, strict=True))
    here = QWEN_TP2.extend(extend_lens, prefix_lens).total_ns
    for i in range(len(requests)):
        more = [length + 64 * (j == i) for j, length in enumerate(extend_lens)]
        deeper = [length + 64 * (j == i) for j, length in enumerate(prefix_lens)]
        # One of unlike requests that grows changes what the others amount to: exact but for that.
        assert QWEN_TP2.extend(more, prefix_lens).total_ns >= here * (1 - 1e-4)
        assert QWEN_TP2.extend(extend_lens, deeper).total_ns >= here * (1 - 1e-4)
    assert QWEN_TP2.extend([*extend_lens, 1], [*prefix_lens, 0]).total_ns >= here


def test_promoting_16k_tokens_takes_about_a_millisecond() -> None:
    assert H200.copy_ns(16_384) / 1e6 == pytest.approx(1.0, rel=0.35)
    assert H200.copy_ns(0) == 0
    assert QWEN_TP2.copy_ns(1000) < H200.copy_ns(1000)


def test_other_hardware_can_be_given() -> None:
    cost = StepCost(load_params("h200-sxm"), LLAMA, load_hardware("h100-sxm"))
    ratio = cost.rates.gather_bytes_per_ns / H200.rates.gather_bytes_per_ns
    assert ratio == pytest.approx(3.35 / 4.8)


@pytest.mark.parametrize(
    ("segments", "plan", "message"),
    [
        ((), StepPlan((Mode.DENSE,)), "one mode per segment, got 1 for 0"),
        ((Segment(0, 64, 2),), StepPlan((Mode.DENSE,)), "contiguous segment, got base 0"),
        ((), StepPlan((), row_split=(2, 2)), "row_split must be two parts of 4 rows"),
    ],
)
def test_plans_that_do_not_fit_are_refused(
    segments: tuple[Segment, ...], plan: StepPlan, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        H200.decode(_shape(H200, 4, 400, segments), plan)


@pytest.mark.parametrize("split", [(4,), (1, 2), (1, 1, 2)])
def test_row_splits_that_do_not_cover_the_rows_are_refused(split: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="row_split must be two parts"):
        QWEN_TP2.decode(_shape(QWEN_TP2, 4, 400), StepPlan((), row_split=split))


def test_another_ranks_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="this rank's heads"):
        QWEN_TP2.decode(_shape(H200, 4, 400), StepPlan(()))


@pytest.mark.parametrize(
    ("extend_lens", "prefix_lens"), [([], []), ([1], []), ([0], [5]), ([1], [-1])]
)
def test_extend_misuse_is_refused(extend_lens: list[int], prefix_lens: list[int]) -> None:
    with pytest.raises(ValueError, match=r"must be|positive"):
        H200.extend(extend_lens, prefix_lens)
    with pytest.raises(ValueError, match="tokens must not be negative"):
        H200.copy_ns(-1)


def test_unknown_tp_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tp must be 1, 2, 4 or 8, got 3"):
        StepCost(load_params("h200-sxm"), LLAMA, tp=3)
