"""The table: medians, and ratios to baselines of the same model, seed and GPU."""

from typing import Any

import pytest

from granikv.validate.serve_table import failures, table, table_text


def row(variant: str, cell: str, rate: float, repeat: int = 0, **more: Any) -> dict[str, Any]:
    fixed = {"model": "m", "seed": 0, "gpu": "g", "run": "r1", "status": "complete"}
    return fixed | {
        "variant": variant,
        "cell": cell,
        "repeat": repeat,
        "tokens_per_s": rate,
        "step_ms": 1e3 / rate,
        **more,
    }


def test_ratios_are_of_medians():
    rows = [row("stock", "a", rate, n) for n, rate in enumerate((100.0, 90.0, 300.0))]
    rows += [row("granikv", "a", rate, n) for n, rate in enumerate((250.0, 240.0, 600.0))]
    rows += [row("granikv-fa3", "a", 200.0)]
    stock, ours, pair = table(rows)
    assert ours.ratios == {"stock": pytest.approx(2.5), "granikv-fa3": pytest.approx(1.25)}
    assert pair.ratios["stock"] == pytest.approx(2.0)
    assert stock.ratios["stock"] == 1.0
    assert (ours.repeats, ours.tokens_per_s) == (3, 250.0)
    assert ours.spread == pytest.approx(360 / 250)
    assert ours.step_ms == pytest.approx(1e3 / 250)


def test_another_gpu_model_or_seed_is_no_baseline():
    for other in ({"gpu": "h"}, {"model": "n"}, {"seed": 1}):
        (_, ours) = table([row("stock", "a", 100.0, **other), row("granikv", "a", 200.0)])
        assert ours.ratios == {"stock": None, "granikv-fa3": None}


def test_a_baseline_of_another_run_is_marked():
    rows = [row("stock", "a", 100.0, run="r0"), row("granikv", "a", 150.0)]
    assert "1.50*" in table_text(rows)
    assert "1.50*" not in table_text([row("stock", "a", 100.0), row("granikv", "a", 150.0)])


def test_settings_are_rows_of_their_own():
    rows = [row("stock", "a", 100.0)]
    for fraction, rate in ((0.1, 150.0), (0.2, 200.0)):
        given = {"settings": f'{{"hot_fraction": {fraction}}}'}
        rows += [row("granikv", "a", rate, **given), row("granikv-fa3", "a", rate / 2, **given)]
    rows.append(row("granikv", "a", 180.0, ttft_p50_ms=1234.5, tpot_p50_ms=9.87))
    _, first, _, second, _, plain = table(rows)
    assert (first.ratios["stock"], second.ratios["stock"]) == (1.5, 2.0)
    assert first.ratios["granikv-fa3"] == second.ratios["granikv-fa3"] == 2.0
    assert (plain.settings, plain.ratios["granikv-fa3"]) == ("{}", None)
    text = table_text(rows)
    assert '{"hot_fraction": 0.1}' in text
    assert "1,234.50" in text
    assert "9.87" in text


def test_doubts_are_shown():
    text = table_text([row("stock", "a", 100.0, is_steady=False, failed=3)])
    assert "not steady, 3 requests failed" in text


def test_failures_are_shown_until_they_are_mended():
    failed = row("stock", "a", 1.0, status="failed", error="no room")
    died = row("granikv", "", 1.0, status="died", error="exit code 9")
    assert failures([failed, died]) == [
        "stock: a #0 failed: no room",
        "granikv: the server died: exit code 9",
    ]
    assert failures([failed, row("stock", "a", 5.0)]) == []
    swept = failed | {"variant": "granikv", "settings": '{"dispatch": "cost"}'}
    assert failures([swept, row("granikv", "a", 5.0)]) == [
        'granikv {"dispatch": "cost"}: a #0 failed: no room'
    ]
    assert table_text([]) == "No results yet."
