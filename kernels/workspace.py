"""The device buffers of a decode operator: what its planner fills and its launches read."""

from dataclasses import dataclass, fields
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]
import triton  # type: ignore[import-not-found,unused-ignore]

from granikv.kernels.checks import DecodeLimits
from granikv.kernels.planner import ITEM_WIDTH

PREFIX_CHUNK = 2048  # tokens of a prefix tile when deterministic
PRIVATE_CHUNK = 1024

# Of each list. Few rows and few heads need many chunks to fill a card: with 10 query heads, 64 rows
# over 32K tokens took 57 us on an H200 with room for eight parts a row, and 44 with more.
_MIN_PARTS = 1024
_MIN_PARTS_PER_ROW = 8
_HEAD_PARTS_PER_ROW = 256  # parts of a row times its query heads


@dataclass(frozen=True, slots=True)
class Workspace:
    """Work lists and counters (int32), and the parts of rows (float32).

    Attributes:
        counts: `[4]` dense, cascade and private items, and the blocks of the dense pass.
        dense_items: `[parts, 8]`, as `cascade_items` and `private_items`; see `planner`.
        members: `[rows * 4]` table entries, those of one group side by side.
        entry_part: `[rows * 4]` first part of an entry.
        row_part: `[rows]` first part of a row.
        row_parts: `[rows]` parts to merge, 0 where a tile writes the result.
        group_scratch: `[7, groups]` of the planner.
        arrivals: `[rows, num_q_heads]` parts that a fused launch has written so far.
        queues: `[4]` next work of a fused launch's two lists or of the memory-bound pass, and the
            blocks that are done with each.
        part_out: `[parts, num_q_heads, head_dim]` normalised partial results.
        part_lse: `[parts, num_q_heads]` their LSEs, base e.
    """

    counts: Any
    dense_items: Any
    cascade_items: Any
    private_items: Any
    members: Any
    entry_part: Any
    row_part: Any
    row_parts: Any
    group_scratch: Any
    arrivals: Any
    queues: Any
    part_out: Any
    part_lse: Any

    @property
    def num_bytes(self) -> int:
        """Device memory held."""
        return sum(getattr(self, f.name).nbytes for f in fields(self))


def allocate(limits: DecodeLimits, fixed_tokens: int | None) -> Workspace:
    """Buffers for every batch within the limits.

    Args:
        limits: of the operator.
        fixed_tokens: most tokens of all segments of a row, where tiles have a fixed size; None
            where the planner keeps to `part_budget`.
    """
    rows, heads = limits.max_rows, limits.heads
    parts = 3 * part_budget(rows, heads.q)
    if fixed_tokens is not None:
        tokens = fixed_tokens + limits.max_private_tokens
        parts = max(parts, rows * (5 + tokens // min(PREFIX_CHUNK, PRIVATE_CHUNK)))

    def ints(*shape: int) -> Any:
        return torch.zeros(*shape, dtype=torch.int32, device=limits.device)

    def floats(*shape: int) -> Any:
        return torch.empty(*shape, dtype=torch.float32, device=limits.device)

    return Workspace(
        counts=ints(4),
        dense_items=ints(parts, ITEM_WIDTH.value),
        cascade_items=ints(parts, ITEM_WIDTH.value),
        private_items=ints(parts, ITEM_WIDTH.value),
        members=ints(rows * 4),
        entry_part=ints(rows * 4),
        row_part=ints(rows),
        row_parts=ints(rows),
        group_scratch=ints(7, padded(limits.max_groups)),
        arrivals=ints(rows, heads.q),
        queues=ints(4),
        part_out=floats(parts, heads.q, heads.dim),
        part_lse=floats(parts, heads.q),
    )


def part_budget(rows: int, num_q_heads: int) -> int:
    """Most parts that the planner may give each of the three lists, so that together they fit."""
    per_row = max(_MIN_PARTS_PER_ROW, _HEAD_PARTS_PER_ROW // num_q_heads)
    return max(_MIN_PARTS, per_row * rows)


def padded(count: int) -> int:
    """Length of a planner's vector for that many rows or groups."""
    return max(16, int(triton.next_power_of_2(count)))
