"""fit_surface: known parameters come back, answers are monotone, shapes are held out whole."""

from functools import partial

import numpy as np
import pytest

from granikv.cost_models import ideal
from granikv.cost_models.fit.held_out import folds_of, predict_held_out, summarise
from granikv.cost_models.fit.surface_fit import (
    Grid,
    Samples,
    fit_surface,
    least_slopes,
    make_monotone,
)
from granikv.cost_models.fit.terms import octaves
from granikv.cost_models.ideal import Peaks

PEAKS = Peaks(hbm_bytes=4800.0, flops=989_000.0, nvlink_bytes=450.0)
GRID = Grid(
    ("m", "n", "k"), (octaves(0, 12, 2), octaves(8, 14, 2), octaves(8, 14, 2)), (0.01,) * 3, 3
)
IDEAL = partial(ideal.gemm_ns, PEAKS, 2500.0)
_RNG = np.random.default_rng(11)


def _samples(noise: float) -> Samples:
    """Products that lose efficiency over m, n and k, less than their work grows."""
    m, n, k = (2.0 ** _RNG.uniform(low, high, 4000) for low, high in ((0, 12), (8, 14), (8, 14)))
    efficiency = 0.9 * (1 - 0.4 * m / (m + 500)) * (1 - 0.3 * n / (n + 4000)) * k**-0.02
    time = IDEAL(m, n, k) / efficiency * np.exp(noise * _RNG.standard_normal(4000))
    shape = np.array(
        [f"{int(np.log2(a) * 3)}x{int(np.log2(b) * 3)}" for a, b in zip(n, k, strict=True)]
    )
    return Samples(np.column_stack([m, n, k]), time, shape, np.ones(4000))


def test_known_efficiencies_come_back() -> None:
    samples = _samples(0.02)
    surface = fit_surface(GRID, samples, IDEAL)
    predicted = IDEAL(*samples.sizes.T) / surface.efficiency(*samples.sizes.T)
    error = np.abs(predicted / samples.time_ns - 1)
    assert np.median(error) < 0.03
    assert np.quantile(error, 0.9) < 0.08


def test_outliers_do_not_move_the_fit() -> None:
    clean = _samples(0.01)
    spoilt = clean.time_ns.copy()
    spoilt[::20] *= 3.0
    samples = Samples(clean.sizes, spoilt, clean.shape, clean.weight)
    surface = fit_surface(GRID, samples, IDEAL)
    predicted = IDEAL(*clean.sizes.T) / surface.efficiency(*clean.sizes.T)
    assert np.median(np.abs(predicted / clean.time_ns - 1)) < 0.03


def test_more_work_is_never_faster_even_where_rows_say_so() -> None:
    samples = _samples(0.3)
    surface = fit_surface(GRID, samples, IDEAL)
    here = 2.0 ** _RNG.uniform([0, 8, 8], [12, 14, 14], (3000, 3))
    for axis in range(3):
        more = here.copy()
        more[:, axis] *= _RNG.uniform(1.0, 4.0, 3000)
        before, after = (IDEAL(*sizes.T) / surface.efficiency(*sizes.T) for sizes in (here, more))
        assert (after >= before * (1 - 1e-6)).all()
    assert (surface.log_efficiency <= 0).all()


def test_monotone_surfaces_are_left_alone() -> None:
    slopes = least_slopes(GRID, IDEAL)
    flat = np.full(GRID.shape, 0.4)
    assert np.allclose(make_monotone(flat, GRID.log2_knots, slopes), flat, atol=0.01)


def test_whole_shapes_are_held_out() -> None:
    samples = _samples(0.02)
    fold = folds_of(samples.shape)
    for name in np.unique(samples.shape):
        assert len(np.unique(fold[samples.shape == name])) == 1
    assert set(fold) == {0, 1, 2, 3, 4}
    assert (fold == folds_of(samples.shape)).all()


def test_held_out_predictions_have_not_seen_their_shape() -> None:
    samples = _samples(0.02)
    spoilt = samples.time_ns.copy()
    name = samples.shape[0]
    spoilt[samples.shape == name] *= 10.0
    before = predict_held_out(GRID, samples, IDEAL)
    after = predict_held_out(
        GRID, Samples(samples.sizes, spoilt, samples.shape, samples.weight), IDEAL
    )
    hidden = samples.shape == name
    assert np.allclose(before[hidden], after[hidden])
    assert not np.allclose(before[~hidden], after[~hidden], rtol=1e-12)


def test_intervals_hold_the_value_and_widen_with_unlike_shapes() -> None:
    measured = np.full(400, 100.0)
    shape = np.repeat([f"shape {i}" for i in range(20)], 20)
    even = measured * (1 + 0.05 * _RNG.standard_normal(400))
    by_shape = measured * np.repeat(1 + 0.05 * _RNG.standard_normal(20), 20)
    alike, unlike = (summarise(predicted, measured, shape) for predicted in (even, by_shape))
    for error in (alike, unlike):
        assert error.median_interval[0] <= error.median <= error.median_interval[1]
        assert (error.points, error.shapes) == (400, 20)
    width = [error.median_interval[1] - error.median_interval[0] for error in (alike, unlike)]
    assert width[1] > 2 * width[0]


def test_a_perfect_prediction_has_no_error() -> None:
    measured = np.linspace(1, 9, 40)
    error = summarise(measured, measured, np.repeat(["a", "b"], 20))
    assert error.median == pytest.approx(0)
    assert error.p90 == pytest.approx(0)
