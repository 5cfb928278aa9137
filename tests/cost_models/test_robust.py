"""bounded_fit: planted factors come back, whatever a few far points say, and stay in bounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from granikv.cost_models.fit.robust import bounded_fit


def _columns(seed: int, points: int = 400) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.uniform(0.5, 2.0, points) * 1e-4, rng.uniform(0.0, 1.0, points)


@given(st.floats(0, 9000), st.floats(0, 1), st.integers(0, 50))
def test_exact_sums_give_their_factors(first: float, second: float, seed: int) -> None:
    one, two = _columns(seed)
    found = bounded_fit((one, two), first * one + second * two, 0.05, (np.inf, 1.0))
    assert found[0] == pytest.approx(first, rel=1e-3, abs=1.0)
    assert found[1] == pytest.approx(second, rel=1e-3, abs=1e-4)


@given(st.integers(0, 50))
def test_a_tenth_of_far_points_moves_little(seed: int) -> None:
    one, two = _columns(seed)
    rng = np.random.default_rng(seed)
    target = 5000 * one + 0.3 * two + 0.01 * rng.standard_normal(len(one))
    target[rng.choice(len(one), len(one) // 10, replace=False)] += 20.0
    found = bounded_fit((one, two), target, 0.02, (np.inf, 1.0))
    assert found[0] == pytest.approx(5000, rel=0.1)
    assert found[1] == pytest.approx(0.3, abs=0.05)


def test_bounds_hold() -> None:
    one, two = _columns(1)
    low = bounded_fit((one, two), -5000 * one - two, 0.05, (np.inf, 1.0))
    high = bounded_fit((one, two), 5000 * one + 3 * two, 0.05, (np.inf, 1.0))
    assert low == pytest.approx([0.0, 0.0], abs=1e-9)
    assert high[1] == pytest.approx(1.0)


def test_weights_say_what_a_point_counts() -> None:
    ones = np.ones(30)
    target = np.array([1.0] * 20 + [1.01] * 10)
    plain = bounded_fit((ones,), target, 1.0, (np.inf,))
    weighted = bounded_fit((ones,), target, 1.0, (np.inf,), np.array([1.0] * 20 + [2.0] * 10))
    assert plain[0] == pytest.approx(1 + 0.01 / 3)
    assert weighted[0] == pytest.approx(1.005)
