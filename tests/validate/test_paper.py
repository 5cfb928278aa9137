"""Published figures beside predictions: claims, ratios, rows of a small setting, files."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from granikv.validate.paper import answers as paper
from granikv.validate.paper.claims import CLAIMS, NOT_SIMULATED, Claim, in_unit
from granikv.validate.paper.outcomes import Outcome, Question, gain
from granikv.validate.paper.settings import LLAMA, MEANS, Cell, with_granikv

ROOT = Path(__file__).parents[2]
# The figures of the paper's public summary, by where they stand there.
GOLDEN = {
    "headline throughput": {2.16, 1.98, 1.57, 0.97, 1.0},
    "short prefixes": {0.70, 0.97},
    "storage layer alone": {1.05, 1.15, 15.6},
    "latency, Llama, B = 256, 8K": {109.0, 42.0, 0.9, 1.1},
    "prefix kernel, B = 256, 8K": {3.66, 1.24, 442.0, 83.0},
    "dispatch": {0.9, 1.0, 0.0, 0.13, 0.67, 0.97, 1.03, 512.0, 1024.0},
    "B sweep": {0.97, 0.99, 1.0},
    "k prefixes, Llama TP1, B = 256": {1.36, 1.38, 300.0, 0.87, 1.95, 0.99, 1.82},
}
SMALL = replace(with_granikv(Cell(LLAMA, "sglang", (8192,), 8, MEANS))[0], requests=60)


def outcome(tokens_per_s: float) -> Outcome:
    return Outcome(tokens_per_s, 0.1, 1.0, 8.0, 0.0, 0.0)


def test_claims_are_the_figures_of_the_summary():
    found: dict[str, set[float]] = {}
    for claim in CLAIMS:
        found.setdefault(claim.place, set()).update((claim.low, claim.high))
    assert found == GOLDEN


@pytest.mark.parametrize(
    "figure", ["11058", "3021", "20298", "16423", "< 1 us", "M_sat = 1024", "few hundred MB", "23K"]
)
def test_what_is_not_simulated_is_named(figure: str):
    assert any(figure in claim.text and claim.reason for claim in NOT_SIMULATED)


def test_ids_are_unique():
    ids = [claim.id for claim in (*CLAIMS, *NOT_SIMULATED)]
    assert len(set(ids)) == len(ids)


def test_every_claim_is_asked_in_order():
    asked = list(dict.fromkeys(question.claim for question in paper.questions()))
    assert asked == [claim.id for claim in CLAIMS]


def test_no_setting_of_a_claim_is_asked_twice():
    asked = [(question.claim, question.setting) for question in paper.questions()]
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize(
    ("low", "high", "prediction", "ratio"),
    [
        (2.0, 2.0, 1.0, 0.5),
        (2.0, 2.0, 3.0, 1.5),
        (1.0, 2.0, 1.7, 1.0),
        (1.0, 2.0, 0.5, 0.5),
        (1.0, 2.0, 3.0, 1.5),
        (0.0, 0.2, 0.0, 1.0),
        (0.0, 0.2, 0.1, 1.0),
        (0.0, 0.2, 0.3, 1.5),
    ],
)
def test_ratio_is_to_the_nearest_value_that_agrees(low, high, prediction, ratio):
    claim = Claim("id", "place", "text", low, high, "x")
    assert claim.ratio(prediction) == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        (Claim("", "", "", 2.16, 2.16, "x"), "2.16x"),
        (Claim("", "", "", 1.05, 1.15, "x"), "1.05 to 1.15x"),
        (Claim("", "", "", 0.0, 0.13, "share"), "at most 13 %"),
        (Claim("", "", "", 512.0, 1024.0, "rows"), "512 to 1,024 rows"),
        (Claim("", "", "", 42.0, 42.0, "ms"), "42.0 ms"),
    ],
)
def test_words_of_a_claim(claim: Claim, words: str):
    assert claim.words() == words


def test_rows_of_a_small_setting():
    """Half the batch gives less; the same cell twice gives exactly 1 and is simulated once."""
    half = replace(SMALL, max_rows=4)
    seen = []
    rows = paper.compare(
        [
            Question("headline.llama", "same", (SMALL, SMALL), gain),
            Question("headline.qwen14", "half", (half, SMALL), gain),
            Question("tpot.stock", "no cells", (), lambda outcomes: 1.0 + len(outcomes)),
        ],
        lambda done, total: seen.append((done, total)),
        jobs=1,
    )
    assert [row.setting for row in rows] == ["same", "half", "no cells"]
    assert rows[0].prediction == 1.0
    assert 1.0 < rows[1].prediction < 2.0
    assert rows[1].mean_rows[0] < rows[1].mean_rows[1] <= 8
    assert (rows[2].prediction, rows[2].mean_rows) == (1.0, ())
    assert seen == [(1, 2), (2, 2)]
    assert rows[0].words[2:6] == ("2.16x", "same", "1.00x", "0.46")
    assert [row.words[-1] for row in rows] == ["", "", "input"]


def _of(claim: str) -> Question:
    return next(question for question in paper.questions() if question.claim == claim)


def test_gain_rises_with_the_prefix_is_counted_within_models():
    """Pairs (stock, ours) for six prefixes of three models: one model falls once."""
    rising = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    falling = [1.0, 1.1, 1.2, 1.1, 1.4, 1.5]
    question = _of("headline.monotone")
    assert len(question.cells) == 2 * 3 * 6
    assert all(a.prefixes <= b.prefixes for a, b in pairwise(question.cells[:12]))
    outcomes = [
        outcome(value) for model in (rising, falling, rising) for g in model for value in (1.0, g)
    ]
    assert question.value(outcomes) == pytest.approx(14 / 15)


def test_values_of_several_outcomes():
    worst = _of("headline.short")
    pairs = [outcome(v) for v in (10.0, 20.0, 10.0, 9.0, 10.0, 11.0)]
    assert worst.value(pairs) == pytest.approx(0.9)
    loss = _of("several.many.loss")
    assert loss.value([outcome(1000.0), outcome(130.0)]) == pytest.approx(0.87)
    peak = _of("sweep.peak")
    assert [cell.max_rows for cell in peak.cells] == [64, 128, 256, 512, 1024, 256]
    rates = (500.0, 900.0, 950.0, 1000.0, 990.0, 950.0)
    assert peak.value([outcome(rate) for rate in rates]) == pytest.approx(0.95)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> paper.Answer:
    monkeypatch.setattr(paper, "CONFIGURATIONS", (LLAMA,))
    monkeypatch.setattr(paper, "GRID_PREFIXES", (512, 8192))
    monkeypatch.setattr(paper, "GRID_ROWS", (4, 32))
    step = Question("kernel.dense", "alone", (), lambda _: 221.0)
    grid = paper.predict_grid(lambda done, total: None, jobs=1)
    return paper.Answer(paper.compare([step], lambda done, total: None), grid)


def test_grid_gains_more_from_longer_prefixes_and_more_rows(answer: paper.Answer):
    short, long = answer.grid
    assert (short.prefix_tokens, long.prefix_tokens) == (512, 8192)
    assert long.gains[1] > short.gains[1]
    assert long.gains[1] > long.gains[0]


def test_written_files_hold_the_answer(answer: paper.Answer, tmp_path: Path):
    in_json, in_markdown = paper.write(answer, tmp_path)
    body = json.loads(in_json.read_text())
    assert body["rows"][0]["claim"]["id"] == "kernel.dense"
    assert body["rows"][0]["ratio"] == pytest.approx(0.5)
    assert [line["gains"] for line in body["grid"]] == [list(line.gains) for line in answer.grid]
    assert len(body["not_simulated"]) == len(NOT_SIMULATED)
    text = in_markdown.read_text()
    assert "| 442 us | alone | 221 us | 0.50 |  | input |" in text
    assert in_unit(answer.grid[1].gains[1], "x") in text
    assert "disputed" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} == {len(paper.HEADERS) + 1, 2 + 2 + 1}


@pytest.mark.parametrize("claim", [*CLAIMS, *NOT_SIMULATED], ids=lambda claim: claim.id)
def test_the_page_shows_every_claim(claim):
    assert claim.text in " ".join((ROOT / "docs/paper.md").read_text().split())
