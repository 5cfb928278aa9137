"""Device tables of a server's decode steps, at addresses that CUDA graphs keep.

What the host decides is one piece of memory, copied only when it has changed; slots and lengths of
private tokens come from the engine's own tables, inside the graph.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import torch

from granikv.core.row_tables import RowTables
from granikv.core.step import Mode
from granikv.kernels.tables import MAX_SEGMENTS, DecodeTables

_STAGES = 4  # of pinned memory; a stage is waited for before it is written again


class StepTables:
    """The tables of one server.

    Args:
        max_rows: rows of the largest batch, padding included.
        groups: room for segments.
        slot_table: int32 `[requests, context]`, the engine's slots of its requests' tokens.
    """

    def __init__(self, max_rows: int, groups: int, slot_table: torch.Tensor) -> None:
        device = slot_table.device
        self.max_rows = max_rows
        self._slot_table = slot_table
        self._bounds = np.cumsum([0, *[max_rows * MAX_SEGMENTS] * 3, max_rows, groups])
        self._packed = torch.zeros(int(self._bounds[-1]), dtype=torch.int32, device=device)
        self._row = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._own = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._stages = [_Stage(len(self._packed), device) for _ in range(_STAGES)]
        self._stage = 0
        self._loaded: tuple[RowTables | None, tuple[Mode, ...]] = (None, ())
        self._views: dict[int, DecodeTables] = {}

    def view(self, rows: int) -> DecodeTables:
        """The tables of a batch of that many rows."""
        view = self._views.get(rows)
        if view is None:
            base, length, group, start, mode = (
                self._packed[first:end] for first, end in pairwise(self._bounds)
            )
            by_row = (part.view(-1, MAX_SEGMENTS)[:rows] for part in (base, length, group))
            view = DecodeTables(
                *by_row, mode, self._slot_table, self._row[:rows], start[:rows], self._own[:rows]
            )
            self._views[rows] = view
        return view

    def load(self, tables: RowTables | None, modes: tuple[Mode, ...]) -> None:
        """Bring a step's segments to the device; rows beyond the step's have none.

        Args:
            tables: of the step; None for rows without segments.
            modes: of its segments.
        """
        if tables is self._loaded[0] and modes == self._loaded[1]:
            return
        self._loaded = (tables, modes)
        stage = self._stages[self._stage]
        self._stage = (self._stage + 1) % _STAGES
        host = stage.free()
        host[:] = 0
        if tables is not None:
            columns = (tables.base, tables.length, tables.group, tables.shared_tokens, modes)
            for first, column in zip(self._bounds, columns, strict=False):
                flat = np.asarray(column, np.int32).ravel()
                host[first : first + len(flat)] = flat
        stage.send(self._packed)

    def fill_rows(self, rows: int, requests: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Rows of the slot table and lengths of private tokens; may be captured.

        Args:
            rows: of the batch, padding included.
            requests: `[rows]` rows of the slot table.
            seq_lens: `[rows]` tokens that each row reads.
        """
        view = self.view(rows)
        view.private_row.copy_(requests[:rows])
        torch.sub(seq_lens[:rows], view.private_start, out=view.private_length)


class _Stage:
    """Pinned memory on its way to the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._on_card = device.type == "cuda"
        self._memory = torch.zeros(size, dtype=torch.int32, pin_memory=self._on_card)
        self._sent = torch.cuda.Event() if self._on_card else None

    def free(self) -> Any:
        """The memory as an array, once the device has read what was in it."""
        if self._sent is not None:
            self._sent.synchronize()
        return self._memory.numpy()

    def send(self, target: torch.Tensor) -> None:
        """Copy it behind whatever the current stream has to do."""
        target.copy_(self._memory, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
