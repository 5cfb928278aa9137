"""The page: what it holds, that it needs nothing else, that text cannot break it."""

import re
from dataclasses import replace
from html import escape, unescape
from pathlib import Path

import numpy as np
import pytest
from page_support import assert_needs_no_other_file, without_scripts

from granikv.planner.objective import score
from granikv.planner.page import comparison, write_page
from granikv.planner.provenance import provenance_line
from granikv.planner.search import Findings
from granikv.sim.metrics import Slo


@pytest.fixture(scope="module")
def page(planned, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    write_page(*planned, path, {"KV capacity": "400,000 tokens, given <by hand>"})
    return path.read_text()


def test_page_has_the_recommendation(planned, page):
    _, verdict = planned
    assert verdict.sentences
    for sentence in verdict.sentences:
        assert escape(sentence) in page


def test_page_needs_no_other_file(page):
    assert_needs_no_other_file(page)
    assert page.count("Plotly.newPlot(") == 9


def test_page_has_every_section(page):
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles == [
        "Gain over the stock engine",
        "Speed over the pool fraction",
        "Pool occupancy over time",
        "Latency distributions",
        "Where GPU time goes",
        "Assumptions",
    ]


def test_page_has_the_whole_table(planned, page):
    headers, rows = comparison(*planned)
    text = unescape(without_scripts(page))
    for cell in (*headers, *rows, *(cell for cells in rows.values() for cell in cells)):
        assert cell in text


def test_page_states_its_assumptions(planned, page):
    findings, _ = planned
    text = unescape(without_scripts(page))
    for words in (
        "400,000 tokens, given <by hand>", provenance_line(findings), findings.task.params.note,
        "Not modelled", "seed 0 is the nominal cost model", findings.task.model.source,
    ):  # fmt: skip
        assert words in text


def test_page_lists_every_parameter_with_its_source(planned, page):
    text = unescape(without_scripts(page))
    for name, parameter in planned[0].task.params.terms.items():
        assert name in text
        assert parameter.source in text


def test_text_is_escaped(planned, tmp_path):
    findings, verdict = planned
    task = replace(findings.task, trace=Path("<b>&x.jsonl"))
    odd = replace(verdict, sentences=("1 < 2 & <script>alert(1)</script>",))
    named = Findings(task, findings.fractions, findings.seeds, 1, findings.results)
    write_page(named, odd, tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert "<b>&x" not in text
    assert "<script>alert" not in text
    assert "1 &lt; 2 &amp; &lt;script&gt;alert(1)" in text


def test_partial_plan_is_marked(planned, page, tmp_path):
    findings, verdict = planned
    partial = Findings(findings.task, findings.fractions, 3, 1, findings.results, is_partial=True)
    write_page(partial, verdict, tmp_path / "plan.html")
    assert "Interrupted" in (tmp_path / "plan.html").read_text()
    assert "Interrupted" not in without_scripts(page)


def test_page_of_one_fraction_and_no_benefit(planned, tmp_path):
    findings, verdict = planned
    point = verdict.points[0]
    alone = replace(
        verdict, kind="no_benefit", helps=False, best=point, points=(point,), flat=(0.02, 0.02)
    )
    one = Findings(findings.task, (0.02,), findings.seeds, 1, findings.results)
    write_page(one, alone, tmp_path / "plan.html")
    text = without_scripts((tmp_path / "plan.html").read_text())
    assert "<b>none</b>HOT pool fraction" in text
    assert "best tried, over the stock engine" in text
    assert re.search(r"<tr class=best><td>stock engine", text)


# ---------------------------------------------------------------------- comparison


def test_rows_are_systems_then_fractions(planned):
    _, rows = comparison(*planned)
    assert list(rows) == ["stock engine", "cascade", "0.02", "0.1", "0.2"]


def test_gain_of_cascade_is_the_paired_mean(planned):
    findings, verdict = planned
    ratios = [
        np.log(score(cascade.summary, verdict.objective) / score(stock.summary, verdict.objective))
        for cascade, stock in zip(findings.of("cascade"), findings.of("sglang"), strict=True)
    ]
    _, rows = comparison(findings, verdict)
    assert rows["cascade"][0] == f"{np.exp(np.mean(ratios)):.2f}x"


def test_figures_are_those_of_the_nominal_runs(planned):
    findings, verdict = planned
    headers, rows = comparison(findings, verdict)
    summary = findings.of("granikv", 0.1)[0].summary
    cells = dict(zip(headers, ("0.1", *rows["0.1"]), strict=True))
    assert cells["tokens/s"] == f"{summary.throughput_tokens_per_s:,.0f}"
    assert cells["TPOT ms, p50 / p95"].split(" / ")[1] == f"{summary.tpot_s.p95 * 1e3:.1f}"
    assert cells["HOT share"] == f"{summary.hot_share:.1%}"


def test_goodput_is_shown_under_an_slo_only(planned):
    findings, verdict = planned
    assert "goodput, req/s" not in comparison(findings, verdict)[0]
    task = replace(findings.task, slo=Slo(ttft_s=1.0))
    under_slo = Findings(task, findings.fractions, 3, 1, findings.results)
    headers, rows = comparison(under_slo, verdict)
    assert "goodput, req/s" in headers
    assert all(len(cells) == len(headers) - 1 for cells in rows.values())


def test_rows_without_a_nominal_run_are_left_out(planned):
    findings, _ = planned
    some = {c: r for c, r in findings.results.items() if c.system == "sglang" or c.seed == 1}
    partial = Findings(findings.task, findings.fractions, 3, 1, some, is_partial=True)
    headers, rows = comparison(partial, None)
    assert list(rows) == ["stock engine"]
    assert rows["stock engine"][0] == ""
    assert len(rows["stock engine"]) == len(headers) - 1
