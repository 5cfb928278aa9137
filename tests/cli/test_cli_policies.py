"""`--repartition` with a policy of one's own: the example of docs/policies.md runs as it stands."""

import json
from pathlib import Path

import pytest

SERVER = ("--model", "llama-3.1-8b", "--gpu", "h200-sxm")
EXAMPLE = Path(__file__).resolve().parents[2] / "docs/examples/half_idle.py"


def test_the_example_moves_the_boundary(granikv, tmp_path):
    shares = {}
    options = (*SERVER, "--size-tokens", 80_000, "--fp", 0.1)
    for name in ("static", f"{EXAMPLE}:HalfIdlePolicy"):
        folder = tmp_path / str(len(shares))
        load = EXAMPLE.parent / "drift.yaml"
        ended = granikv("simulate", load, *options, "--repartition", name, "--record", folder)
        assert ended.code == 0
        assert "800 sent, 800 finished" in ended.out
        assert json.loads((folder / "header.json").read_text())["flags"]["repartition"] == name
        shares[name] = json.loads((folder / "summary.json").read_text())["hot_share"]
    static, own = shares.values()
    assert own > static + 0.2


def test_the_page_shows_the_example_as_it_is():
    page = (EXAMPLE.parents[1] / "policies.md").read_text()
    assert EXAMPLE.read_text() in page
    assert (EXAMPLE.parent / "drift.yaml").read_text() in page


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_a_file_without_the_class(granikv, workload, tmp_path, command):
    out = ("--out", tmp_path / "out") if command == "plan" else ()
    ended = granikv(command, workload, *SERVER, "--repartition", f"{EXAMPLE}:Halfidle", *out)
    assert ended.code == 1
    assert ended.error.count("\n") == 1
    assert "half_idle.py has no class 'Halfidle'; define it" in ended.error
    assert not (tmp_path / "out").exists()
