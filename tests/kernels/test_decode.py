"""The decode operator in Triton's interpreter, against float64.

fp16 only: the interpreter multiplies bf16 matrices as integers. test_decode_gpu.py has the rest.
"""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from decode_support import (  # noqa: E402
    INTERPRETED,
    MODES,
    POISON,
    SMALL,
    Shared,
    assert_near,
    assert_within_bound,
    attend,
    check,
    make_batch,
    mixed_batch,
    operator,
    run_planned,
)
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from granikv.kernels.reference import decode_error_bound, decode_reference  # noqa: E402
from granikv.kernels.shapes import Heads  # noqa: E402
from granikv.kernels.tables import DecodeTables, SharedSegment  # noqa: E402

pytestmark = INTERPRETED

LAUNCHES = ("fused", "two_call")
FEW = settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("mode", sorted(MODES))
def test_any_mix_of_rows_is_right(mode, launch):
    batch = mixed_batch(mode)
    out, lse = check(batch, launch=launch)
    for empty in (6, 7):
        assert (out[empty] == 0).all()
        assert (lse[empty] == float("-inf")).all()


@pytest.mark.parametrize("launch", LAUNCHES)
def test_modes_may_differ_in_one_batch(launch):
    check(mixed_batch().with_tables(modes=[2, 0, 1]), launch=launch)


@pytest.mark.parametrize(
    "heads",
    [
        Heads(1, 1, 64),
        Heads(4, 2, 96),
        Heads(3, 1, 128),
        Heads(5, 1, 64),
        Heads(6, 1, 64),
        Heads(7, 1, 96),
        Heads(8, 1, 64),
        Heads(12, 1, 64),
        Heads(16, 1, 64),
        Heads(5, 1, 256),
    ],
    ids=lambda heads: f"group{heads.q // heads.kv}-dim{heads.dim}",
)
def test_groups_and_head_dimensions(heads):
    check(make_batch(heads, [Shared(150, (0, 1, 2)), Shared(40, (1, 2), "cascade")], [9, 0, 3]))


def test_more_rows_than_one_tile_holds():
    """Group 16: a tile of 128 packed rows has 8 requests."""
    check(make_batch(Heads(16, 1, 64), [Shared(140, range(11))], [1] * 11))


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127, 128, 129])
def test_last_block_is_partial_or_whole(tokens):
    """One length for both passes; slabs start at odd slots, so nothing is page-aligned."""
    check(make_batch(Heads(2, 1, 64), [Shared(tokens, (0, 1))], [tokens, 0]))


@pytest.mark.parametrize("mode", sorted(MODES))
def test_four_levels_and_nothing_private(mode):
    shared = [Shared(n, rows, mode) for n, rows in ((70, range(4)), (33, (0, 1, 2)), (9, (1, 2)))]
    check(make_batch(SMALL, [*shared, Shared(1, (2,), mode)], [0, 0, 0, 0]))


def test_segments_need_not_come_first_in_a_row():
    batch = mixed_batch()
    tables = batch.tables
    for name in ("segment_base", "segment_length", "segment_group"):
        table = getattr(tables, name)
        table[1] = table[1].flip(0)
        table[4] = table[4].roll(2)
    check(batch)


def test_no_segment_at_all():
    check(make_batch(SMALL, [], [130, 0, 1, 64]))


def test_nobody_has_a_token():
    out, lse = attend(make_batch(SMALL, [], [], rows=3))
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


def test_steep_softmax():
    """Scores of +-200: sums of raw exponentials would overflow, and most weights vanish."""
    check(make_batch(SMALL, [Shared(150, (0, 1))], [40, 3], spread=60.0))


@pytest.mark.parametrize("launch", LAUNCHES)
def test_lse_is_base_e(launch):
    """Equal scores: the log of the number of tokens, whatever the pieces."""
    batch = mixed_batch()
    batch.q[:] = 0
    _, lse = attend(batch, launch=launch)
    tokens = batch.tables.segment_length.sum(1) + batch.tables.private_length
    want = tokens.double().log()[:, None].expand(-1, SMALL.q)
    assert_near(lse, want, torch.full_like(want, 1e-5), "lse")
    scores = torch.logsumexp(torch.zeros(int(tokens[0])), 0)
    assert lse[0, 0] == pytest.approx(float(scores), abs=1e-5)


# ------------------------------------------------------------------ memory


def test_strides_of_pools_queries_and_results():
    batch = mixed_batch(row_gap=24)
    assert batch.k.stride(0) == SMALL.kv * SMALL.dim + 24
    decode = operator(batch)
    decode.plan(batch.tables)
    for launch in LAUNCHES:
        wide = torch.full((8, SMALL.q * SMALL.dim + 40), float("nan"), dtype=batch.q.dtype)
        out = wide[:, : SMALL.q * SMALL.dim].unflatten(1, (SMALL.q, SMALL.dim))
        lse = torch.full((SMALL.q, 11), float("nan")).T[:8]  # [num_q_heads, rows], padded
        decode.run(batch.q, batch.k, batch.v, batch.tables, out, lse, launch=launch)
        assert_within_bound(batch, out, lse)
        assert wide[:, SMALL.q * SMALL.dim :].isnan().all()
        assert lse._base.T[8:].isnan().all()


def test_garbage_behind_the_lengths_is_not_used():
    batch = mixed_batch()
    want = attend(batch)
    tables = batch.tables
    beyond = torch.arange(tables.width)[None, :] >= tables.private_length[:, None]
    for garbage in (-1, 2**31 - 1, 0):
        tables.private_slots[beyond] = garbage
        none = tables.segment_length == 0
        tables.segment_base[none] = garbage
        tables.segment_group[none] = garbage
        for got, before in zip(attend(batch), want, strict=True):
            assert torch.equal(got, before)


def test_results_are_made_when_not_given_and_lse_is_optional():
    batch = mixed_batch()
    decode = operator(batch)
    decode.plan(batch.tables)
    for launch in LAUNCHES:
        want, _ = run_planned(batch, decode, launch=launch)
        out = decode.run(batch.q, batch.k, batch.v, batch.tables, launch=launch)
        assert out.dtype == batch.q.dtype
        assert torch.equal(out, want)


def test_inputs_are_not_modified():
    batch = mixed_batch()
    inputs = [batch.q, batch.k, batch.v]
    inputs += [getattr(batch.tables, name) for name in DecodeTables.__dataclass_fields__]
    before = [x.clone() for x in inputs]
    attend(batch)
    for now, then in zip(inputs, before, strict=True):
        assert torch.equal(now.nan_to_num(nan=7.0), then.nan_to_num(nan=7.0))


def test_wrong_arguments_are_refused():
    batch = mixed_batch()
    decode = operator(batch)
    decode.plan(batch.tables)
    args = (batch.q, batch.k, batch.v, batch.tables)
    with pytest.raises(ValueError, match="launch must be"):
        decode.run(*args, launch="one")
    for choice in ({"overlap": "some"}, {"prefix": "fa9"}):
        with pytest.raises(ValueError, match="must be"):
            decode.plan(batch.tables, **choice)
    with pytest.raises(ValueError, match="q must be of shape"):
        decode.run(batch.q[:3], *args[1:])
    with pytest.raises(ValueError, match="rows of tables"):
        decode.plan(make_batch(SMALL, [], [1] * 12).tables)
    with pytest.raises(NotImplementedError, match="head_dim"):
        operator(make_batch(Heads(4, 2, 80), [], [1]))


@pytest.mark.parametrize(
    "choice",
    [{"prefix": "hopper"}, {"overlap": "split"}, {"overlap": "beside"}],
    ids=lambda choice: "-".join(*choice.items()),
)
def test_a_part_that_the_device_lacks_is_refused_and_not_replaced(choice):
    batch = make_batch(SMALL, [Shared(140, (0, 1))], [3, 4])
    with pytest.raises(NotImplementedError):
        attend(batch, launch="two_call", **choice)


# ------------------------------------------------------------------ one operator, many steps


@pytest.mark.parametrize("launch", LAUNCHES)
def test_one_plan_serves_all_layers(launch):
    """Counters of the first layer must not be left over for the second."""
    first = mixed_batch()
    second = replace(first, q=first.q.flip(0), k=first.k * 0.5, v=first.v.flip(2))
    decode = operator(first)
    decode.plan(first.tables)
    for batch in (first, second, first):
        assert_within_bound(batch, *run_planned(batch, decode, launch=launch))


@pytest.mark.parametrize("launch", LAUNCHES)
def test_tables_may_change_between_steps(launch):
    """Longer, shorter, other groups, other modes, fewer live rows: what a replayed graph sees."""
    batch = make_batch(SMALL, [Shared(200, (0, 1, 2, 3))], [64, 64, 64, 64, 9], rows=6, width=80)
    (slab,), own = batch.segments, batch.private_slots
    base, tables = slab.base, batch.tables
    steps = [
        ([slab], own),
        ([SharedSegment(base, 150, (0, 3, 4))], [row[:9] for row in own]),
        ([SharedSegment(base + 3, 140, (1, 2)), SharedSegment(base + 50, 70, (0,), 1)], own[:3]),
        ([], []),
        ([SharedSegment(base, 130, (5,), 0), SharedSegment(base + 130, 70, (5, 0), 1)], own),
    ]
    decode = operator(batch)
    for segments, private in steps:
        now = batch.with_tables(segments, private)
        tables.copy_from(now.tables)
        check(now, decode, launch=launch)


def test_fewer_rows_than_the_operator_has_room_for():
    batch = mixed_batch()
    decode = operator(batch, max_rows=20, max_groups=12, max_private_tokens=200)
    check(batch, decode)
    small = make_batch(SMALL, [Shared(150, (0,))], [3, 2])
    check(small, decode)


@pytest.mark.parametrize(
    ("mode", "ran"), [("dense", {"dense"}), ("cascade", {"cascade"}), ("paged", set())]
)
def test_the_mode_asked_for_is_the_one_that_ran(mode, ran):
    batch = make_batch(SMALL, [Shared(140, (0, 1)), Shared(150, (2,))], [3, 4, 0]).in_mode(mode)
    decode = operator(batch)
    check(batch, decode)
    counters = decode.counters()
    assert {name for name in ("dense", "cascade") if counters[name]} == ran
    # Each row of a paged segment is a private tile, and so is each row's own piece.
    private = 2 + (3 if mode == "paged" else 0)
    assert counters["private"] >= private


def test_a_segment_too_short_for_dense_is_still_right():
    batch = make_batch(SMALL, [Shared(5, (0, 1), "dense")], [3, 4])
    decode = operator(batch)
    check(batch, decode)
    assert decode.counters()["dense"] == 0


# ------------------------------------------------------------------ determinism


def test_deterministic_bits_do_not_depend_on_the_batch():
    batch = mixed_batch()
    decode = operator(batch, deterministic=True)
    want = check(batch, decode)
    alone = batch.with_tables(
        [SharedSegment(s.base, s.length, tuple({1} & set(s.rows)), s.mode) for s in batch.segments],
        [(), batch.private_slots[1]],
    )
    for got, before in zip(attend(alone, decode), want, strict=True):
        assert torch.equal(got[1], before[1])


# ------------------------------------------------------------------ properties


@FEW
@given(seed=st.integers(0, 2**16))
def test_where_the_slots_lie_is_not_seen(seed):
    """The same tokens in other slots and slabs, and unused slots elsewhere: the same bits."""
    batch = mixed_batch()
    want = attend(batch)
    generator = torch.Generator().manual_seed(seed)
    shift = 1 + seed % 9
    slabs = max(segment.base + segment.length for segment in batch.segments) + shift
    place = torch.randperm(batch.k.shape[0], generator=generator) + slabs
    segments = [replace(segment, base=segment.base + shift) for segment in batch.segments]
    private = [place[list(slots)].tolist() for slots in batch.private_slots]
    pools = []
    for pool in (batch.k, batch.v):
        moved = torch.full((2 * pool.shape[0] + shift, *pool.shape[1:]), POISON, dtype=pool.dtype)
        for old, new in zip(batch.segments, segments, strict=True):
            moved[new.base : new.base + new.length] = pool[old.base : old.base + old.length]
        for old, new in zip(batch.private_slots, private, strict=True):
            moved[new] = pool[list(old)]
        pools.append(moved)
    elsewhere = replace(batch.with_tables(segments, private), k=pools[0], v=pools[1])
    for got, before in zip(attend(elsewhere), want, strict=True):
        assert torch.equal(got, before)


_TOKENS = 210
_ROWS = 3


@st.composite
def _partitions(draw):
    """Cuts of one run of slots: up to four segments, then private tokens, with their modes."""
    cuts = sorted(draw(st.lists(st.integers(1, _TOKENS), min_size=1, max_size=4, unique=True)))
    modes = draw(st.lists(st.integers(0, 2), min_size=len(cuts), max_size=len(cuts)))
    private_first = draw(st.booleans())
    return cuts, modes, private_first


@FEW
@given(partition=_partitions(), launch=st.sampled_from(LAUNCHES))
def test_how_tokens_are_divided_is_not_seen(partition, launch):
    """Tokens moved between a segment and the rows' own, and segments cut into nested ones."""
    cuts, modes, private_first = partition
    own = [7, 0, 30]
    batch = make_batch(SMALL, [Shared(_TOKENS, range(_ROWS))], own, width=_TOKENS + 40)
    want, want_lse = decode_reference(batch.q, batch.k, batch.v, batch.tables)
    room, lse_room = decode_error_bound(batch.q, batch.k, batch.v, batch.tables)
    base = batch.segments[0].base
    rows = tuple(range(_ROWS))
    starts = [0, *cuts[:-1]]
    segments = [
        SharedSegment(base + start, end - start, rows, mode)
        for start, end, mode in zip(starts, cuts, modes, strict=True)
    ]
    rest = tuple(range(base + cuts[-1], base + _TOKENS))
    private = [rest + slots if private_first else slots + rest for slots in batch.private_slots]
    out, lse = attend(batch.with_tables(segments, private), launch=launch)
    assert_near(lse, want_lse, lse_room, "lse")
    assert_near(out, want, room, "out")


def test_private_slots_may_lie_anywhere_in_an_engines_table():
    batch = mixed_batch()
    want = attend(batch)
    tables = batch.tables
    rows, width = tables.rows, tables.width
    place = torch.arange(rows).flip(0) * 2 + 1
    start = torch.arange(rows) % 5 + 2
    wide = torch.full((2 * rows + 1, width + 7), 2**31 - 1, dtype=torch.int32)
    for row in range(rows):
        wide[place[row], start[row] : start[row] + width] = tables.private_slots[row]
    moved = replace(
        tables,
        private_slots=wide,
        private_row=place.to(torch.int32),
        private_start=start.to(torch.int32),
    )
    got = attend(replace(batch, tables=moved))
    for one, before in zip(got, want, strict=True):
        assert torch.equal(one, before)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_segments_may_lie_in_any_slots_of_an_engines_table(launch):
    """The same KV, scattered: what was a slab is read through a row of one of its readers."""
    batch = mixed_batch("cascade")
    want = attend(batch, launch=launch)
    tables, rows = batch.tables, batch.tables.rows
    place = torch.randperm(len(batch.k), generator=torch.Generator().manual_seed(1))
    k, v = torch.empty_like(batch.k), torch.empty_like(batch.v)
    k[place], v[place] = batch.k, batch.v
    shared = tables.segment_length.sum(1)
    wide = torch.full((rows, tables.width + int(shared.max())), 2**31 - 1, dtype=torch.int32)
    base = torch.zeros_like(tables.segment_base)
    readers = {}
    for row in range(rows):
        column = 0
        for level in range(4):
            first, tokens = (
                int(x[row, level]) for x in (tables.segment_base, tables.segment_length)
            )
            wide[row, column : column + tokens] = place[first : first + tokens]
            column += tokens
            if tokens:
                base[row, level] = -1 - readers.setdefault(first, row)
        own = tables.private_slots[row, : int(tables.private_length[row])].long()
        wide[row, column : column + len(own)] = place[own]
    assert len(readers) == 3
    scattered = replace(
        tables, segment_base=base, private_slots=wide, private_start=shared.to(torch.int32)
    )
    moved = replace(batch, k=k, v=v, tables=scattered)
    for mode in (0, 1, 2):  # it is a cascade all the same
        scattered.group_mode[:3] = mode
        out, lse = check(moved, launch=launch)
        for got, before in zip((out, lse), want, strict=True):
            assert torch.equal(got, before)
