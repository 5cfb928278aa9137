"""What a stock engine takes beyond its kernels: recovered from made-up steps, and as shipped."""

import numpy as np
import polars as pl
import pytest

from granikv.cost_models.fit.fused import with_values
from granikv.cost_models.fit.host import fit_launch, fit_stock_row, step_of
from granikv.cost_models.fit.step_terms import with_shared_factor
from granikv.cost_models.hardware import load_hardware
from granikv.cost_models.models import load_model
from granikv.cost_models.params import GpuParams, load_params
from granikv.cost_models.readers.own import steps_path
from granikv.cost_models.rows import read_rows
from granikv.cost_models.step import StepCost

GPU = load_hardware("h200-sxm")
_ROWS = read_rows(steps_path("h200-sxm"))
STEPS = _ROWS.filter(pl.col("backend") == "sglang_fa3_decode")
ANSWERS = _ROWS.filter(pl.col("backend") == "sglang_fa3_extend")


def _without_stock_rows() -> GpuParams:
    return with_values(load_params("h200-sxm"), {"stock_row_ns": 0.0})


def _predicted_ns(params: GpuParams, row: dict[str, object]) -> int:
    cost = StepCost(params, load_model("llama-3.1-8b"), GPU, is_stock=True)
    return cost.step_ns(*step_of(row, GPU))


@pytest.mark.parametrize("row_ns", [0.0, 800.0, 12_345.0])
def test_a_known_time_per_row_is_recovered(row_ns: float) -> None:
    params = _without_stock_rows()
    made_up = [
        row | {"times_us": [(_predicted_ns(params, row) + row_ns * row["rows"]) / 1e3]}
        for row in STEPS.iter_rows(named=True)
    ]
    fit = fit_stock_row(pl.DataFrame(made_up, schema=STEPS.schema), params, GPU)
    assert fit.row_ns == pytest.approx(row_ns, abs=1e-6)
    assert fit.held_out[-1] < 1e-9


def test_steps_are_left_out_one_by_one() -> None:
    params = _without_stock_rows()
    fit = fit_stock_row(STEPS, params, GPU)
    errors = []
    for i, row in enumerate(STEPS.iter_rows(named=True)):
        others = STEPS.filter(pl.int_range(pl.len()) != i)
        predicted = (
            _predicted_ns(params, row) + fit_stock_row(others, params, GPU).row_ns * row["rows"]
        )
        measured = float(np.median(row["times_us"])) * 1e3
        errors.append(abs(predicted / measured - 1))
    np.testing.assert_allclose(fit.held_out, np.sort(errors), rtol=1e-6)


def test_shipped_parameters_predict_live_steps() -> None:
    """Goals of our own: median 3 %, worst 8 %; the live engine is an unmodified SGLang 0.5.17.

    Since the cost of shared pages follows recorded stock servers, one step misses the second: 128
    rows behind 8K tokens, 8.1 %.
    """
    params = load_params("h200-sxm")
    errors = [
        abs(_predicted_ns(params, row) / 1e3 / float(np.median(row["times_us"])) - 1)
        for row in STEPS.iter_rows(named=True)
    ]
    assert len(errors) == 17
    assert np.median(errors) < 0.03
    assert sorted(errors)[-2] < 0.08
    assert max(errors) < 0.082
    # Calibration moves what this fit has found at other values: the gap between steps, stated as
    # 20 us, and the cost of shared pages, where it was that of private ones (1) at most.
    factor = max(params.terms.shared_page_cost.efficiency)
    assert 0.9 < factor < 1
    before = with_values(_without_stock_rows(), {"host_decode_ns": 20_000.0})
    fitted = fit_stock_row(STEPS, with_shared_factor(before, 1 / factor), GPU).row_ns
    assert params.terms.stock_row_ns.value == pytest.approx(fitted, rel=1e-3)


@pytest.mark.parametrize(("round_trip_ms", "layer_us"), [(0.0, 40.0), (7.0, 300.0)])
def test_known_launch_and_round_trip_are_recovered(round_trip_ms: float, layer_us: float) -> None:
    params = load_params("h200-sxm")
    cost = StepCost(params, load_model("llama-3.1-8b"), GPU)
    made_up = []
    for row in ANSWERS.iter_rows(named=True):
        step = cost.extend([row["m"]], [row["private_tokens"] - row["m"]])
        waited_ns = max(step.total_ns - step.host_ns, 32 * layer_us * 1e3)
        made_up.append(row | {"times_us": [round_trip_ms * 1e3 + waited_ns / 1e3]})
    fit = fit_launch(pl.DataFrame(made_up, schema=ANSWERS.schema), params, GPU)
    assert fit.residual < 1e-3
    assert fit.round_trip_ns == pytest.approx(round_trip_ms * 1e6, abs=2e4)


def test_shipped_parameters_predict_live_answers() -> None:
    """Goal of our own: with one round trip for all, median 3 %."""
    # These answers come from an idle server, one at a time. The shipped share of its kernels' rates
    # that an extend step reaches is calibrated later, on a busy one; `granikv fit` had 1 here.
    params = with_values(load_params("h200-sxm"), {"extend_step_efficiency": 1.0})
    fit = fit_launch(ANSWERS, params, GPU)
    assert fit.residual < 0.03
    shipped = load_params("h200-sxm").terms.host_extend_layer_ns.value
    assert shipped == pytest.approx(fit.layer_ns, rel=0.05)
