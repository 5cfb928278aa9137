"""The points of the H200 sweep: which calls are measured, and in which order.

A point has a tier: 1 is what a fit cannot do without, 3 is a finer grid. The sweep runs tier by
tier over all parts, so that a short budget cuts detail, never a whole part.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from granikv.kernels.shapes import (
    Decode,
    Elementwise,
    Extend,
    Gemm,
    GraphLaunch,
    Heads,
    KvCopy,
    Merge,
    PrefixPass,
    PrefixSuffix,
    Shape,
    Stream,
)

PARTS = ("roof", "gemm", "small", "decode", "shared", "prefix", "extend")

# Per-rank heads of Llama-3.1-8B at TP 1 and 4, Qwen2.5-14B/32B at TP 1, 2 and 4, Llama at TP 2.
LLAMA, QWEN, QWEN_TP2, QWEN_TP4 = Heads(32, 8), Heads(40, 8), Heads(20, 4), Heads(10, 2)
LLAMA_TP4, LLAMA_TP2 = Heads(8, 2), Heads(16, 4)
MODEL_HEADS = (LLAMA, QWEN, QWEN_TP2, QWEN_TP4, LLAMA_TP4, LLAMA_TP2)

_GEMM_M = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 16384)
_GEMM_M_BETWEEN = (12, 24, 40, 56, 80, 112, 160, 224, 320, 448, 768, 1536, 3072, 6144, 12288)
_MAX_HEAD_M = 1024  # the output head only sees rows that sample
_MAX_DECODE_TOKENS = 1_572_864
_MAX_EXTEND_TOKENS = 16_384
_MAX_CACHED_TOKENS = 262_144
_MAX_SHARED_GUESS_US = 15_000.0


class ModelSizes(NamedTuple):
    """Sizes of a model that decide its matrix products."""

    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int


MODELS = {
    "llama-3.1-8b": ModelSizes(4096, 14336, 32, 8, 128, 128256),
    "qwen2.5-14b": ModelSizes(5120, 13824, 40, 8, 128, 152064),
    "qwen2.5-32b": ModelSizes(5120, 27648, 40, 8, 128, 152064),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One measured call: which part of the sweep, how badly it is needed, what runs on what."""

    part: str
    tier: int
    op: str
    backend: str
    shape: Shape


def sweep_points(parts: Sequence[str] = PARTS) -> list[Point]:
    """Points of some parts, and always the roofs, without repeats, in the order they are to run.

    Raises:
        ValueError: no such part.
    """
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"part must be one of {', '.join(PARTS)}, got {part}")
    names = [name for name in PARTS if name == "roof" or name in parts]
    points = [point for name in names for point in _BUILDERS[name]()]
    points.sort(key=lambda point: (point.tier, names.index(point.part)))
    first: dict[tuple[str, str, Shape], Point] = {}
    for point in points:
        first.setdefault((point.op, point.backend, point.shape), point)
    return list(first.values())


def gemm_sizes(model: ModelSizes, tp: int) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """`(n, k)` of the layer's products (qkv, output, gate and up, down) and of the output head."""
    q_width = model.q_heads * model.head_dim // tp
    kv_width = max(1, model.kv_heads // tp) * model.head_dim
    layer = [
        (q_width + 2 * kv_width, model.hidden),
        (model.hidden, q_width),
        (2 * model.intermediate // tp, model.hidden),
        (model.hidden, model.intermediate // tp),
    ]
    return layer, (model.vocab // tp, model.hidden)


def _roofs() -> Iterator[Point]:
    yield Point("roof", 1, "roof_read", "torch_sum", Stream(4 << 30))
    yield Point("roof", 1, "roof_copy", "torch_copy", Stream(8 << 30))
    yield Point("roof", 1, "gemm", "cublas", Gemm(8192, 8192, 8192))


def _gemms() -> Iterator[Point]:
    for tp, model in product((1, 2, 4), MODELS.values()):
        layer, head = gemm_sizes(model, tp)
        for n, k in layer:
            yield from (Point("gemm", 1, "gemm", "cublas", Gemm(m, n, k)) for m in _GEMM_M)
            yield from (Point("gemm", 3, "gemm", "cublas", Gemm(m, n, k)) for m in _GEMM_M_BETWEEN)
        sampled = (m for m in _GEMM_M if m <= _MAX_HEAD_M)
        yield from (Point("gemm", 1, "gemm", "cublas", Gemm(m, *head)) for m in sampled)


def _small() -> Iterator[Point]:
    for kernels in (1, 64, 512):
        yield Point("small", 1, "graph_host", "cuda_graph", GraphLaunch(kernels))
        yield Point("small", 1, "graph_device", "cuda_graph", GraphLaunch(kernels))
    for heads, tokens in product((LLAMA, QWEN_TP2, QWEN_TP4), (256, 1024, 4096, 16384, 65536)):
        yield Point("small", 1, "copy", "torch_gather", KvCopy(heads, tokens))
        yield Point("small", 2, "copy", "torch_copy", KvCopy(heads, tokens, gather=False))
    for m, width in product((1, 16, 64, 256, 1024, 8192), (4096, 5120)):
        yield Point("small", 2, "fused_add_rmsnorm", "sgl_kernel", Elementwise(m, width, 4))
    for m, width in product((1, 16, 64, 256, 1024, 8192), (3456, 14336)):
        yield Point("small", 2, "silu_and_mul", "sgl_kernel", Elementwise(m, width, 3))
    for heads, rows in product((LLAMA, QWEN, QWEN_TP4), (1, 8, 32, 64, 128, 256, 512)):
        yield Point("small", 1, "merge", "sgl_merge_state_v2", Merge(heads, rows))


def _decode() -> Iterator[Point]:
    def point(tier: int, shape: Decode, backend: str = "fa3") -> Iterator[Point]:
        if shape.rows * shape.private_tokens <= _MAX_DECODE_TOKENS:
            yield Point("decode", tier, "decode_attention", backend, shape)

    lengths = (64, 256, 1024, 4096, 16384)
    for heads, rows, length in product(MODEL_HEADS, (1, 4, 16, 64, 256), lengths):
        yield from point(1, Decode(heads, rows, length))
    # Group and kv heads vary on their own at a few batches, so that each effect can be told apart.
    batches = ((8, 1024), (64, 1024), (256, 1024), (256, 256), (64, 8192), (16, 16384))
    for group, kv, (rows, length) in product((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 4, 8), batches):
        yield from point(2, Decode(Heads(group * kv, kv), rows, length))
    for rows, length in product((1, 16, 64, 256), (256, 1024, 4096, 16384)):
        yield from point(2, Decode(Heads(32, 8, 64), rows, length))
        yield from point(2, Decode(Heads(14, 2, 64), rows, length))
    for rows, length in product((8, 64, 256), (256, 4096)):
        yield from point(2, Decode(LLAMA, rows, length), "fa3_tight_table")
    for page, heads, rows, length in product(
        (16, 64, 128), (LLAMA, QWEN_TP4), (16, 64, 256), (256, 1024, 4096, 16384)
    ):
        yield from point(3, Decode(heads, rows, length, page))
    every_row = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    every_length = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    for heads, rows, length in product((LLAMA, QWEN, QWEN_TP4), every_row, every_length):
        yield from point(3, Decode(heads, rows, length))
    between = (24, 48, 96, 192, 384)  # batch sizes of SGLang's graphs that are no power of two
    for heads, rows, length in product((LLAMA, QWEN, QWEN_TP4), between, (256, 1024, 4096)):
        yield from point(3, Decode(heads, rows, length))


def _shared() -> Iterator[Point]:
    def point(tier: int, shape: Decode, backend: str = "fa3") -> Iterator[Point]:
        if shape.guess_us() <= _MAX_SHARED_GUESS_US:
            yield Point("shared", tier, "decode_attention", backend, shape)

    def one(heads: Heads, rows: int, length: int, private: int = 256, page: int = 1) -> Decode:
        return Decode(heads, rows, private, page, length, 1)

    coarse = (512, 2048, 8192, 32768)
    for heads, rows, length in product(MODEL_HEADS[:4], (2, 8, 32, 64, 128, 256, 512), coarse):
        yield from point(1, one(heads, rows, length))
    for rows, length in product((4, 16, 48, 96, 192, 384), (8192, 16384)):
        yield from point(1, one(LLAMA, rows, length))
    for group, kv, rows, length in product(
        (1, 2, 4, 5, 8), (1, 2, 4, 8), (16, 64, 256), (2048, 8192, 16384)
    ):
        yield from point(2, one(Heads(group * kv, kv), rows, length))
    for rows, length, private in product((32, 256), (2048, 8192), (64, 512, 1024, 2048, 4096)):
        yield from point(2, one(LLAMA, rows, length, private))
    for rows, prefixes, length in product((64, 256), (2, 4, 8, 16, 32), (1024, 2048, 4096, 8192)):
        yield from point(2, Decode(LLAMA, rows, 256, 1, length, prefixes))
    for prefixes, length in product((4, 16), (2048, 8192)):
        yield from point(2, Decode(QWEN_TP4, 256, 256, 1, length, prefixes))
    for rows, length in product((8, 64, 256), (2048, 8192, 32768)):
        yield from point(2, Decode(LLAMA, rows, 256, 1, length, 1, contiguous=False))
        yield from point(2, one(LLAMA, rows, length), "fa3_tight_table")
        yield from point(2, one(LLAMA, rows, length), "fa3_warm_l2")
        yield from point(2, one(QWEN_TP4, rows, length), "fa3_warm_l2")
    for page, heads, rows, length in product(
        (16, 64, 128), (LLAMA, QWEN_TP4), (8, 64, 256), coarse
    ):
        yield from point(2, one(heads, rows, length, 256, page))
    rows_of = (2, 8, 32, 64, 128, 256, 512)
    for heads, rows, length in product(MODEL_HEADS, rows_of, (1024, 4096, 16384)):
        yield from point(3, one(heads, rows, length))
    for heads, rows, length in product((LLAMA_TP4, LLAMA_TP2), rows_of, coarse):
        yield from point(3, one(heads, rows, length))
    for heads, rows, length, private in product(
        MODEL_HEADS[:4], (8, 32, 64, 128, 256, 512), coarse[:3], (64, 1024)
    ):
        yield from point(3, one(heads, rows, length, private))


def _prefix() -> Iterator[Point]:
    def passes(
        tier: int, heads: Iterable[Heads], rows: tuple[int, ...], lengths: tuple[int, ...]
    ) -> Iterator[Point]:
        for head, count, length in product(heads, rows, lengths):
            shape = PrefixPass(head, count, length)
            yield Point("prefix", tier, "prefix_pass", "fa3", shape)

    coarse = ((1, 8, 32, 64, 128, 256, 512), (512, 2048, 8192, 32768))
    fine = (
        (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256, 512),
        (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
    )
    yield from passes(1, (LLAMA, QWEN, QWEN_TP4), *coarse)
    for heads, rows, length in product((LLAMA, QWEN_TP4), (8, 64, 256), coarse[1]):
        pair = PrefixSuffix(heads, rows, length, 256)
        yield Point("prefix", 1, "decode_attention", "fa3_prefix_suffix_merge", pair)
    for rows, length in product((8, 64, 256), coarse[1]):
        paged = PrefixPass(LLAMA, rows, length, paged=True)
        yield Point("prefix", 2, "prefix_pass", "fa3_page_table", paged)
    yield from passes(2, (LLAMA,), *fine)
    yield from passes(2, (QWEN_TP2, LLAMA_TP4, LLAMA_TP2), *coarse)
    groups = [Heads(group * kv, kv) for group, kv in product((1, 2, 4, 5, 8), (1, 2, 4, 8))]
    yield from passes(2, groups, (16, 64, 256), (2048, 16384))
    yield from passes(3, (QWEN, QWEN_TP4), *fine)


def _extend() -> Iterator[Point]:
    def point(tier: int, shape: Extend) -> Iterator[Point]:
        new = shape.rows * shape.new_tokens
        cached = shape.rows * shape.cached_tokens
        if new <= _MAX_EXTEND_TOKENS and cached <= _MAX_CACHED_TOKENS:
            yield Point("extend", tier, "extend_attention", "fa3", shape)

    new = (16, 64, 256, 1024, 4096, 8192)
    cached = (0, 512, 2048, 8192, 32768, 65536)
    for heads, fresh, prefix in product(MODEL_HEADS, new, cached):
        tier = 1 if heads in (LLAMA, QWEN, QWEN_TP4) else 2
        yield from point(tier, Extend(heads, 1, fresh, prefix))
    several = product((2, 4, 8), (16, 64, 256, 1024, 2048), (0, 2048, 8192, 32768))
    for (rows, fresh, prefix), heads in product(several, (LLAMA, QWEN_TP2, QWEN_TP4)):
        yield from point(1 if heads == LLAMA else 2, Extend(heads, rows, fresh, prefix))
    for rows, fresh, prefix in product((4, 8), (64, 256, 1024), (8192, 32768)):
        yield from point(2, Extend(LLAMA, rows, fresh, prefix, shared=True))
    between = product((32, 128, 512, 2048, 6144), (0, 1024, 4096, 16384))
    for (fresh, prefix), heads in product(between, (LLAMA, QWEN)):
        yield from point(3, Extend(heads, 1, fresh, prefix))


_BUILDERS = {
    "roof": _roofs,
    "gemm": _gemms,
    "small": _small,
    "decode": _decode,
    "shared": _shared,
    "prefix": _prefix,
    "extend": _extend,
}
