"""Surfaces: multilinear in logarithms, bounded by their knots, alike in every form."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from granikv.cost_models.surface import Sheet, Surface

_RNG = np.random.default_rng(3)
KNOTS = (np.array([0.0, 2.0, 3.0]), np.array([5.0, 6.0]), np.array([1.0, 4.0, 8.0, 9.0]))
SURFACE = Surface(KNOTS, -_RNG.random((3, 2, 4)))
sizes = st.floats(0.25, 4096)


def test_knots_give_their_values() -> None:
    mesh = np.meshgrid(*(2.0**knots for knots in KNOTS), indexing="ij")
    assert np.allclose(SURFACE.efficiency(*mesh), np.exp(SURFACE.log_efficiency))


def test_halfway_between_knots_is_the_geometric_mean() -> None:
    low, high = np.exp(SURFACE.log_efficiency[:2, 0, 0])
    assert SURFACE.efficiency(2.0, 32.0, 2.0) == pytest.approx(np.sqrt(low * high))


@given(sizes, sizes, sizes)
def test_reduced_forms_agree(x: float, y: float, z: float) -> None:
    whole = float(SURFACE.efficiency(x, y, z))
    assert float(SURFACE.fix(1, y).efficiency(x, z)) == pytest.approx(whole, rel=1e-12)
    assert Sheet.of(SURFACE.fix(1, y)).efficiency(x, z) == pytest.approx(whole, rel=1e-12)
    curve = SURFACE.fix(2, z).fix(1, y).curve()
    assert curve.efficiency(x) == pytest.approx(whole, rel=1e-12)
    assert np.exp(SURFACE.log_efficiency.min()) <= whole * (1 + 1e-12)
    assert whole <= np.exp(SURFACE.log_efficiency.max()) * (1 + 1e-12)


def test_outside_of_the_knots_it_is_constant() -> None:
    assert SURFACE.efficiency(1e-3, 32, 512) == SURFACE.efficiency(1, 32, 512)
    assert SURFACE.efficiency(1, 32, 1e9) == SURFACE.efficiency(1, 32, 512)


def test_one_knot_means_no_dependence() -> None:
    flat = Surface((np.array([3.0]), np.array([0.0, 1.0])), np.log([[0.5, 0.8]]))
    assert flat.efficiency(1.0, 2.0) == pytest.approx(0.8)
    assert flat.fix(0, 99.0).curve().efficiency(2.0) == pytest.approx(0.8)
    assert Sheet.of(flat).efficiency(7.0, 1.0) == pytest.approx(0.5)
    assert flat.fix(1, 2.0).curve().efficiency(123.0) == pytest.approx(0.8)
