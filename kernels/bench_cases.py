"""Device inputs of the decode benchmark's cells, and the calls that are timed on them.

Layers of a model have pools of their own and one set of tables for the step, so here every timed
call reads its own stretch of the device pool through the same tables.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch  # type: ignore[import-not-found,unused-ignore]

from granikv.kernels import baselines
from granikv.kernels.bench_points import MAX_CALLS, Backend, Cell, plan_calls
from granikv.kernels.decode import SharedPrefixDecode
from granikv.kernels.shapes import Heads
from granikv.kernels.sweep_cases import DevicePool
from granikv.kernels.tables import DecodeTables, SharedSegment, tables_of
from granikv.kernels.timing import Call

MAX_ROWS = 512
MAX_GROUPS = 16
MAX_PRIVATE_TOKENS = 2048
_PAGE_ALIGNMENT = 128  # slots of a layer are whole pages of every size


class Case(NamedTuple):
    """What is timed, and a call that returns the first layer's O `[rows, num_q_heads, head_dim]`.

    `order` names the batch's row of each row of that result, where it is not the batch's order;
    `tables` say what it read, where that is not the batch's KV.
    """

    calls: list[Call]
    result: Call
    order: Any = None
    tables: DecodeTables | None = None


class Batch:
    """One cell on the device: the pools of some layers, the tables of a step and its queries."""

    def __init__(self, pool: DevicePool, cell: Cell, calls: int = MAX_CALLS) -> None:
        self.cell = cell
        self._pool = pool
        k, v = pool.pages(cell.heads, 1)
        needed = cell.slots + 2 * _PAGE_ALIGNMENT * (1 + len(cell.segments) + cell.rows)
        layers = max(1, min(calls, k.shape[0] // needed))
        self.slots = k.shape[0] // layers // _PAGE_ALIGNMENT * _PAGE_ALIGNMENT
        starts = range(0, layers * self.slots, self.slots)
        self.layers = [(k[i : i + self.slots, 0], v[i : i + self.slots, 0]) for i in starts]
        self.q = pool.randn(cell.rows, cell.heads.q, cell.heads.dim)
        self.row_starts = torch.arange(cell.rows + 1, dtype=torch.int32, device="cuda")
        self.seqlens = _int32([tokens + cell.private_tokens for tokens in cell.row_tokens])
        self.private_lengths = torch.full_like(self.seqlens, cell.private_tokens)

    def layer(self, number: int) -> tuple[Any, Any]:
        """K and V `[slots, num_kv_heads, head_dim]`; layers that do not fit are others again."""
        return self.layers[number % len(self.layers)]

    def pages(self, layer: int, page_size: int) -> tuple[Any, Any]:
        """K and V of a layer as `[pages, page_size, num_kv_heads, head_dim]`."""
        k, v = self.layer(layer)
        shape = (-1, page_size, *k.shape[1:])
        return k.view(shape), v.view(shape)

    def private_pages(self, page_size: int) -> Any:
        """Random pages `[rows, pages of a row]` behind all segments."""
        cell = self.cell
        shared = sum(-(-segment.tokens // page_size) for segment in cell.segments)
        each = -(-cell.private_tokens // page_size)
        order = self._pool.order(1 + shared, self.slots // page_size)
        return order[: cell.rows * each].view(cell.rows, each)

    @cached_property
    def private_slots(self) -> Any:
        """Slots of the private tokens `[rows, private_tokens]`, int32."""
        return self.private_pages(1)

    def page_table(self, page_size: int, private: Any) -> Any:
        """Pages of every row, segments first, in a table as wide as the context."""
        table = self._pool.wide_table(0, self.cell.rows, page_size)
        filled = [0] * self.cell.rows
        bases = self.cell.bases(page_size)
        for base, segment in zip(bases, self.cell.segments, strict=True):
            count = segment.tokens // page_size
            first = base // page_size
            ramp = torch.arange(first, first + count, dtype=torch.int32, device="cuda")
            at = filled[segment.rows[0]]  # rows of a segment have the same tokens before it
            table[segment.rows.start : segment.rows.stop : segment.rows.step, at : at + count] = (
                ramp
            )
            for row in segment.rows:
                filled[row] += count
        for at in set(filled):
            rows = torch.tensor([i for i, n in enumerate(filled) if n == at], device="cuda")
            table[rows, at : at + private.shape[1]] = private[rows]
        return table

    def private_table(self) -> Any:
        """Private slots in a table as wide as the context."""
        table = self._pool.wide_table(1, self.cell.rows, 1)
        table[:, : self.cell.private_tokens] = self.private_slots
        return table

    def tables(self, mode: int, page_size: int = 1, private_slots: Any = None) -> DecodeTables:
        """GraniKV's tables with one mode for every segment; of other pages where they are given."""
        cell = self.cell
        segments = [
            SharedSegment(base, segment.tokens, tuple(segment.rows), mode)
            for base, segment in zip(cell.bases(page_size), cell.segments, strict=True)
        ]
        tables = tables_of(segments, [], None, cell.rows, 1, MAX_GROUPS, "cuda")
        if cell.private_tokens == 0:
            return tables
        slots = (self.private_slots if private_slots is None else private_slots).contiguous()
        return replace(tables, private_slots=slots, private_length=self.private_lengths)


@dataclass(slots=True)
class Operators:
    """One operator for all cells of the same heads, as an engine has one for all its graphs."""

    made: dict[tuple[Heads, str], SharedPrefixDecode]

    def of(self, heads: Heads, purpose: str = "step") -> SharedPrefixDecode:
        """The operator of some heads; passes timed alone leave state behind and use their own."""
        key = (heads, purpose)
        if key not in self.made:
            limits = (MAX_ROWS, heads, MAX_GROUPS, MAX_PRIVATE_TOKENS)
            self.made[key] = SharedPrefixDecode(*limits, torch.bfloat16, "cuda")
        return self.made[key]


def case_of(batch: Batch, operators: Operators, backend: Backend) -> Case:
    """Calls of one backend on one cell, each on the next layer.

    Raises:
        ImportError: the library is not installed.
        NotImplementedError: the operator has no such part.
    """
    calls = plan_calls(batch.cell.guess_us(backend.work))
    return _FAMILIES[backend.family](batch, operators, backend, calls)


def _fa3(batch: Batch, _: Operators, backend: Backend, calls: int) -> Case:
    size, heads = backend.page_size, batch.cell.heads
    private = batch.private_slots if size == 1 else batch.private_pages(size)
    table = batch.page_table(size, private)
    longest = max(batch.cell.row_tokens) + batch.cell.private_tokens
    schedule = baselines.fa3_decode_schedule(heads, batch.seqlens, batch.row_starts, longest, size)

    def call(layer: int) -> Call:
        k, v = batch.pages(layer, size)
        return lambda: baselines.fa3_decode(
            batch.q, k, v, table, batch.seqlens, batch.row_starts, schedule
        )

    case = _rotated(call, calls)
    if size == 1:
        return case
    # Whole pages of other sizes are other slots.
    inside = torch.arange(size, dtype=torch.int32, device="cuda")
    slots = (private[..., None] * size + inside).flatten(1)[:, : batch.cell.private_tokens]
    return case._replace(tables=batch.tables(0, size, slots))


def _private_by_fa3(batch: Batch, q: Any, order: Any = None) -> Callable[[int], Call]:
    """The second pass of every pair."""
    tokens, lengths = batch.cell.private_tokens, batch.private_lengths
    table = batch.private_table()
    if order is not None:
        table[:, :tokens] = batch.private_slots[order]
    schedule = baselines.fa3_decode_schedule(batch.cell.heads, lengths, batch.row_starts, tokens, 1)

    def call(layer: int) -> Call:
        k, v = batch.pages(layer, 1)
        return lambda: baselines.fa3_decode(
            q, k, v, table, lengths, batch.row_starts, schedule, return_lse=True
        )

    return call


def _prefix_by_fa3(batch: Batch, q: Any) -> Callable[[int], Call]:
    """The first pass: a plain view of one segment, or one table row for each of several."""
    cell = batch.cell
    if len(cell.segments) == 1:
        return lambda layer: lambda: baselines.fa3_prefix(q, *_segment_view(batch, layer))
    counts = [len(segment.rows) for segment in cell.segments]
    starts = _int32([sum(counts[:i]) for i in range(len(counts) + 1)])
    lengths = _int32([segment.tokens for segment in cell.segments])
    ramp = torch.arange(max(lengths.tolist()), dtype=torch.int32, device="cuda")
    # Behind a shorter segment its table row runs on into the next one; its length stops FA3.
    table = (_int32(cell.bases())[:, None] + ramp).clamp(max=batch.slots - 1).contiguous()

    def call(layer: int) -> Call:
        k, v = batch.pages(layer, 1)
        return lambda: baselines.fa3_prefix_page_table(q, k, v, table, lengths, starts, max(counts))

    return call


def _pair(batch: Batch, _: Operators, backend: Backend, calls: int) -> Case:
    """Rows are sorted by segment beforehand, which an engine would have to do in every layer."""
    order = _by_segment(batch.cell)
    q = batch.q[order].contiguous()
    prefix_of, private_of = _prefix_by_fa3(batch, q), _private_by_fa3(batch, q, order)
    side = torch.cuda.Stream() if dict(backend.options)["overlap"] == "streams" else None
    return _rotated(_two_passes(prefix_of, private_of, side), calls, order)


def _cublas(batch: Batch, _: Operators, backend: Backend, calls: int) -> Case:
    def prefix_of(layer: int) -> Call:
        k, v = _segment_view(batch, layer)
        return lambda: baselines.dense_prefix(batch.q, k, v)

    return _rotated(_two_passes(prefix_of, _private_by_fa3(batch, batch.q), None), calls)


def _two_passes(
    prefix_of: Callable[[int], Call], private_of: Callable[[int], Call], side: Any
) -> Callable[[int], Call]:
    def call(layer: int) -> Call:
        prefix, private = prefix_of(layer), private_of(layer)

        def run() -> Any:
            parts = baselines.forked(prefix, private, side) if side else (prefix(), private())
            return baselines.prefix_suffix_merge(*parts)

        return run

    return call


def _flashinfer(batch: Batch, _: Operators, backend: Backend, calls: int) -> Case:
    cell = batch.cell
    base = cell.bases()[0]
    prefix = torch.arange(base, base + cell.shared_slots, dtype=torch.int32, device="cuda")
    run = baselines.flashinfer_cascade(cell.heads, cell.rows, prefix, batch.private_slots)

    def call(layer: int) -> Call:
        k, v = batch.pages(layer, 1)
        return lambda: run(batch.q, k, v)

    return _rotated(call, calls)


def _fa3_prefix(batch: Batch, _: Operators, backend: Backend, calls: int) -> Case:
    prefix_of = _prefix_by_fa3(batch, batch.q)
    return Case([prefix_of(layer) for layer in range(calls)], lambda: prefix_of(0)()[0])


def _granikv(batch: Batch, operators: Operators, backend: Backend, calls: int) -> Case:
    operator, tables, out = _planned(batch, operators, backend)
    launch = dict(backend.options).get("launch", "two_call")

    def call(layer: int) -> Call:
        k, v = batch.layer(layer)
        return lambda: operator.run(batch.q, k, v, tables, out=out, launch=launch)

    return _rotated(call, calls)


def _granikv_prefix(batch: Batch, operators: Operators, backend: Backend, calls: int) -> Case:
    """Timed without the merge; the result that is checked has gone through it."""
    operator, tables, out = _planned(batch, operators, backend)

    def call(layer: int) -> Call:
        k, v = batch.layer(layer)
        return lambda: operator.prefix_pass(batch.q, k, v, tables)

    k, v = batch.layers[0]
    return Case(
        [call(layer) for layer in range(calls)],
        lambda: operator.run(batch.q, k, v, tables, out=out),
    )


def _granikv_private(batch: Batch, operators: Operators, backend: Backend, calls: int) -> Case:
    operator, tables, out = _planned(batch, operators, backend, "private")

    def call(layer: int) -> Call:
        k, v = batch.layer(layer)

        def run() -> Any:
            operator.private_pass(batch.q, k, v, tables, out)
            return out

        return run

    return _rotated(call, calls)


def _plan(batch: Batch, operators: Operators, backend: Backend, calls: int) -> Case:
    """A step's plan; what is checked is a layer that ran by it."""
    operator, tables, out = _planned(batch, operators, backend)
    k, v = batch.layers[0]
    return Case(
        [lambda: operator.plan(tables)] * calls,
        lambda: operator.run(batch.q, k, v, tables, out=out),
    )


_FAMILIES = {
    "fa3": _fa3,
    "pair": _pair,
    "cublas": _cublas,
    "flashinfer": _flashinfer,
    "fa3_prefix": _fa3_prefix,
    "granikv": _granikv,
    "granikv_prefix": _granikv_prefix,
    "granikv_private": _granikv_private,
    "plan": _plan,
}


def _planned(
    batch: Batch, operators: Operators, backend: Backend, purpose: str = "step"
) -> tuple[SharedPrefixDecode, DecodeTables, Any]:
    operator, tables = operators.of(batch.cell.heads, purpose), batch.tables(backend.mode)
    options = dict(backend.options)
    operator.plan(tables, options.get("overlap", "serial"), options.get("prefix"))
    return operator, tables, torch.empty_like(batch.q)


def _rotated(call: Callable[[int], Call], calls: int, order: Any = None) -> Case:
    made = [call(layer) for layer in range(calls)]
    return Case(made, made[0], order)


def _segment_view(batch: Batch, layer: int) -> tuple[Any, Any]:
    k, v = batch.layer(layer)
    base = batch.cell.bases()[0]
    last = base + batch.cell.segments[0].tokens
    return k[base:last], v[base:last]


def _by_segment(cell: Cell) -> Any:
    rows = [row for segment in cell.segments for row in segment.rows]
    return torch.tensor(rows, device="cuda")


def _int32(values: list[int]) -> Any:
    return torch.tensor(values, dtype=torch.int32, device="cuda")
