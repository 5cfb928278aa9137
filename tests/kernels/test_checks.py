from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from decode_support import Shared, make_batch  # noqa: E402

from granikv.kernels.checks import (  # noqa: E402
    GROUPS,
    HEAD_DIMS,
    DecodeLimits,
    check_call,
    check_tables,
)
from granikv.kernels.shapes import Heads  # noqa: E402

HEADS = Heads(8, 2, 64)


def _limits(**changes):
    limits = {
        "max_rows": 4,
        "heads": HEADS,
        "max_groups": 8,
        "max_private_tokens": 16,
        "dtype": torch.float16,
        "device": "cpu",
    }
    return DecodeLimits(**{**limits, **changes})


def _call(**changes):
    batch = make_batch(HEADS, [Shared(8, (0, 1))], [3, 5, 0], width=16)
    call = {"q": batch.q, "k": batch.k, "v": batch.v, "tables": batch.tables, **changes}
    check_call(_limits(), **call)


def _half(*shape):
    return torch.zeros(shape, dtype=torch.float16)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("group", GROUPS)
def test_supported_heads_pass(dim, group):
    assert _limits(heads=Heads(group * 2, 2, dim)).group == group


@pytest.mark.parametrize("dim", [16, 32, 48, 80, 112, 160, 192, 512])
def test_other_head_dimensions_are_not_implemented(dim):
    with pytest.raises(NotImplementedError, match=f"head_dim must be one of .* got {dim}"):
        _limits(heads=Heads(8, 2, dim))


@pytest.mark.parametrize("group", [9, 10, 11, 13, 14, 15, 17, 32, 64])
def test_other_groups_are_not_implemented(group):
    with pytest.raises(NotImplementedError, match=f"group must be one of .* got {group}"):
        _limits(heads=Heads(group, 1, 64))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
)
def test_other_dtypes_are_not_implemented(dtype):
    with pytest.raises(NotImplementedError, match="dtype must be bfloat16 or float16, got torch"):
        _limits(dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_rows": 0}, "max_rows must be positive, got 0"),
        ({"max_groups": -1}, "max_groups must be positive, got -1"),
        ({"max_private_tokens": 0}, "max_private_tokens must be positive"),
        ({"heads": Heads(9, 2, 64)}, "num_q_heads must be a multiple of 2, got 9"),
        ({"heads": Heads(0, 2, 64)}, "num_q_heads must be positive"),
        ({"heads": Heads(8, 0, 64)}, "num_kv_heads must be positive"),
    ],
)
def test_impossible_limits_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        _limits(**changes)


def test_a_right_call_passes():
    _call()
    _call(out=_half(3, 8, 64), lse=torch.zeros(3, 8))


def test_strided_tensors_pass():
    """Pools and queries cut out of wider ones, and an LSE kept `[num_q_heads, rows]`."""
    wide = {name: _half(n, 2, 144)[:, 0, :128] for name, n in (("k", 40), ("v", 40))}
    pools = {name: x.unflatten(1, (2, 64)) for name, x in wide.items()}
    q = _half(3, 8 * 64 + 8)[:, : 8 * 64].unflatten(1, (8, 64))
    _call(**pools, q=q, out=torch.zeros_like(q), lse=torch.zeros(8, 3).T)
    _call(lse=torch.zeros(3, 11)[:, :8])


def test_one_row_and_one_head_may_have_any_stride():
    q = _half(8, 64)[None]
    batch = make_batch(HEADS, [], [3], width=16)
    check_call(_limits(), q, batch.k, batch.v, batch.tables)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("q", _half(2, 8, 64), r"q must be of shape \[3, 8, 64\], got \[2, 8, 64\]"),
        ("q", _half(3, 4, 64), "q must be of shape"),
        ("q", _half(3, 512), r"q must be of shape \[3, 8, 64\], got \[3, 512\]"),
        ("k", _half(40, 4, 64), r"k must be of shape \[any, 2, 64\], got \[40, 4, 64\]"),
        ("k", _half(40, 2, 128), "k must be of shape"),
        ("v", _half(41, 2, 64), r"v must be of shape \[\d+, 2, 64\], got \[41, 2, 64\]"),
        ("out", _half(4, 8, 64), "out must be of shape"),
        ("lse", torch.zeros(8, 3), r"lse must be of shape \[3, 8\], got \[8, 3\]"),
        ("q", torch.zeros(3, 8, 64), "q must be torch.float16, got torch.float32"),
        ("k", torch.zeros(40, 2, 64), "k must be torch.float16"),
        ("v", torch.zeros(40, 2, 64, dtype=torch.bfloat16), "v must be"),
        ("out", torch.zeros(3, 8, 64), "out must be torch.float16"),
        ("lse", _half(3, 8), "lse must be torch.float32, got torch.float16"),
        ("q", _half(3, 8, 64).to("meta"), "q must be on cpu, got meta"),
        ("lse", torch.zeros(3, 8, device="meta"), "lse must be on cpu, got meta"),
        ("q", _half(3, 64, 8).transpose(1, 2), "q must be contiguous in its last two"),
        ("q", _half(3, 16, 64)[:, ::2], "q must be contiguous in its last two"),
        ("k", _half(40, 2, 128)[..., ::2], "k must be contiguous in its last two"),
        ("k", _half(2, 40, 64).transpose(0, 1), "k must be contiguous in its last two"),
        ("q", _half(3, 516)[:, :512].unflatten(1, (8, 64)), "q must have a row stride .* got 516"),
        ("k", _half(40, 129)[:, :128].unflatten(1, (2, 64)), "multiple of 8 elements, got 129"),
        ("q", _half(3 * 512 + 4)[4:].view(3, 8, 64), "q must start at a multiple of 16 bytes"),
        ("out", _half(1, 8, 64).expand(3, 8, 64), "out must not overlap itself"),
        ("lse", torch.zeros(1, 8).expand(3, 8), "lse must not overlap itself"),
        ("q", [[0.0]], "q must be a tensor, got list"),
    ],
)
def test_a_wrong_tensor_is_named(name, tensor, message):
    pools = {"k": _half(40, 2, 64), "v": _half(40, 2, 64)} if name == "k" else {}
    with pytest.raises(ValueError, match=message):
        _call(**{**pools, name: tensor})


@pytest.mark.parametrize(
    ("name", "table", "message"),
    [
        ("segment_base", torch.zeros(3, 3, dtype=torch.int32), r"must be of shape \[3, 4\]"),
        ("segment_length", torch.zeros(2, 4, dtype=torch.int32), r"must be of shape \[3, 4\]"),
        ("segment_group", torch.zeros(3, 4), "segment_group must be torch.int32, got torch.float"),
        ("segment_base", torch.zeros(3, 4, dtype=torch.int64), "must be torch.int32"),
        ("group_mode", torch.zeros(9, dtype=torch.int32), r"groups of tables must be in \[1, 8\]"),
        ("private_slots", torch.zeros(3, 17, dtype=torch.int32), "width of private_slots must be"),
        ("private_slots", torch.zeros(16, dtype=torch.int32), "private_slots must be of shape"),
        ("private_row", torch.zeros(4, dtype=torch.int32), "private_row must be of shape"),
        ("private_start", torch.zeros(3), "private_start must be torch.int32"),
        ("private_length", torch.zeros(3, 1, dtype=torch.int32), "of one dimension"),
        (
            "private_length",
            torch.zeros(5, dtype=torch.int32),
            r"rows of tables must be in \[1, 4\]",
        ),
        ("private_slots", torch.zeros(16, 3, dtype=torch.int32).T, "must be contiguous"),
        ("segment_base", torch.zeros(3, 4, dtype=torch.int32, device="meta"), "on cpu, got meta"),
    ],
)
def test_a_wrong_table_is_named(name, table, message):
    tables = make_batch(HEADS, [Shared(8, (0, 1))], [3, 5, 0], width=16).tables
    with pytest.raises(ValueError, match=message):
        check_tables(_limits(), replace(tables, **{name: table}))
