"""Device tables of one decode step: which segments a row shares, which slots are its own.

A row reads its segments and then its private tokens; the order has no influence on the result
beyond rounding, because a decode query sees every token. Nothing here is read back by a kernel's
host code, so the contents may change between two replays of a CUDA graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]

MAX_SEGMENTS = 4

# Values of `group_mode`, those of `granikv.core.step.Mode`.
MODE_PAGED, MODE_CASCADE, MODE_DENSE = 0, 1, 2
_MODES = (MODE_PAGED, MODE_CASCADE, MODE_DENSE)

_NO_SLOT = -1  # fills what no kernel may read


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """KV in the consecutive slots `[base, base + length)` that `rows` of the batch read."""

    base: int
    length: int
    rows: tuple[int, ...]
    mode: int = MODE_DENSE


@dataclass(frozen=True, slots=True)
class DecodeTables:
    """What every row of a decode step reads; contiguous int32 tensors on one device.

    A padding row has only zero lengths: its result is O = 0 and LSE = -inf. Where a length ends,
    and in every entry of length 0, the other tables may hold anything.

    Attributes:
        segment_base: `[rows, 4]`, first slot of each segment. `-1 - r` is a segment whose slots
            are those of row r of `private_slots`, from the column on that the lengths before it in
            its row add up to; it runs as a cascade, whatever its mode.
        segment_length: `[rows, 4]` tokens, 0 for no segment; they need not come first.
        segment_group: `[rows, 4]`, group in `[0, groups)`. All entries of one group have the same
            base and length, and a row holds a group once.
        group_mode: `[groups]`, 0 paged, 1 cascade, 2 dense.
        private_slots: `[table rows, width]`, an engine's own table of the slots of its requests.
        private_row: `[rows]`, row of `private_slots` that holds a row's private tokens.
        private_start: `[rows]`, column where they begin.
        private_length: `[rows]` tokens.
    """

    segment_base: Any
    segment_length: Any
    segment_group: Any
    group_mode: Any
    private_slots: Any
    private_row: Any
    private_start: Any
    private_length: Any

    @property
    def rows(self) -> int:
        """Rows, with padding rows."""
        return int(self.private_length.shape[0])

    @property
    def groups(self) -> int:
        """Room for groups."""
        return int(self.group_mode.shape[0])

    @property
    def width(self) -> int:
        """Columns of the slot table."""
        return int(self.private_slots.shape[1])

    def copy_from(self, other: "DecodeTables") -> None:
        """Overwrite the contents and keep the addresses, which a captured graph holds.

        Raises:
            ValueError: the shapes differ.
        """
        for field in fields(self):
            mine, new = getattr(self, field.name), getattr(other, field.name)
            if mine.shape != new.shape:
                raise ValueError(f"{field.name} must be {list(mine.shape)}, got {list(new.shape)}")
            mine.copy_(new)


def tables_of(
    segments: Sequence[SharedSegment],
    private_slots: Sequence[Any],
    modes: Sequence[int] | None,
    rows: int,
    width: int,
    groups: int,
    device: Any,
) -> DecodeTables:
    """Tables of a batch known on the host; segment `i` becomes group `i`.

    Args:
        segments: outermost first where they are nested.
        private_slots: slots of each live row; the rows after them are padding.
        modes: one for each segment; None takes the segments' own.
        rows: rows of the tables.
        width: columns of the slot table.
        groups: length of the mode table, at least the number of segments.
        device: where the tables are made.

    Raises:
        ValueError: it does not fit, or a segment is empty, or a row has more than four.
    """
    own = [[int(slot) for slot in slots] for slots in private_slots]
    modes = [segment.mode for segment in segments] if modes is None else list(modes)
    _check_private(own, rows, width)
    _check_segments(segments, modes, rows, groups)
    base = torch.zeros(rows, MAX_SEGMENTS, dtype=torch.int32)
    length, group = torch.zeros_like(base), torch.zeros_like(base)
    held = [0] * rows
    for index, segment in enumerate(segments):
        for row in segment.rows:
            level = held[row]
            held[row] += 1
            base[row, level] = segment.base
            length[row, level] = segment.length
            group[row, level] = index
    slots = torch.full((rows, width), _NO_SLOT, dtype=torch.int32)
    for row, mine in enumerate(own):
        slots[row, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
    lengths = [len(mine) for mine in own] + [0] * (rows - len(own))
    mode = list(modes) + [MODE_PAGED] * (groups - len(segments))
    tables = (
        base, length, group, _int32(mode), slots, _int32(range(rows)), _int32([0] * rows),
        _int32(lengths),
    )  # fmt: skip
    return DecodeTables(*(table.to(device) for table in tables))


def _int32(values: Sequence[int]) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def _check_private(own: Sequence[Sequence[int]], rows: int, width: int) -> None:
    if len(own) > rows:
        raise ValueError(f"private_slots must be of at most {rows} rows, got {len(own)}")
    longest = max(map(len, own), default=0)
    if longest > width:
        raise ValueError(f"private tokens of a row must be at most {width}, got {longest}")
    lowest = min((slot for slots in own for slot in slots), default=0)
    if lowest < 0:
        raise ValueError(f"private slots must not be negative, got {lowest}")


def _check_segments(
    segments: Sequence[SharedSegment], modes: Sequence[int], rows: int, groups: int
) -> None:
    if len(segments) > groups:
        raise ValueError(f"segments must be at most {groups}, got {len(segments)}")
    if len(modes) != len(segments):
        raise ValueError(f"modes must be {len(segments)}, got {len(modes)}")
    held = [0] * rows
    for segment, mode in zip(segments, modes, strict=True):
        if mode not in _MODES:
            raise ValueError(f"mode must be one of {_MODES}, got {mode}")
        if segment.base < 0 or segment.length < 1:
            raise ValueError(f"segment must have base >= 0 and length >= 1, got {segment}")
        if len(set(segment.rows)) != len(segment.rows):
            raise ValueError(f"rows of a segment must be distinct, got {segment.rows}")
        for row in segment.rows:
            if not 0 <= row < rows:
                raise ValueError(f"row of a segment must be in [0, {rows}), got {row}")
            held[row] += 1
    if max(held, default=0) > MAX_SEGMENTS:
        raise ValueError(f"segments of a row must be at most {MAX_SEGMENTS}, got {max(held)}")
