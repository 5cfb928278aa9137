"""Coverage: what lies inside measured sizes, what does not, and what was never measured."""

from granikv.core.step import Launch, Mode, Segment, StepPlan, StepShape
from granikv.cost_models.coverage import (
    SeenSizes,
    coverage_of,
    seen_of_steps,
    worst_coverage,
)
from granikv.cost_models.models import load_model
from granikv.cost_models.params import load_params
from granikv.cost_models.step import StepCost

LLAMA = load_model("llama-3.1-8b")
H200 = StepCost(load_params("h200-sxm"), LLAMA)
STOCK = H200.in_engine(is_stock=True)


def _seen(cost: StepCost, plan: StepPlan, private: int = 256, length: int = 8192) -> SeenSizes:
    segments = (Segment(1, length, 64),) * len(plan.modes)
    shape = StepShape(64, 64, 64 * private, private, segments, *cost.heads[:3])
    seen = SeenSizes()
    seen.add_decode(cost, shape, plan)
    return seen


def test_common_sizes_of_a_measured_gpu_are_in_range() -> None:
    for cost, private, shared in (
        (STOCK, "paged", "shared_page_cost"),
        (H200, "private_memory_efficiency", "private_reread_share"),
    ):
        seen = _seen(cost, StepPlan((Mode.PAGED,)))
        seen.add_extend(cost, 4096, 8192, 4096)
        parts = coverage_of(cost, seen)
        assert parts == dict.fromkeys(parts, "measured range")
        assert {"gemm", private, "extend", shared} <= set(parts)
        assert len({"paged", "private_memory_efficiency"} & set(parts)) == 1
        assert "all_reduce" not in parts
        assert worst_coverage(parts) == "measured range"


def test_a_size_outside_is_extrapolated() -> None:
    parts = coverage_of(STOCK, _seen(STOCK, StepPlan(()), private=400_000))
    assert parts["paged"] == "extrapolated"
    assert parts["gemm"] == "measured range"
    assert worst_coverage(parts) == "extrapolated"


def test_the_worst_of_several_steps_counts() -> None:
    seen = _seen(H200, StepPlan((Mode.DENSE,)))
    assert coverage_of(H200, seen)["dense"] == "measured range"
    longer = StepShape(64, 64, 64 * 256, 256, (Segment(1, 120_000, 64),), *H200.heads[:3])
    seen.add_decode(H200, longer, StepPlan((Mode.DENSE,)))
    assert coverage_of(H200, seen)["dense"] == "extrapolated"


def test_assumed_kernels_make_the_answer_a_datasheet_one() -> None:
    a100 = StepCost(load_params("a100-sxm4-80gb"), LLAMA)
    for plan in (StepPlan((Mode.CASCADE,)), StepPlan((Mode.DENSE,), Launch.FUSED)):
        assert worst_coverage(coverage_of(a100, _seen(a100, plan))) == "datasheet"
        assert worst_coverage(coverage_of(H200, _seen(H200, plan))) == "measured range"
    two_call = coverage_of(H200, _seen(H200, StepPlan((Mode.DENSE,))))
    assert "fused_latency_ns" not in two_call
    assert two_call["merge_latency_ns"] == "measured range"


def test_anothers_fit_is_extrapolated_and_the_papers_figures_are_datasheet() -> None:
    h100 = StepCost(load_params("h100-sxm"), LLAMA)
    assert coverage_of(h100, _seen(h100, StepPlan(())))["gemm"] == "extrapolated"
    a100 = StepCost(load_params("a100-sxm4-80gb"), LLAMA)
    parts = coverage_of(a100, _seen(a100, StepPlan((Mode.DENSE,)), private=512))
    assert parts["dense"] == "datasheet"
    assert parts["private_memory_efficiency"] == "datasheet"
    stock = a100.in_engine(is_stock=True)
    parts = coverage_of(stock, _seen(stock, StepPlan((Mode.PAGED,)), private=512))
    assert parts["paged"] == "measured range"
    # No public column is as wide as Llama's output head.
    assert parts["gemm"] == "extrapolated"


def test_all_reduce_counts_under_tensor_parallelism() -> None:
    qwen = StepCost(load_params("h200-sxm"), load_model("qwen2.5-14b"), tp=2)
    assert coverage_of(qwen, _seen(qwen, StepPlan(())))["all_reduce"] == "measured range"


def test_run_records_give_the_same_answer() -> None:
    steps = [
        {
            "rows": 64,
            "padded_rows": 64,
            "prefill_tokens": 0,
            "private_tokens": 64 * 256,
            "segments_json": "[[1, 8192, 64]]",
            "plan_json": '{"modes": [2], "launch": "two_call", "row_split": []}',
        },
        {"rows": 2, "prefill_tokens": 8192, "segments_json": "[]", "plan_json": "{}"},
    ]
    seen = seen_of_steps(H200, steps)
    parts = coverage_of(H200, seen)
    assert parts["dense"] == "measured range"
    assert "extend" in parts
    assert not seen.has_fused
