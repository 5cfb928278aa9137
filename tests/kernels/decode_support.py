"""What the decode kernels' tests share: batches in a poisoned pool, one call, the comparison."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch

from granikv.kernels.reference import decode_error_bound, decode_reference
from granikv.kernels.shapes import Heads
from granikv.kernels.tables import (
    MODE_CASCADE,
    MODE_DENSE,
    MODE_PAGED,
    DecodeTables,
    SharedSegment,
    tables_of,
)

MODES = {"paged": MODE_PAGED, "cascade": MODE_CASCADE, "dense": MODE_DENSE}
PLANNED = ("overlap", "prefix")  # choices of a plan; the others are of a layer
POISON = float("nan")  # in every slot that belongs to nobody
SMALL = Heads(4, 2, 64)

# Marks of tests that Triton's interpreter runs.
INTERPRETED = [
    pytest.mark.skipif(
        torch.cuda.is_available(),
        reason="runs in Triton's interpreter, which a CUDA device replaces",
    ),
    # Triton's interpreter makes numbers of one-element arrays.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]


class Shared(NamedTuple):
    """A segment before it has a place: `tokens` read by `rows` in `mode`."""

    tokens: int
    rows: Sequence[int]
    mode: str = "dense"


@dataclass(frozen=True)
class Batch:
    """One decode step: pools, queries, and who reads what."""

    heads: Heads
    q: Any
    k: Any
    v: Any
    segments: tuple[SharedSegment, ...]
    private_slots: tuple[tuple[int, ...], ...]
    tables: DecodeTables

    def with_tables(
        self,
        segments: Sequence[SharedSegment] | None = None,
        private_slots: Sequence[Sequence[int]] | None = None,
        modes: Sequence[int] | None = None,
    ) -> "Batch":
        """The same pools and queries read through other tables of the same room."""
        segments = self.segments if segments is None else tuple(segments)
        if modes is not None:
            segments = tuple(
                replace(segment, mode=mode) for segment, mode in zip(segments, modes, strict=True)
            )
        own = self.private_slots if private_slots is None else private_slots
        own = tuple(tuple(slots) for slots in own)
        room = (self.tables.rows, self.tables.width, self.tables.groups)
        tables = tables_of(segments, own, None, *room, self.q.device)
        return replace(self, segments=segments, private_slots=own, tables=tables)

    def in_mode(self, mode: str) -> "Batch":
        """The same batch with all segments in one mode."""
        return self.with_tables(modes=[MODES[mode]] * len(self.segments))


def make_batch(
    heads: Heads,
    shared: Sequence[Shared],
    private_tokens: Sequence[int],
    *,
    dtype: Any = torch.float16,
    device: Any = "cpu",
    rows: int | None = None,
    width: int | None = None,
    groups: int = 8,
    seed: int = 0,
    row_gap: int = 0,
    first_slot: int = 1,
    spread: float = 1.0,
) -> Batch:
    """Random batch; segments start at odd slots with poisoned slots on both sides.

    Args:
        private_tokens: of each live row; rows after them, up to `rows`, are padding.
        row_gap: unused elements behind each token of the pools and each row of the queries.
        first_slot: everything lies at or behind it.
        spread: standard deviation of queries; larger ones make the softmax steeper.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    rows = len(private_tokens) if rows is None else rows
    width = max([1, *private_tokens]) + 5 if width is None else width
    cursor, segments = first_slot | 1, []
    for tokens, holders, mode in shared:
        segments.append(SharedSegment(cursor, tokens, tuple(holders), MODES[mode]))
        cursor += tokens + 2 + tokens % 2  # the next odd slot behind at least two unused ones
    total = sum(private_tokens)
    order = torch.randperm(total + 16, generator=generator, device=device)[:total] + cursor
    own, taken = [], order.tolist()
    for tokens in private_tokens:
        own.append(tuple(taken[:tokens]))
        taken = taken[tokens:]
    slots = cursor + total + 16

    def poisoned(count: int, per_token: int) -> Any:
        shape = (count, per_token * heads.dim + row_gap)
        return torch.full(shape, POISON, dtype=dtype, device=device)

    def randn(count: int, per_token: int) -> Any:
        shape = (count, per_token, heads.dim)
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def pool() -> Any:
        view = poisoned(slots, heads.kv)[:, : heads.kv * heads.dim]
        view = view.unflatten(1, (heads.kv, heads.dim))
        for segment in segments:
            view[segment.base : segment.base + segment.length] = randn(segment.length, heads.kv)
        view[order] = randn(total, heads.kv)
        return view

    q = poisoned(rows, heads.q)[:, : heads.q * heads.dim].unflatten(1, (heads.q, heads.dim))
    q[:] = (randn(rows, heads.q).float() * spread).to(dtype)
    tables = tables_of(segments, own, None, rows, width, groups, device)
    return Batch(heads, q, pool(), pool(), tuple(segments), tuple(own), tables)


def mixed_batch(mode: str = "dense", **changes: Any) -> Batch:
    """Two slabs of different length, a nested one, a row without a slab, an empty row, padding."""
    shared = [Shared(203, (0, 1, 2), mode), Shared(131, (4, 5), mode), Shared(17, (1, 2), mode)]
    return make_batch(SMALL, shared, [5, 1, 0, 70, 33, 0, 0], rows=8, **changes)


def operator(batch: Batch, **choices: Any) -> Any:
    """A decode operator with some room around the batch."""
    from granikv.kernels.decode import SharedPrefixDecode

    sizes = {
        "max_rows": batch.tables.rows + 3,
        "max_groups": batch.tables.groups,
        "max_private_tokens": batch.tables.width,
    }
    sizes.update({name: choices.pop(name) for name in list(choices) if name in sizes})
    return SharedPrefixDecode(
        sizes["max_rows"],
        batch.heads,
        sizes["max_groups"],
        sizes["max_private_tokens"],
        batch.q.dtype,
        batch.q.device,
        **choices,
    )


def attend(batch: Batch, decode: Any = None, **choices: Any) -> tuple[Any, Any]:
    """Plan and run into poisoned results, so that what is not written shows."""
    decode = operator(batch) if decode is None else decode
    plan(batch, decode, **choices)
    return run_planned(batch, decode, **choices)


def plan(batch: Batch, decode: Any, **choices: Any) -> None:
    """Plan with those of the choices that belong to a plan."""
    decode.plan(batch.tables, **{name: choices[name] for name in PLANNED if name in choices})


def run_planned(batch: Batch, decode: Any, **choices: Any) -> tuple[Any, Any]:
    """Run with the plan that is there, and those of the choices that belong to a layer."""
    choices = {name: choice for name, choice in choices.items() if name not in PLANNED}
    out = torch.full_like(batch.q, POISON, memory_format=torch.contiguous_format)
    lse = torch.full(batch.q.shape[:2], POISON, dtype=torch.float32, device=batch.q.device)
    result = decode.run(batch.q, batch.k, batch.v, batch.tables, out, lse, **choices)
    assert result.data_ptr() == out.data_ptr()
    return out, lse


class Expected(NamedTuple):
    """The reference's results and how far a kernel's may be from them."""

    out: Any
    lse: Any
    out_room: Any
    lse_room: Any


def expect(batch: Batch) -> Expected:
    """What the batch must give; takes seconds for a large one, so share it between launches."""
    args = (batch.q, batch.k, batch.v, batch.tables)
    return Expected(*decode_reference(*args), *decode_error_bound(*args))


def assert_within_bound(batch: Batch, out: Any, lse: Any, expected: Expected | None = None) -> None:
    """Compare with the float64 reference, row by row and element by element."""
    want = expect(batch) if expected is None else expected
    assert_near(lse, want.lse, want.lse_room, "lse")
    assert_near(out, want.out, want.out_room, "out")


def assert_near(got: Any, want: Any, room: Any, name: str) -> None:
    """`|got - want| <= room`, infinities equal, no NaN."""
    got = got.double()
    equal = got == want  # infinities too
    error = torch.where(equal, 0.0, (got - want).abs())
    excess = torch.where(equal, 0.0, error / room.clamp_min(1e-300))
    worst = float(excess.nan_to_num(nan=float("inf")).max())
    where = int(excess.nan_to_num(nan=float("inf")).flatten(1).amax(1).argmax())
    assert worst <= 1, f"{name} is off by {worst:.2f} times its bound, worst in row {where}"


def check(
    batch: Batch, decode: Any = None, expected: Expected | None = None, **choices: Any
) -> tuple[Any, Any]:
    """Plan, run and compare; returns what came out."""
    out, lse = attend(batch, decode, **choices)
    if expected is None:
        expected = expect(batch)
    assert_within_bound(batch, out, lse, expected)
    return out, lse


def check_all(batch: Batch, choices: Sequence[dict[str, str]], **operator_choices: Any) -> None:
    """Check several launches of one operator."""
    decode, expected = operator(batch, **operator_choices), expect(batch)
    for choice in choices:
        check(batch, decode, expected, **choice)
