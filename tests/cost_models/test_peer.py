"""The peer: its tables lose exactly the rows that are held out, and its absence is a sentence."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from granikv.cost_models import peer


def test_without_the_package_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["peer", "--out", str(tmp_path / "peer.json")])
    monkeypatch.setattr(peer.util, "find_spec", lambda _: None)
    peer.main()
    assert "pip install aiconfigurator-core==0.12.0" in capsys.readouterr().out
    assert not (tmp_path / "peer.json").exists()


def test_held_out_rows_leave_its_table() -> None:
    table = pl.DataFrame({"m": [1, 2, 1, 2], "n": [8, 8, 16, 16], "k": 4, "latency": 0.1})
    removed = pl.DataFrame(
        {"n": [8, 8], "k": [4, 4], "m": [1, 2], "time_us": [1.0, 1.0]},
        schema={"n": pl.Int32, "k": pl.Int32, "m": pl.Int32, "time_us": pl.Float32},
    )
    kept = peer._without(table, "h200-sxm", "gemm", removed)
    assert kept.select("n", "m").rows() == [(16, 1), (16, 2)]


def test_refusals_are_left_out_of_its_error() -> None:

    predicted, measured = np.array([1.0, np.nan, 3.0]), np.array([1.0, 1.0, 2.0])
    assert peer._errors(predicted, measured) == {"median": 0.25, "p90": 0.45}
    assert peer._errors(np.array([np.nan]), np.array([1.0])) is None
