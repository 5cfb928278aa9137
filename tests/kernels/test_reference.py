import math

import pytest

torch = pytest.importorskip("torch")

from decode_support import MODES, POISON, Shared, make_batch  # noqa: E402

from granikv.kernels.reference import decode_error_bound, decode_reference  # noqa: E402
from granikv.kernels.shapes import Heads  # noqa: E402

HEADS = Heads(6, 2, 64)


def _reference(batch):
    return decode_reference(batch.q, batch.k, batch.v, batch.tables)


def _plain(batch, row):
    """The row's attention as torch's own functions say it."""
    slots = [
        slot for s in batch.segments if row in s.rows for slot in range(s.base, s.base + s.length)
    ]
    slots += batch.private_slots[row]
    k, v = (x[slots].double().repeat_interleave(3, 1).transpose(0, 1) for x in (batch.k, batch.v))
    q = batch.q[row, :, None].double()
    out = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0, :, 0]
    lse = torch.logsumexp((q @ k.transpose(1, 2))[:, 0] / math.sqrt(64), -1)
    return out, lse


def test_a_row_reads_its_segments_and_its_own_tokens():
    batch = make_batch(HEADS, [Shared(33, (0, 2)), Shared(9, (0,)), Shared(5, (1,))], [4, 0, 7, 12])
    out, lse = _reference(batch)
    for row in range(4):
        want, want_lse = _plain(batch, row)
        torch.testing.assert_close(out[row], want)
        torch.testing.assert_close(lse[row], want_lse)


def test_a_row_without_tokens_is_zero_and_minus_infinity():
    out, lse = _reference(make_batch(HEADS, [Shared(8, (1,))], [0, 0, 3], rows=5))
    assert (out[[0, 3, 4]] == 0).all()
    assert (lse[[0, 3, 4]] == float("-inf")).all()
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse[[1, 2]]).all()


def test_one_token_is_its_value():
    batch = make_batch(HEADS, [], [1])
    out, lse = _reference(batch)
    (slot,) = batch.private_slots[0]
    assert torch.equal(out[0], batch.v[slot].double().repeat_interleave(3, 0))
    scores = (batch.q[0].double() * batch.k[slot].double().repeat_interleave(3, 0)).sum(-1) / 8
    torch.testing.assert_close(lse[0], scores)


def test_equal_scores_give_the_logarithm_of_the_number_of_tokens():
    batch = make_batch(HEADS, [Shared(20, (0,))], [12])
    batch.q[:] = 0
    assert _reference(batch)[1].tolist() == [[pytest.approx(math.log(32))] * 6]


@pytest.mark.parametrize("mode", sorted(MODES))
def test_modes_are_not_part_of_the_value(mode):
    batch = make_batch(HEADS, [Shared(17, (0, 1))], [3, 5])
    for got, want in zip(_reference(batch.in_mode(mode)), _reference(batch), strict=True):
        assert torch.equal(got, want)


def test_what_lies_outside_the_lengths_is_not_read():
    batch = make_batch(HEADS, [Shared(17, (0, 1))], [3, 5])
    want = _reference(batch)
    batch.tables.private_slots[0, 3:] = 10**9
    batch.tables.segment_base[:, 1:] = 10**9
    batch.tables.segment_group[:, 1:] = -7
    for got, before in zip(_reference(batch), want, strict=True):
        assert torch.equal(got, before)


def test_inputs_are_not_modified():
    batch = make_batch(HEADS, [Shared(17, (0, 1))], [3, 5])
    before = [x.clone() for x in (batch.q, batch.k, batch.v)]
    _reference(batch)
    decode_error_bound(batch.q, batch.k, batch.v, batch.tables)
    for now, then in zip((batch.q, batch.k, batch.v), before, strict=True):
        assert torch.equal(now.nan_to_num(nan=7.0), then.nan_to_num(nan=7.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_where_kernels_round_stays_within_the_bound(dtype):
    """Scores and sums in fp32, weights rounded to the dtype, the result rounded once."""
    batch = make_batch(Heads(4, 4, 128), [Shared(700, (0, 1))], [99, 3], dtype=dtype, spread=3.0)
    out, lse = _reference(batch)
    room, lse_room = decode_error_bound(batch.q, batch.k, batch.v, batch.tables)
    for row in range(2):
        (segment,) = batch.segments
        slots = [*range(segment.base, segment.base + 700), *batch.private_slots[row]]
        scores = torch.einsum("hd,thd->ht", batch.q[row].float(), batch.k[slots].float())
        scores = scores * 128**-0.5
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        mixed = torch.einsum("ht,thd->hd", weights.to(dtype).float(), batch.v[slots].float())
        got = (mixed / weights.sum(-1, keepdim=True)).to(dtype)
        assert ((got.double() - out[row]).abs() <= room[row]).all()
        assert ((scores.logsumexp(-1).double() - lse[row]).abs() <= lse_room[row]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_lost_or_a_foreign_token_breaks_the_bound(dtype):
    """The bound must be tight enough to see one token of 4096 missing or doubled."""
    batch = make_batch(HEADS, [Shared(4000, (0,))], [96], dtype=dtype)
    lse = _reference(batch)[1]
    room = decode_error_bound(batch.q, batch.k, batch.v, batch.tables)[1]
    (own,) = batch.private_slots
    for slots in (own[:-1], (*own, own[-1])):
        off = _reference(batch.with_tables(private_slots=[slots]))[1]
        assert ((off - lse).abs() > room).any()


def test_bound_is_larger_for_longer_rows():
    batch = make_batch(HEADS, [Shared(64, (0, 1))], [4, 400])
    args = (batch.q, batch.k, batch.v, batch.tables)
    lse_room = decode_error_bound(*args)[1]
    short, long = batch.private_slots
    short_room = decode_error_bound(*args[:3], batch.with_tables(None, [short, long[:9]]).tables)[1]
    assert (lse_room[1] > short_room[1]).all()


def test_poison_reaches_a_result_that_reads_it():
    """What the kernels' tests rely on: a foreign slot shows."""
    batch = make_batch(HEADS, [Shared(16, (0,))], [4])
    assert math.isnan(POISON)
    tables = batch.with_tables(private_slots=[[*batch.private_slots[0], 0]]).tables
    out, lse = decode_reference(batch.q, batch.k, batch.v, tables)
    assert out.isnan().all()
    assert lse.isnan().all()
