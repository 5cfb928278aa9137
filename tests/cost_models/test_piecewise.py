"""Piecewise linear functions: sums and maxima equal the point by point answer."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from granikv.cost_models.piecewise import (
    Pieces,
    overlapped,
    piece_at,
    scaled,
    upper,
    upper_line,
    weighted_sum,
)

slopes = st.floats(0, 2)
values = st.floats(0, 100)
places = st.floats(0, 300)


@st.composite
def functions(draw: st.DrawFn) -> Pieces:
    """Continuous functions of up to six pieces from 0 on."""
    starts = [0.0, *sorted(draw(st.sets(st.floats(0.5, 200), max_size=5)))]
    pieces = [(0.0, draw(values), draw(slopes))]
    for start in starts[1:]:
        _, a, b = pieces[-1]
        slope = draw(slopes)
        pieces.append((start, a + (b - slope) * start, slope))
    return tuple(pieces)


def _at(pieces: Pieces, place: float) -> float:
    _, a, b = pieces[piece_at(pieces, place)]
    return a + b * place


def _near(value: float) -> float:
    return pytest.approx(value, rel=1e-9, abs=1e-6)  # type: ignore[no-any-return]


# Crosses a line so near its second piece's start that the crossing rounds to it.
_TOUCHING = ((0.0, 0.0, 0.0), (1.0, -1.0, 1.0), (3.0, 2.0, 0.0))


@given(functions(), functions(), places)
@example(_TOUCHING, ((0.0, 0.0, 1e-38),), 2.0)
def test_upper_is_the_greater(first: Pieces, second: Pieces, place: float) -> None:
    assert _at(upper(first, second), place) == _near(max(_at(first, place), _at(second, place)))


@given(functions(), values, slopes, places)
@example(_TOUCHING, 0.0, 1e-38, 2.0)
@example(_TOUCHING, 1e-20, 0.0, 2.0)
def test_upper_line_is_the_greater(pieces: Pieces, a: float, b: float, place: float) -> None:
    assert _at(upper_line(pieces, a, b), place) == _near(max(_at(pieces, place), a + b * place))


@given(functions(), st.floats(0, 500), st.floats(0, 1), places)
@example(_TOUCHING, 1e-20, 0.3, 2.0)
def test_overlapped_is_the_greater_and_a_share_of_the_smaller(
    pieces: Pieces, other: float, exposed: float, place: float
) -> None:
    one = _at(pieces, place)
    expected = max(one, other) + exposed * min(one, other)
    assert _at(overlapped(pieces, other, exposed, 7.0), place) == _near(expected + 7.0)
    # The same as the greater of the two, each with a share of the other.
    assert expected == _near(max(one + exposed * other, other + exposed * one))


@given(functions(), st.floats(0, 500), st.floats(0, 1), st.floats(0, 250), places)
def test_overlapped_starts_where_its_pieces_do(
    pieces: Pieces, other: float, exposed: float, ahead: float, place: float
) -> None:
    """Also pieces that begin below 0, as those of a private pass with paged segments do."""
    early = tuple((start - ahead, a + b * ahead, b) for start, a, b in pieces)
    moved = overlapped(early, other, exposed, 0.0)
    assert moved[0][0] == early[0][0]
    one = _at(pieces, place)
    expected = max(one, other) + exposed * min(one, other)
    assert _at(moved, place - ahead) == _near(expected)


@given(functions(), functions(), st.floats(0, 3), places)
def test_sums_add(first: Pieces, second: Pieces, weight: float, place: float) -> None:
    total = weighted_sum(first, second, weight, 7.0)
    assert _at(total, place) == _near(weight * _at(first, place) + _at(second, place) + 7.0)
    assert _at(scaled(first, weight, -2.0), place) == _near(weight * _at(first, place) - 2.0)


@given(functions(), functions())
def test_starts_ascend(first: Pieces, second: Pieces) -> None:
    line = second[0][1:]
    for pieces in (
        upper(first, second),
        upper_line(first, *line),
        overlapped(first, line[0], 0.3, 1.0),
    ):
        starts = [start for start, _, _ in pieces]
        assert starts == sorted(starts)


def test_the_last_piece_that_starts_holds() -> None:
    pieces = ((0.0, 1.0, 0.0), (10.0, 0.0, 0.1), (20.0, -2.0, 0.2))
    assert [piece_at(pieces, x) for x in (-5, 0, 9, 10, 19, 20, math.inf)] == [0, 0, 0, 1, 1, 2, 2]
