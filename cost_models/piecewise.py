"""Piecewise linear functions of the private tokens, as tuples of `(start, a, b)` pieces.

A piece holds from its start to the next one's, with value `a + b * tokens`; starts ascend, and the
first piece also holds below its start.
"""

import math
from bisect import bisect_right

Piece = tuple[float, float, float]
Pieces = tuple[Piece, ...]


def piece_at(pieces: Pieces, tokens: float) -> int:
    """Index of the piece that holds at `tokens`."""
    return max(bisect_right(pieces, (tokens, math.inf)) - 1, 0)


def weighted_sum(first: Pieces, second: Pieces, first_weight: float, constant: float) -> Pieces:
    """`first_weight * first + second + constant`."""
    return tuple(
        (start, first_weight * a1 + a2 + constant, first_weight * b1 + b2)
        for start, (a1, b1), (a2, b2) in _aligned(first, second)
    )


def upper(first: Pieces, second: Pieces) -> Pieces:
    """The greater of two functions; pieces are split where they cross."""
    aligned = _aligned(first, second)
    out: list[Piece] = []
    for i, (start, one, two) in enumerate(aligned):
        end = aligned[i + 1][0] if i + 1 < len(aligned) else math.inf
        (a1, b1), (a2, b2) = one, two
        ahead = a1 + b1 * start - (a2 + b2 * start)
        leads, follows = (one, two) if ahead > 0 or (ahead == 0 and b1 >= b2) else (two, one)
        out.append((start, *leads))
        if follows[1] > leads[1]:
            crossing = max(start, (leads[0] - follows[0]) / (follows[1] - leads[1]))
            if crossing < end:
                out.append((crossing, *follows))
    return tuple(out)


def upper_line(pieces: Pieces, a: float, b: float) -> Pieces:
    """`upper(pieces, line)` with one line `a + b * tokens`, in a quicker form.

    Pieces that the line covers whole are dropped.
    """
    out: list[Piece] = []
    last = len(pieces) - 1
    is_above = False
    for i, piece in enumerate(pieces):
        start, piece_a, piece_b = piece
        ahead = a + b * start - (piece_a + piece_b * start)
        if ahead <= 0 and (ahead < 0 or piece_b >= b):
            out.append(piece)
            is_above = False
            if b <= piece_b:
                continue
        else:
            if not is_above:
                out.append((start, a, b))
            is_above = True
            if piece_b <= b:
                continue
        # After the start, but rounding may put it there.
        crossing = max(start, (a - piece_a) / (piece_b - b))
        if i == last or crossing < pieces[i + 1][0]:
            out.append((crossing, piece_a, piece_b) if is_above else (crossing, a, b))
            is_above = not is_above
    return tuple(out)


def shifted(line: Pieces, share: float, reads: float, layers: int, extra: float) -> Pieces:
    """`layers * (line(share * P + reads) + extra)` over P from 0."""
    if reads == 0.0 and share == 1.0:  # no paged segment, no row split: the common case
        ahead = layers * extra
        return tuple([(start, layers * a + ahead, layers * b) for start, a, b in line])
    return tuple(
        [
            ((start - reads) / share, layers * (a + b * reads + extra), layers * share * b)
            for start, a, b in line[piece_at(line, reads) :]
        ]
    )


def overlapped(pieces: Pieces, other: float, exposed: float, constant: float) -> Pieces:
    """`max(pieces, other) + exposed * min(pieces, other) + constant`; pieces must never fall."""
    out: list[Piece] = []
    ends = [piece[0] for piece in pieces[1:]]
    ends.append(math.inf)
    for (start, a, b), end in zip(pieces, ends, strict=True):
        above = (a + exposed * other + constant, b)
        if a + b * start >= other:
            out.append((start, *above))
            continue
        out.append((start, other + exposed * a + constant, exposed * b))
        crossing = max(start, (other - a) / b) if b > 0 else math.inf
        if crossing < end:
            out.append((crossing, *above))
    return tuple(out)


def scaled(pieces: Pieces, weight: float, constant: float) -> Pieces:
    """`weight * pieces + constant`."""
    return tuple((start, weight * a + constant, weight * b) for start, a, b in pieces)


def _aligned(
    first: Pieces, second: Pieces
) -> list[tuple[float, tuple[float, float], tuple[float, float]]]:
    """Both functions over the union of their starts."""
    starts = sorted({piece[0] for piece in first} | {piece[0] for piece in second})
    return [
        (start, first[piece_at(first, start)][1:], second[piece_at(second, start)][1:])
        for start in starts
    ]
