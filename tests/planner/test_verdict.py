"""The verdict on results whose scores are given: gains, intervals, flat region, kinds, words."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from granikv.planner.cells import Cell
from granikv.planner.gain import CONFIDENCE
from granikv.planner.plan import write_plan
from granikv.planner.search import Findings
from granikv.planner.verdict import judge
from granikv.planner.words import recommend

FRACTIONS = (0.1, 0.2, 0.4)


@pytest.fixture(scope="module")
def make_findings(planned):
    """Findings whose mean end-to-end latencies are given per system or fraction, one per seed."""
    template = planned[0].of("granikv", 0.1)[0]

    def make(latencies: dict[object, list[float]], **changes: float) -> Findings:
        findings = Findings(planned[0].task, FRACTIONS, len(latencies["sglang"]))
        for key, values in latencies.items():
            for seed, latency_s in enumerate(values):
                system = key if isinstance(key, str) else "granikv"
                cell = Cell(system, None if isinstance(key, str) else key, 1, seed)
                summary = template.summary
                e2e = replace(summary.e2e_s, mean=latency_s)
                summary = replace(summary, e2e_s=e2e, offered_s=100.0)
                waits = {"early_ttft_s": 0.1, "late_ttft_s": 0.1} | changes
                findings.results[cell] = replace(template, cell=cell, summary=summary, **waits)
        return findings

    return make


def test_gain_is_the_paired_geometric_mean(make_findings):
    findings = make_findings(
        {
            "sglang": [4.0, 8.0],
            "cascade": [4.0, 8.0],
            0.1: [4.0, 8.0],
            0.2: [2.0, 2.0],
            0.4: [4.0, 8.0],
        }
    )
    verdict = judge(findings)
    assert verdict.objective == "latency"
    assert verdict.best.fraction == 0.2
    assert verdict.gain.mean == pytest.approx(math.sqrt(2.0 * 4.0))
    assert verdict.over_cascade.mean == pytest.approx(math.sqrt(8.0))


def test_interval_is_for_one_more_draw(make_findings):
    ratios = np.log([2.0, 2.2, 2.5])
    stock = [5.0, 6.0, 7.0]
    mine = [s / math.exp(r) for s, r in zip(stock, ratios, strict=True)]
    findings = make_findings({"sglang": stock, "cascade": stock, 0.1: mine, 0.2: stock, 0.4: stock})
    gain = judge(findings).points[0].gain
    low, high = stats.t.interval(
        CONFIDENCE, 2, ratios.mean(), ratios.std(ddof=1) * math.sqrt(1 + 1 / 3)
    )
    assert (gain.low, gain.high) == pytest.approx((math.exp(low), math.exp(high)))


def test_errors_common_to_both_sides_cancel(make_findings):
    stock = [1.0, 10.0, 100.0]
    half = [value / 2 for value in stock]
    findings = make_findings({"sglang": stock, "cascade": stock, 0.1: half, 0.2: stock, 0.4: stock})
    gain = judge(findings).gain
    assert (gain.low, gain.mean, gain.high) == pytest.approx((2.0, 2.0, 2.0))


def test_smallest_of_equal_fractions(make_findings):
    findings = make_findings(
        {"sglang": [2.0], "cascade": [2.0], 0.1: [1.001], 0.2: [1.0], 0.4: [1.0]}
    )
    verdict = judge(findings)
    assert verdict.fraction == 0.1
    assert verdict.over_reference.mean == pytest.approx(1.0 / 1.001)


def test_flat_region_ends_where_a_fraction_is_worse_in_every_seed(make_findings):
    stock = [2.0, 2.0, 2.0]
    findings = make_findings(
        {
            "sglang": stock,
            "cascade": stock,
            0.1: [1.5, 1.5, 1.5],
            0.2: [1.0, 1.0, 1.0],
            0.4: [0.98, 1.03, 1.02],
        }
    )
    assert judge(findings).flat == (0.2, 0.4)


def test_no_benefit_within_the_noise(make_findings):
    stock = [2.0, 2.0, 2.0]
    noisy = [1.8, 2.1, 1.9]
    findings = make_findings(
        {"sglang": stock, "cascade": stock, 0.1: noisy, 0.2: stock, 0.4: stock}
    )
    verdict = judge(findings)
    assert (verdict.kind, verdict.helps, verdict.fraction) == ("no_benefit", False, None)
    sentences = recommend(verdict, findings)
    assert sentences[0].startswith("No benefit here, because ")
    assert "Keep the stock engine" in sentences[0]


def test_use_names_fraction_gain_and_comparisons(make_findings):
    findings = make_findings(
        {"sglang": [2.0], "cascade": [1.5], 0.1: [1.0], 0.2: [1.2], 0.4: [1.4]}
    )
    verdict = judge(findings)
    assert verdict.kind == "use"
    first = recommend(verdict, findings)[0]
    assert "--hot-fraction 0.1 (40,000 of 400,000 KV tokens are HOT)" in first
    assert "2.00x the stock engine" in first
    assert "1.20x fraction 0.2" in first
    assert "1.50x batch-global cascade" in first


def test_overload_is_said_first(make_findings):
    latencies = {"sglang": [2.0], "cascade": [2.0], 0.1: [1.0], 0.2: [1.0], 0.4: [1.0]}
    findings = make_findings(latencies, early_ttft_s=1.0, late_ttft_s=50.0)
    findings.needed_replicas.update({"granikv": 3, "sglang": 5})
    verdict = judge(findings)
    assert verdict.kind == "overloaded"
    assert verdict.objective == "throughput"
    first = recommend(verdict, findings)[0]
    assert "needs 3 replicas" in first
    assert "the stock engine 5" in first


def test_incomplete_nominal_seed_has_no_verdict(make_findings):
    findings = make_findings({"sglang": [2.0], "cascade": [2.0], 0.1: [1.0], 0.2: [1.0]})
    with pytest.raises(ValueError, match="nominal seed"):
        judge(findings)


def test_plan_file_holds_question_answer_and_cells(planned, tmp_path):
    findings, verdict = planned
    write_plan(findings, verdict, tmp_path / "plan.json")
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["format"] == "granikv-plan-1"
    assert (plan["model"], plan["gpu"], plan["tp"]) == ("llama-3.1-8b", "h200-sxm", 1)
    assert len(plan["cells"]) == len(findings.results) == 15
    assert plan["verdict"]["recommendation"] == list(verdict.sentences)
    covered = plan["cost_model_coverage"]
    assert covered["gemm"] in ("measured range", "extrapolated")
    assert covered["fused_latency_ns"] in ("measured range", "extrapolated")
