"""row_tables: which shared segments each row of a decode step reads, as arrays for a device.

A row's segments are the upper part of its path, in whole nodes from the root down, so that its
private tokens are the rest of its row in one piece.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from granikv.core.step import Segment

# (node, first slot, tokens), from below the root down to a node. Of a COLD node `-1 - r` instead of
# the first slot: its slots are those that row r of the engine's slot table has for its path.
NodePath = Sequence[tuple[int, int, int]]
# (first slot, tokens, rows) of a segment.
Run = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class RowTables:
    """Segments of a step's rows.

    Attributes:
        base: int32 `[rows, levels]`, first slots, or `-1 - r` for slots of row r of the engine's
            slot table; meaningless where the length is 0.
        length: int32 `[rows, levels]` tokens, outermost first, 0 for no segment.
        group: int32 `[rows, levels]`, index into `segments`.
        shared_tokens: int32 `[rows]`, tokens of all segments: where private ones begin.
        segments: every one with its readers; the form that `Dispatcher.plan` takes.
    """

    base: NDArray[np.int32]
    length: NDArray[np.int32]
    group: NDArray[np.int32]
    shared_tokens: NDArray[np.int32]
    segments: tuple[Segment, ...]


def row_tables(
    ends: Sequence[int | None],
    path_of: Callable[[int], NodePath],
    levels: int = 4,
    max_segments: int = 64,
) -> RowTables:
    """Group rows by the nodes that two or more of them read.

    A node and its parent make one segment when the same rows read both and their slots follow each
    other, or are of one row. Work is linear in the different ends and their paths; rows with the
    same end share it.

    Args:
        ends: the lowest node of each row's path that may be shared, None for a row without one.
        path_of: path down to a node; equal for equal nodes.
        levels: most segments of a row; what is below them is private.
        max_segments: most segments in all. Those with the most `rows * length` stay; a row that
            loses one loses those below it too.

    Raises:
        ValueError: a limit is not positive.
    """
    if levels < 1 or max_segments < 1:
        raise ValueError(
            f"levels and max_segments must be positive, got {levels} and {max_segments}"
        )
    rows_of_end = Counter(ends)
    rows_of_end.pop(None, None)
    paths = {end: path_of(end) for end in rows_of_end if end is not None}
    readers: dict[int, int] = {}
    for end, path in paths.items():
        for node, _, _ in path:
            readers[node] = readers.get(node, 0) + rows_of_end[end]
    runs = {end: _runs(path, readers)[:levels] for end, path in paths.items()}
    kept = _reachable(runs.values(), max_segments)

    # One line an end, and one of zeros for rows without any; a row is a copy of its end's.
    line_of: dict[int | None, int] = {None: 0}
    lines = [[[0, 0, 0]] * levels]
    for end, found in runs.items():
        line = [
            [base, length, kept[base, length, rows]] for base, length, rows in _upper(found, kept)
        ]
        line_of[end] = len(lines)
        lines.append(line + [[0, 0, 0]] * (levels - len(line)))
    of_row = np.array([line_of[end] for end in ends], np.intp)
    base, length, group = np.array(lines, np.int32).transpose(2, 0, 1)[:, of_row]
    shared_tokens = length.sum(axis=1, dtype=np.int32)
    segments = tuple(Segment(max(base, 0), tokens, rows) for base, tokens, rows in kept)
    return RowTables(base, length, group, shared_tokens, segments)


def _runs(path: NodePath, readers: dict[int, int]) -> list[Run]:
    """A path's shared part, outermost first."""
    runs: list[Run] = []
    for node, base, length in path:
        rows = readers[node]
        if rows < 2:
            break
        if runs and runs[-1][2] == rows and _follows(runs[-1], base):
            first, above, _ = runs[-1]
            runs[-1] = (first, above + length, rows)
        else:
            runs.append((base, length, rows))
    return runs


def _follows(run: Run, base: int) -> bool:
    """Whether a node at `base` goes on where a run ends."""
    first, length, _ = run
    return first == base if first < 0 else first + length == base


def _reachable(found: Iterable[list[Run]], most: int) -> dict[Run, int]:
    """The runs that save most, without those below one that is left out, by base with an index."""
    paths = list(found)
    heavy = set(sorted({run for runs in paths for run in runs}, key=_weight)[:most])
    reached = {run for runs in paths for run in _upper(runs, heavy)}
    return {run: index for index, run in enumerate(sorted(reached))}


def _upper(runs: list[Run], kept: Container[Run]) -> list[Run]:
    """Runs before the first that is not kept."""
    return list(takewhile(lambda run: run in kept, runs))


def _weight(run: Run) -> tuple[int, int]:
    base, length, rows = run
    return -length * rows, base
