"""Host time per row, fitted to live steps: recovered from made-up steps, and as shipped."""

import numpy as np
import polars as pl
import pytest

from granikv.cost_models.fit.host import fit_host, step_of
from granikv.cost_models.hardware import load_hardware
from granikv.cost_models.models import load_model
from granikv.cost_models.params import GpuParams, load_params
from granikv.cost_models.readers.own import steps_path
from granikv.cost_models.rows import read_rows
from granikv.cost_models.step import StepCost

GPU = load_hardware("h200-sxm")
STEPS = read_rows(steps_path("h200-sxm"))


def _without_host_rows() -> GpuParams:
    params = load_params("h200-sxm")
    zero = params.terms.host_decode_row_ns.model_copy(update={"value": 0.0})
    terms = params.terms.model_copy(update={"host_decode_row_ns": zero})
    return params.model_copy(update={"terms": terms})


def _predicted_ns(params: GpuParams, row: dict[str, object]) -> int:
    return StepCost(params, load_model("llama-3.1-8b"), GPU).step_ns(*step_of(row, GPU))


@pytest.mark.parametrize("row_ns", [0.0, 800.0, 12_345.0])
def test_a_known_time_per_row_is_recovered(row_ns: float) -> None:
    params = _without_host_rows()
    made_up = [
        row | {"times_us": [(_predicted_ns(params, row) + row_ns * row["rows"]) / 1e3]}
        for row in STEPS.iter_rows(named=True)
    ]
    fit = fit_host(pl.DataFrame(made_up, schema=STEPS.schema), params, GPU)
    assert fit.row_ns == pytest.approx(row_ns, abs=1e-6)
    assert fit.held_out[-1] < 1e-9


def test_steps_are_left_out_one_by_one() -> None:
    params = _without_host_rows()
    fit = fit_host(STEPS, params, GPU)
    errors = []
    for i, row in enumerate(STEPS.iter_rows(named=True)):
        others = STEPS.filter(pl.int_range(pl.len()) != i)
        predicted = _predicted_ns(params, row) + fit_host(others, params, GPU).row_ns * row["rows"]
        measured = float(np.median(row["times_us"])) * 1e3
        errors.append(abs(predicted / measured - 1))
    np.testing.assert_allclose(fit.held_out, np.sort(errors), rtol=1e-6)


def test_shipped_parameters_predict_live_steps() -> None:
    """Goals of our own: median 3 %, worst 8 %; the live engine is an unmodified SGLang 0.5.17."""
    params = load_params("h200-sxm")
    errors = [
        abs(_predicted_ns(params, row) / 1e3 / float(np.median(row["times_us"])) - 1)
        for row in STEPS.iter_rows(named=True)
    ]
    assert len(errors) == 17
    assert np.median(errors) < 0.03
    assert max(errors) < 0.08
