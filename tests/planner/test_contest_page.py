"""The page of a contest: what it holds, what its figures show, that it needs nothing else."""

import re
from dataclasses import replace
from html import escape, unescape
from pathlib import Path

import pytest
from page_support import assert_needs_no_other_file, without_scripts

from granikv.planner.cells import PlanTask
from granikv.planner.contest import ORACLE, Contest, entries_of, oracle_options
from granikv.planner.contest_figures import fraction_figure, ranking_figure, rate_figure
from granikv.planner.contest_page import standings, write_page
from granikv.planner.policies import compare_policies
from granikv.planner.ranking import Ranking
from granikv.planner.ranking_words import sentences
from granikv.traces.transform import TransformOptions

DRIFT = Path(__file__).parents[2] / "docs/examples/drift.yaml"


@pytest.fixture(scope="module")
def ranked(make_task, tmp_path_factory) -> tuple[Contest, Ranking]:
    given: PlanTask = make_task()
    task = replace(
        given,
        trace=DRIFT,
        transform=TransformOptions(max_requests=250),
        server=given.server.model_copy(update={"size_tokens": 80_000, "hot_fraction": 0.1}),
    )
    entries = entries_of(0.1, (0.3,), ("watermark", "marginal"))
    contest = Contest(task, entries, 2, options=oracle_options(entries, 4.0, 6))
    out = tmp_path_factory.mktemp("contest")
    ranking = compare_policies(contest, out, lambda *_: None, lambda _: None, 1)
    assert ranking is not None
    return contest, ranking


@pytest.fixture(scope="module")
def page(ranked, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("page") / "policies.html"
    write_page(*ranked, path, {"KV capacity": "80,000 tokens, given <by hand>"})
    return path.read_text()


def test_page_needs_no_other_file(page):
    assert_needs_no_other_file(page)


def test_page_has_the_answer_the_table_and_every_section(ranked, page):
    contest, ranking = ranked
    for sentence in sentences(ranking, contest):
        assert escape(sentence) in page
    text = unescape(without_scripts(page))
    headers, rows = standings(ranking)
    for cell in (*headers, *rows, *(cell for cells in rows.values() for cell in cells)):
        assert cell in text
    assert re.findall(r"<h2>(.*?)</h2>", page) == [
        "Gain over the best fixed split",
        "HOT fraction over time",
        "Throughput over time",
        "Pools over time",
        "Assumptions",
    ]
    # Ranking, fractions, rates; pools of the best static split, two policies and the oracle.
    assert page.count("Plotly.newPlot(") == 7
    captions = re.findall(r"<figcaption>([^<]+)</figcaption>", page)
    assert set(captions) == {ranking.best_static.name, "watermark", "marginal", ORACLE}


def test_page_says_what_it_rests_on(page):
    text = unescape(without_scripts(page))
    for words in (
        "80,000 tokens, given <by hand>", "start at 0.1, look every 1 s", "windows of 4 s",
        "A better schedule may exist", "seed 0 is the nominal cost model", "Not modelled",
    ):  # fmt: skip
        assert words in text


def test_best_row_is_one_that_a_server_can_run(ranked, page):
    best = re.findall(r"<tr class=best><td>(.*?)<td>", page)
    assert len(best) == 1
    assert best[0] != ORACLE


def test_interrupted_before_the_oracle(ranked, tmp_path):
    contest, ranking = ranked
    left = tuple(s for s in ranking.standings if s.kind != "oracle")
    partial = replace(contest, is_partial=True)
    without = replace(ranking, standings=left)
    write_page(partial, without, tmp_path / "policies.html")
    text = without_scripts((tmp_path / "policies.html").read_text())
    assert "Interrupted" in text
    assert "of oracle" not in text
    assert "A better schedule may exist" not in text


# ---------------------------------------------------------------------- figures


def traces_of(figure) -> dict[str, object]:
    return {trace.name: trace for trace in figure.data}


def test_ranking_figure_has_every_gain_with_its_interval(ranked):
    _, ranking = ranked
    (dots,) = ranking_figure(ranking).data
    for standing in ranking.standings:
        place = list(dots.y).index(standing.name)
        gain = standing.over_static
        assert dots.x[place] == gain.mean
        assert dots.x[place] + dots.error_x.array[place] == pytest.approx(gain.high)
        assert dots.x[place] - dots.error_x.arrayminus[place] == pytest.approx(gain.low)
    assert dots.y[-1] == ranking.standings[0].name  # drawn from below: the best is on top


def test_fraction_figure_follows_the_boundary(ranked):
    contest, _ = ranked
    runs = {name: contest.of(name)[0] for name in ("static 0.3", "marginal")}
    lines = traces_of(fraction_figure(runs, 80_000))
    assert set(lines["static 0.3"].y) == {0.3}
    expected = [tokens / 80_000 for tokens in runs["marginal"].timeline["hot_tokens"]]
    assert list(lines["marginal"].y) == expected
    assert len(set(expected)) > 1
    assert all(line.line.shape == "hv" for line in lines.values())  # it jumps


def test_rate_figure_has_the_output(ranked):
    contest, _ = ranked
    run = contest.of("watermark")[0]
    line = traces_of(rate_figure({"watermark": run}))["watermark"]
    assert (list(line.x), list(line.y)) == (run.rate["time_s"], run.rate["tokens_per_s"])
    # Nearly all of the output: first tokens come from prefill steps.
    width_s = line.x[1] - line.x[0]
    assert sum(line.y) * width_s == pytest.approx(run.summary.output_tokens, rel=0.02)
