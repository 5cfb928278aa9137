"""The decode operator on a CUDA device: real sizes, CUDA graphs, all modes and launches.

pytest tests/kernels -m gpu
"""

import random
from dataclasses import replace
from functools import cache

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from decode_support import (  # noqa: E402
    MODES,
    PLANNED,
    POISON,
    Shared,
    assert_within_bound,
    attend,
    check,
    check_all,
    expect,
    make_batch,
    operator,
    plan,
    run_planned,
)

from granikv.kernels.shapes import Heads  # noqa: E402
from granikv.kernels.tables import SharedSegment  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LLAMA = Heads(32, 8)
QWEN = Heads(20, 4)  # Qwen2.5-14B at TP 2
FUSED = {"launch": "fused"}
CHOICES = [
    FUSED,
    *(
        {"launch": "two_call", "overlap": overlap, "prefix": prefix}
        for overlap in ("serial", "split", "beside")
        for prefix in ("triton", "hopper")
    ),
    {"launch": "two_call", "prefix": "none"},
]
PLAIN = [
    FUSED,
    {"launch": "two_call"},
    {"launch": "two_call", "overlap": "split"},
    {"launch": "two_call", "overlap": "beside"},
    {"launch": "two_call", "prefix": "none"},
]


def _plain(heads):
    """Those that the heads have: no TMA pass for rows of 96 elements."""
    return [choice for choice in PLAIN if heads.dim != 96 or choice.get("overlap") != "beside"]


def _name(choice):
    return "-".join(str(value) for value in choice.values())


def _batch(heads, shared, private, **changes):
    settings = {"dtype": torch.bfloat16, "device": "cuda", **changes}
    return make_batch(heads, shared, private, **settings)


def _run(batch, choice, decode=None, expected=None):
    """Check one choice; a part that this device or installation lacks is a skip, named."""
    try:
        return check(batch, decode, expected, **choice)
    except NotImplementedError as missing:
        pytest.skip(str(missing))


def _mixed(heads=LLAMA, **changes):
    """Four slabs, two of them nested, rows without a slab, empty rows, padding rows."""
    shared = [
        Shared(4097, range(40)),
        Shared(515, range(10, 30)),
        Shared(331, range(12, 15), "cascade"),
        Shared(2000, range(40, 57), "cascade"),
        Shared(300, range(57, 60), "paged"),
    ]
    private = [(37 * row) % 700 for row in range(64)]
    return _batch(heads, shared, private, rows=72, width=1024, **changes)


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("choice", CHOICES, ids=_name)
def test_every_launch_of_a_mixed_batch(choice):
    out, lse = _run(_mixed(), choice)
    assert (out[64:] == 0).all()
    assert (lse[64:] == float("-inf")).all()


@pytest.mark.parametrize("choice", PLAIN, ids=_name)
@pytest.mark.parametrize("mode", sorted(MODES))
def test_every_mode(mode, choice):
    batch = _mixed(QWEN).in_mode(mode)
    decode = operator(batch)
    _run(batch, choice, decode)
    counters = decode.counters()
    runs = "cascade" if mode == "dense" and choice.get("prefix") == "none" else mode
    for other in ("dense", "cascade"):
        assert bool(counters[other]) == (runs == other)


_BF16, _FP16 = torch.bfloat16, torch.float16
# Every group and every head dimension in each dtype; all pairs would compile for an hour.
_KINDS = [
    *((group, 128, _BF16) for group in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)),
    *((group, dim, _BF16) for group in (4, 5) for dim in (64, 96, 256)),
    *((5, dim, _FP16) for dim in (64, 96, 128, 256)),
    *((group, 64, _FP16) for group in (1, 3, 7, 8, 16)),
    (12, 256, _BF16),
    (16, 96, _FP16),
]


@pytest.mark.parametrize(("group", "dim", "dtype"), _KINDS, ids=str)
def test_every_group_head_dimension_and_dtype(group, dim, dtype):
    heads = Heads(2 * group, 2, dim)
    shared = [Shared(777, range(33)), Shared(65, range(5, 20), "cascade")]
    check_all(_batch(heads, shared, [3 * row for row in range(35)], dtype=dtype), _plain(heads))


@pytest.mark.parametrize(
    ("group", "dim", "dtype"),
    [(1, 128, _BF16), (4, 64, _FP16), (5, 128, _FP16), (7, 256, _BF16), (16, 128, _BF16)],
    ids=str,
)
def test_the_hopper_pass(group, dim, dtype):
    """Whole and partial blocks, several tiles, and slabs that end where their pool is poisoned."""
    shared = [Shared(n, range(r)) for n, r in ((777, 33), (128, 9), (2049, 140), (129, 3))]
    batch = _batch(Heads(2 * group, 2, dim), shared, [row % 7 for row in range(140)], dtype=dtype)
    decode = operator(batch)
    _run(batch, {"launch": "two_call", "prefix": "hopper"}, decode)
    assert decode.counters()["dense"]


@cache
def _full_size(heads):
    batch = _batch(heads, [Shared(16_384, range(256))], [256] * 256)
    return batch, expect(batch)


@pytest.mark.parametrize("choice", CHOICES, ids=_name)
@pytest.mark.parametrize("heads", [LLAMA, QWEN], ids=str)
def test_full_size(heads, choice):
    batch, expected = _full_size(heads)
    _run(batch, choice, expected=expected)


@pytest.mark.parametrize("choice", CHOICES, ids=_name)
def test_offsets_beyond_32_bits(choice):
    """Slots behind 2.2 million: slot * 8 * 128 passes 2^31 elements."""
    batch = _batch(LLAMA, [Shared(1000, range(40))], [100] * 40, first_slot=2_200_000)
    assert batch.k.stride(0) * batch.segments[0].base > 2**31
    _run(batch, choice)


def test_row_strides_beyond_32_bits():
    """The same wrap by a wide row stride and few slots: pools of all layers side by side."""
    wide = torch.full((2, 70_000, 64 * 1024), POISON, dtype=torch.bfloat16, device="cuda")
    batch = _batch(LLAMA, [Shared(300, range(9))], [50] * 9, first_slot=69_000)
    pools = []
    for storage, pool in zip(wide, (batch.k, batch.v), strict=True):
        view = storage[: pool.shape[0], 5 * 1024 : 6 * 1024].unflatten(1, (8, 128))
        view.copy_(pool)
        pools.append(view)
    check_all(replace(batch, k=pools[0], v=pools[1]), PLAIN)


@pytest.mark.parametrize("seed", range(24))
def test_random_groupings(seed):
    dice = random.Random(seed)
    heads = dice.choice([LLAMA, QWEN, Heads(8, 1, 64), Heads(12, 4, 96), Heads(16, 2, 256)])
    rows = dice.choice([1, 7, 32, 65, 200])
    levels = [0] * rows
    shared = []
    for _ in range(dice.randint(0, 12)):
        free = [row for row in range(rows) if levels[row] < 4]
        holders = dice.sample(free, dice.randint(min(1, len(free)), len(free)))
        for row in holders:
            levels[row] += 1
        if holders:
            tokens = dice.choice([1, 31, 64, 127, 128, 129, 1000, 3333])
            shared.append(Shared(tokens, holders, dice.choice(sorted(MODES))))
    private = [dice.choice([0, 1, 17, 64, 200, 1500]) for _ in range(rows)]
    batch = _batch(
        heads, shared, private, rows=rows + dice.choice([0, 3]), groups=16, seed=seed,
        dtype=dice.choice([torch.bfloat16, torch.float16]), row_gap=dice.choice([0, 64]),
    )  # fmt: skip
    check_all(batch, _plain(batch.heads))


def test_long_private_rows_beside_short_ones():
    check_all(_batch(LLAMA, [], [60_000, 1, 0, 33, 5000]), PLAIN)


def test_lse_is_optional_and_strided():
    batch = _mixed()
    decode = operator(batch)
    for choice in PLAIN:
        want, want_lse = attend(batch, decode, **choice)
        layer = {name: value for name, value in choice.items() if name not in PLANNED}
        assert_within_bound(batch, want, want_lse)
        lse = torch.full((LLAMA.q, 80), POISON, device="cuda").T[:72]
        args = (batch.q, batch.k, batch.v, batch.tables)
        assert torch.equal(decode.run(*args, lse=lse, **layer), want)
        assert torch.equal(lse, want_lse)
        assert torch.equal(decode.run(*args, **layer), want)


def test_fa3_as_the_dense_pass():
    """With finite values behind the segments, as its module asks for."""
    batch = _mixed()
    batch = replace(batch, k=batch.k.nan_to_num(nan=3.0), v=batch.v.nan_to_num(nan=3.0))
    decode, expected = operator(batch), expect(batch)
    for _ in range(2):
        _run(batch, {"prefix": "fa3"}, decode, expected)
    _run(batch, {"overlap": "beside"}, decode, expected)


def test_forked_streams_give_the_bits_of_dependent_launches():
    batch = _mixed()
    for overlap in ("serial", "split", "beside"):
        want = check(batch, overlap=overlap)
        decode = operator(batch, dependent_launch=False)
        for _ in range(3):  # counters are set back
            for got, before in zip(attend(batch, decode, overlap=overlap), want, strict=True):
                assert torch.equal(got, before)


# ------------------------------------------------------------------ CUDA graphs


def _steps(batch):
    """Tables of steps that one captured graph must serve."""
    (slab,), own = batch.segments, batch.private_slots
    base, rows = slab.base, range(len(own))
    half = tuple(rows[: len(own) // 2])
    others = tuple(rows[len(own) // 2 :])
    return {
        "as captured": ([slab], own),
        "longer private": ([SharedSegment(base, 100, half)], own),
        "shorter": ([SharedSegment(base, 1500, slab.rows)], [slots[:3] for slots in own]),
        "two slabs": (
            [SharedSegment(base, 1000, half), SharedSegment(base + 1000, 2050, others, 1)],
            own,
        ),
        "nested": (
            [SharedSegment(base, 2000, slab.rows), SharedSegment(base + 2000, 999, half, 2)],
            own,
        ),
        "fewer live rows": ([SharedSegment(base, 3000, (0, 1))], own[:2]),
        "empty rows": ([SharedSegment(base, 3000, others, 0)], [()] * len(half)),
        "nobody": ([], []),
        "one": ([], [own[0][:1]]),
    }


@pytest.mark.parametrize("choice", CHOICES, ids=_name)
def test_a_captured_graph_follows_its_tables(choice):
    """Three layers in one graph, one plan before them, replayed with other contents."""
    batch = _batch(LLAMA, [Shared(3050, range(60))], [400] * 60, rows=64, width=512)
    decode = operator(batch)
    _run(batch, choice, decode)  # compiles, and skips what is not there
    tables = batch.tables
    results = [
        (torch.empty_like(batch.q), torch.empty(64, LLAMA.q, device="cuda")) for _ in range(3)
    ]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(batch, decode, **choice)
        layer = {name: value for name, value in choice.items() if name not in PLANNED}
        for out, lse in results:
            decode.run(batch.q, batch.k, batch.v, tables, out, lse, **layer)
    for name, (segments, private) in [*_steps(batch).items(), *_steps(batch).items()]:
        now = batch.with_tables(segments, private)
        tables.copy_from(now.tables)
        for out, lse in results:
            out.fill_(POISON)
            lse.fill_(POISON)
        graph.replay()
        torch.cuda.synchronize()
        expected = expect(now)
        for layer, (out, lse) in enumerate(results):
            try:
                assert_within_bound(now, out, lse, expected)
            except AssertionError as wrong:
                raise AssertionError(f"step {name!r}, layer {layer}: {wrong}") from wrong


def test_replays_of_one_step_agree():
    """Arrival order differs between replays; the merge order must not."""
    batch = _mixed()
    decode = operator(batch)
    for choice in PLAIN:
        want = attend(batch, decode, **choice)
        for _ in range(50):
            for got, before in zip(run_planned(batch, decode, **choice), want, strict=True):
                assert torch.equal(got, before)


# ------------------------------------------------------------------ determinism


@pytest.mark.parametrize("choice", PLAIN, ids=_name)
def test_deterministic_bits_do_not_depend_on_the_batch(choice):
    """Row 13 holds three segments and private tokens; around it everything changes."""
    batch = _mixed()
    decode = operator(batch, deterministic=True)
    out, lse = check(batch, decode, **choice)
    for keep in (1, 2, 5, 17, 33):
        rows = {13, *random.Random(keep).sample(range(64), keep)}
        segments = []
        for segment in batch.segments:
            holders = tuple(row for row in segment.rows if row in rows)
            if holders:
                segments.append(replace(segment, rows=holders))
        private = [slots if row in rows else () for row, slots in enumerate(batch.private_slots)]
        some = batch.with_tables(segments, private)
        other_out, other_lse = check(some, decode, **choice)
        for row in rows:
            assert torch.equal(other_out[row], out[row])
            assert torch.equal(other_lse[row], lse[row])


def test_deterministic_is_right_for_long_rows():
    """Fixed chunks make many parts: a row must not outgrow the room for them."""
    shared = [Shared(30_000, range(16)), Shared(2700, range(3, 9), "paged")]
    batch = _batch(LLAMA, shared, [9000] * 16, width=10_000)
    check_all(batch, PLAIN, deterministic=True)
