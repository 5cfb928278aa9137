"""Errors against hand-made numbers, the distance of distributions against a closed form."""

import numpy as np
import pytest

from granikv.validate.compare.error_measures import errors, ks_distance, spread


def test_errors_by_hand():
    found = errors([90, 110, 100, 100, 160], [100] * 5)
    assert found.count == 5
    assert found.median == pytest.approx(0.1)
    assert found.bias == pytest.approx(0.0)
    assert found.worst == pytest.approx(0.6)
    assert found.p90 == pytest.approx(0.4)  # between 0.1 and 0.6, at place 3.6 of 0..4


def test_an_error_needs_something_measured():
    with pytest.raises(ValueError, match="positive"):
        errors([1.0], [0.0])
    with pytest.raises(ValueError, match="one pair"):
        errors([], [])


def test_distance_of_shifted_uniforms_is_the_shift():
    even = np.linspace(0, 1, 1000, endpoint=False)
    assert ks_distance(even, even) == 0
    assert ks_distance(even, even + 0.25) == pytest.approx(0.25, abs=0.002)
    assert ks_distance(even, even + 2) == 1


def test_spread_is_of_the_median():
    assert spread([2.0]) is None
    assert spread([9.0, 10.0, 12.0]) == pytest.approx(0.3)
