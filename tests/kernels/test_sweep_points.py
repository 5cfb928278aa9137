from collections import Counter

import pytest

from granikv.cost_models.models import load_model
from granikv.kernels.shapes import Decode, Extend, Gemm
from granikv.kernels.sweep_points import MODELS, PARTS, gemm_sizes, sweep_points


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gemm_sizes_are_those_of_the_shipped_models(name, tp):
    model = load_model(name)
    layer, head = gemm_sizes(MODELS[name], tp)
    assert layer == [(gemm.n, gemm.k) for gemm in model.gemms(tp)]
    assert head == (model.lm_head(tp).n, model.lm_head(tp).k)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_heads_of_every_model_are_in_every_attention_part(name, tp):
    model = load_model(name)
    heads = (model.q_heads // tp, model.kv_heads // tp, model.head_dim)
    for part in ("decode", "shared", "prefix", "extend"):
        assert heads in {point.shape.heads for point in sweep_points([part]) if part == point.part}


def test_no_point_is_measured_twice():
    points = sweep_points()
    keys = Counter((point.op, point.backend, point.shape) for point in points)
    assert max(keys.values()) == 1


def test_tiers_come_in_order_and_roofs_first():
    points = sweep_points()
    tiers = [point.tier for point in points]
    assert tiers == sorted(tiers)
    assert [point.part for point in points[:3]] == ["roof"] * 3


def test_parts_together_are_all():
    parts = {point for part in PARTS for point in sweep_points([part])}
    every = sweep_points()
    assert len(parts) >= len(every)
    assert {(p.op, p.backend, p.shape) for p in parts} == {
        (p.op, p.backend, p.shape) for p in every
    }


def test_unknown_part_is_refused():
    with pytest.raises(ValueError, match="part must be one of"):
        sweep_points(["prefil"])


def test_sizes_stay_within_the_device_pool():
    """12 GiB of K, page tables of 512 rows over a context of 131072 tokens."""
    for point in sweep_points():
        shape = point.shape
        if isinstance(shape, Decode):
            assert shape.rows <= 512
            assert shape.prefix_tokens + shape.private_tokens <= 131_072
            assert shape.pages * shape.page_size * shape.heads.kv_bytes // 2 < 12 << 30
        if isinstance(shape, Extend):
            tokens = shape.rows * (shape.new_tokens + shape.cached_tokens)
            assert tokens * shape.heads.kv_bytes // 2 < 12 << 30
        if isinstance(shape, Gemm):
            assert 2 * shape.n * shape.k < 12 << 30


def test_gemm_covers_one_token_to_a_prefill_chunk():
    shapes = [point.shape for point in sweep_points(["gemm"]) if point.part == "gemm"]
    tokens = {shape.m for shape in shapes if (shape.n, shape.k) == (6144, 4096)}
    assert (min(tokens), max(tokens), len(tokens)) == (1, 16384, 34)


def test_several_parts_run_tier_by_tier():
    points = sweep_points(["extend", "decode"])
    tiers = [point.tier for point in points]
    assert tiers == sorted(tiers)
    assert {point.part for point in points} == {"roof", "extend", "decode"}
