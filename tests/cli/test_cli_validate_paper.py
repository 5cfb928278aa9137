"""`granikv validate paper`: tables on the screen, files, a folder that cannot be made."""

import json

import pytest

from granikv.validate.paper import answers as paper
from granikv.validate.paper.outcomes import Question, gain
from granikv.validate.paper.settings import LLAMA, Cell


@pytest.fixture
def small(monkeypatch):
    """Two claims and four cells instead of all."""
    cell = Cell(LLAMA, "sglang", (512,), 4, None)
    asked = [
        Question("headline.llama", "twice the same", (cell, cell), gain),
        Question("kernel.dense", "made up", (), lambda _: 884.0),
    ]
    monkeypatch.setattr(paper, "questions", lambda: asked)
    monkeypatch.setattr(paper, "CONFIGURATIONS", (LLAMA,))
    monkeypatch.setattr(paper, "GRID_PREFIXES", (512,))
    monkeypatch.setattr(paper, "GRID_ROWS", (4, 8, 16, 32))


def test_screen_and_files(granikv, small, tmp_path):
    folder = tmp_path / "new" / "paper"
    ended = granikv("validate", "paper", "--jobs", 1, "--out", folder)
    assert (ended.code, ended.error) == (0, "")
    for words in ("disputed", "2.16x", "1.00x", "0.46", "442 us", "884 us", "2.00", "input"):
        assert words in ended.out, words
    assert "not simulated, because" in ended.out
    assert "KV capacity of llama-3.1-8b TP1: 147,148 tokens" in ended.out
    body = json.loads((folder / "paper.json").read_text())
    assert [row["ratio"] for row in body["rows"]] == pytest.approx([1 / 2.16, 2.0])
    assert "twice the same" in (folder / "paper.md").read_text()


def test_without_out_nothing_is_written(granikv, small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = granikv("validate", "paper", "--jobs", 1)
    assert ended.code == 0
    assert "Written" not in ended.out
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_ends_it_before_any_work(granikv, tmp_path, monkeypatch):
    monkeypatch.setattr(paper, "questions", lambda: pytest.fail("it simulated"))
    path = tmp_path / "file"
    path.write_text("kept")
    ended = granikv("validate", "paper", "--out", path)
    assert ended.code == 1
    assert str(path) in ended.error
    assert path.read_text() == "kept"
