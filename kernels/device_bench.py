"""The device side of the decode benchmark: pool, timer, operators and the check of every result."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]

from granikv.kernels.bench_cases import Batch, Case, Operators, case_of
from granikv.kernels.bench_points import Backend, Cell
from granikv.kernels.card import Card
from granikv.kernels.reference import decode_reference
from granikv.kernels.sweep_check import MAX_RELATIVE_ERROR
from granikv.kernels.tables import DecodeTables

MIN_REPLAYS = 20
_REFERENCE_ROWS = 24  # of a batch are compared with float64


class DeviceBench(Card):
    """Measures backends on one cell after another on the current CUDA device; holds 34 GiB of it.

    Args:
        seed: of all values and orders.
        read_clocks: says the clocks of the moment it is called.
    """

    def __init__(self, seed: int, read_clocks: Callable[[], str]) -> None:
        super().__init__(seed, read_clocks)
        self._operators = Operators({})
        self._batch: Batch | None = None
        self._want: Any = None

    def begin(self, cell: Cell) -> None:
        """Make the inputs of the next cell; the first result of it is compared with float64."""
        self._batch = None
        self._batch = Batch(self._pool, cell)
        self._want = None

    def measure(self, backend: Backend) -> tuple[list[float], float]:
        """Every timed repetition of a backend on the cell, in us, and its relative error.

        Raises:
            ArithmeticError: its result is off by more than rounding; nothing was timed.
        """
        assert self._batch is not None
        case = case_of(self._batch, self._operators, backend)
        error = self._check(case)
        return self._timer.times_us(case.calls, min_replays=MIN_REPLAYS), error

    def check_device(self) -> None:
        """Raise where an earlier error left the device unusable."""
        torch.cuda.synchronize()

    def _check(self, case: Case) -> float:
        got = case.result()
        if case.order is not None:
            got = torch.empty_like(got).index_copy_(0, case.order, got)
        if self._want is None or case.tables is not None:
            rows, want = self._reference(case.tables)
            error = _error(got[rows], want)
        else:
            error = _error(got, self._want)
        if not error < MAX_RELATIVE_ERROR:  # not "<" also catches NaN
            raise ArithmeticError(f"result is off by {error:.2e}; not timed")
        if self._want is None and case.tables is None:
            # Held to float64 on some rows, it is what the other backends have to give on all.
            self._want = got.clone()
        return error

    def _reference(self, tables: DecodeTables | None) -> tuple[Any, Any]:
        """Some rows, and their results in float64, by the batch's tables if there are no others."""
        assert self._batch is not None
        batch = self._batch
        count = min(_REFERENCE_ROWS, batch.cell.rows)
        rows = torch.linspace(0, batch.cell.rows - 1, count, device="cuda").long()
        k, v = batch.layers[0]
        out, _ = decode_reference(batch.q[rows], k, v, _some_rows(tables or batch.tables(2), rows))
        return rows, out


def _some_rows(tables: DecodeTables, rows: Any) -> DecodeTables:
    return replace(
        tables,
        segment_base=tables.segment_base[rows],
        segment_length=tables.segment_length[rows],
        segment_group=tables.segment_group[rows],
        private_row=tables.private_row[rows],
        private_start=tables.private_start[rows],
        private_length=tables.private_length[rows],
    )


def _error(got: Any, want: Any) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())
