"""Device inputs of the sweep's points, and the calls that are timed on them."""

from dataclasses import dataclass
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]

from granikv.kernels import baselines
from granikv.kernels.layouts import cut_windows, fill_page_table
from granikv.kernels.schedule import plan_calls
from granikv.kernels.shapes import (
    BF16_BYTES,
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
from granikv.kernels.sweep_points import Point
from granikv.kernels.timing import Call, GraphTimer

CONTEXT_TOKENS = 131_072  # SGLang's decode graphs use page tables as wide as the context length
_MAX_ROWS = 512
_MAX_CALLS = 32
_POOL_BYTES = 12 << 30  # of K, and the same of V


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Inputs of paged attention: one page table for each timed call, everything else common.

    Shapes: q `[tokens, num_q_heads, head_dim]`, pages `[pages, page_size, num_kv_heads, head_dim]`,
    tables `[rows, width]`, seqlens `[rows]`, query_starts and kv_starts `[rows + 1]`, all int32.
    """

    q: Any
    k_pages: Any
    v_pages: Any
    tables: list[Any]
    seqlens: Any
    query_starts: Any
    kv_starts: Any


class DevicePool:
    """Random K and V as flat memory that every point cuts its own windows from.

    Args:
        seed: of the values, the queries and the page order.
        pool_bytes: of K, and the same of V.
    """

    def __init__(self, seed: int, pool_bytes: int = _POOL_BYTES) -> None:
        self.generator = torch.Generator(device="cuda").manual_seed(seed)
        self.elements = pool_bytes // BF16_BYTES
        self.k = self.randn(self.elements)
        self.v = self.randn(self.elements)
        entries = _MAX_CALLS * _MAX_ROWS * CONTEXT_TOKENS
        self._tables = torch.zeros(entries, dtype=torch.int32, device="cuda")

    def randn(self, *shape: int) -> Any:
        """Normal bf16 values."""
        values = torch.empty(*shape, dtype=torch.bfloat16, device="cuda")
        return values.normal_(generator=self.generator)

    def pages(self, heads: Heads, page_size: int) -> tuple[Any, Any]:
        """K and V as `[pages, page_size, num_kv_heads, head_dim]`."""
        page = page_size * heads.kv * heads.dim
        count = self.elements // page
        shape = (count, page_size, heads.kv, heads.dim)
        return self.k[: count * page].view(shape), self.v[: count * page].view(shape)

    def wide_table(self, call: int, rows: int, page_size: int) -> Any:
        """A page table as wide as the context, as a decode graph of SGLang holds it."""
        size = _MAX_ROWS * CONTEXT_TOKENS
        table = self._tables[call * size : (call + 1) * size]
        return table.view(-1, CONTEXT_TOKENS // page_size)[:rows]

    def order(self, first: int, count: int) -> Any:
        """A random permutation of `first .. count - 1`, int32."""
        pages = torch.randperm(count - first, generator=self.generator, device="cuda")
        return (pages + first).to(torch.int32)


def decode_batch(pool: DevicePool, shape: Decode, calls: int, wide: bool = True) -> PagedBatch:
    """Inputs of `calls` decode calls over page tables of the context's width, or a tight one."""
    k_pages, v_pages = pool.pages(shape.heads, shape.page_size)
    tokens = shape.prefix_tokens + shape.private_tokens
    width = shape.prefix_pages + shape.private_pages
    if wide:
        tables = [pool.wide_table(call, shape.rows, shape.page_size) for call in range(calls)]
    else:
        tables = list(torch.zeros(calls, shape.rows, width, dtype=torch.int32, device="cuda"))
    windows = cut_windows(k_pages.shape[0], shape.pages, calls)
    shared = shape.prefixes * shape.prefix_pages
    order = pool.order(shared if shape.contiguous else 0, windows.pages)
    ramp = torch.arange(max(shared, 1), dtype=torch.int32, device="cuda")
    for call, table in enumerate(tables):
        fill_page_table(table, shape, ramp, order, windows.first_page(call))
    starts = torch.arange(shape.rows + 1, dtype=torch.int32, device="cuda")
    return PagedBatch(
        q=pool.randn(shape.rows, shape.heads.q, shape.heads.dim),
        k_pages=k_pages,
        v_pages=v_pages,
        tables=tables,
        seqlens=torch.full((shape.rows,), tokens, dtype=torch.int32, device="cuda"),
        query_starts=starts,
        kv_starts=starts * tokens,
    )


def extend_batch(pool: DevicePool, shape: Extend, calls: int) -> PagedBatch:
    """Inputs of `calls` extend calls: the KV of a decode batch, `new_tokens` queries a row."""
    own = shape.new_tokens + (0 if shape.shared else shape.cached_tokens)
    prefix_tokens = shape.cached_tokens if shape.shared else 0
    kv = Decode(shape.heads, shape.rows, own, 1, prefix_tokens, int(shape.shared))
    batch = decode_batch(pool, kv, calls, wide=False)
    return PagedBatch(
        q=pool.randn(shape.rows * shape.new_tokens, shape.heads.q, shape.heads.dim),
        k_pages=batch.k_pages,
        v_pages=batch.v_pages,
        tables=batch.tables,
        seqlens=batch.seqlens,
        query_starts=batch.query_starts * shape.new_tokens,
        kv_starts=batch.kv_starts,
    )


def decode_calls(pool: DevicePool, shape: Decode, backend: str, calls: int) -> list[Call]:
    """FA3 decode; `fa3` has SGLang's wide table and one schedule for all layers."""
    tight = backend == "fa3_tight_table"
    batch = decode_batch(pool, shape, calls, wide=not tight)
    schedule = None if tight else _schedule(shape, batch)
    tables = batch.tables[:1] * calls if backend == "fa3_warm_l2" else batch.tables

    def call(table: Any) -> Call:
        return lambda: baselines.fa3_decode(
            batch.q,
            batch.k_pages,
            batch.v_pages,
            table,
            batch.seqlens,
            batch.query_starts,
            schedule,
        )

    return [call(table) for table in tables]


def extend_calls(pool: DevicePool, shape: Extend, calls: int) -> list[Call]:
    """FA3 extend with a page table as wide as the longest request."""
    batch = extend_batch(pool, shape, calls)

    def call(table: Any) -> Call:
        return lambda: baselines.fa3_extend(
            batch.q,
            batch.k_pages,
            batch.v_pages,
            table,
            batch.seqlens,
            batch.query_starts,
            batch.kv_starts,
            shape.new_tokens,
        )

    return [call(table) for table in batch.tables]


def prefix_calls(pool: DevicePool, shape: PrefixPass, calls: int) -> list[Call]:
    """FA3 over a contiguous prefix, as a plain view or through a page table of one row."""
    kv = Decode(shape.heads, 1, 0, 1, shape.prefix_tokens, 1)
    batch = decode_batch(pool, kv, calls, wide=False)
    q = pool.randn(shape.rows, shape.heads.q, shape.heads.dim)
    query_starts = torch.tensor([0, shape.rows], dtype=torch.int32, device="cuda")

    def paged(table: Any) -> Call:
        return lambda: baselines.fa3_prefix_page_table(
            q, batch.k_pages, batch.v_pages, table, batch.seqlens, query_starts
        )

    def plain(k: Any, v: Any) -> Call:
        return lambda: baselines.fa3_prefix(q, k, v)

    if shape.paged:
        return [paged(table) for table in batch.tables]
    return [plain(*_prefix_view(batch, table, shape.prefix_tokens)) for table in batch.tables]


def prefix_suffix_calls(pool: DevicePool, shape: PrefixSuffix, calls: int) -> list[Call]:
    """Prefix pass over the slab, suffix pass over private slots, merge: three calls in a row."""
    kv = Decode(shape.heads, shape.rows, shape.private_tokens, 1, shape.prefix_tokens, 1)
    batch = decode_batch(pool, kv, calls)
    private = torch.full_like(batch.seqlens, shape.private_tokens)
    schedule = baselines.fa3_decode_schedule(
        shape.heads, private, batch.query_starts, shape.private_tokens, 1
    )

    def call(table: Any) -> Call:
        k, v = _prefix_view(batch, table, shape.prefix_tokens)
        suffix_table = table[:, shape.prefix_tokens :]

        def run() -> Any:
            prefix = baselines.fa3_prefix(batch.q, k, v)
            suffix = baselines.fa3_decode(
                batch.q,
                batch.k_pages,
                batch.v_pages,
                suffix_table,
                private,
                batch.query_starts,
                schedule,
                return_lse=True,
            )
            return baselines.prefix_suffix_merge(prefix, suffix)

        return run

    return [call(table) for table in batch.tables]


def gemm_calls(pool: DevicePool, shape: Gemm, calls: int) -> list[Call]:
    """`x @ w.T` with one weight matrix a call, as far as the pool reaches."""
    size = shape.n * shape.k
    x = pool.randn(shape.m, shape.k)
    weights = [
        pool.k[start : start + size].view(shape.n, shape.k)
        for start in range(0, min(calls, pool.elements // size) * size, size)
    ]

    def call(weight: Any) -> Call:
        return lambda: torch.nn.functional.linear(x, weight)

    return [call(weights[i % len(weights)]) for i in range(calls)]


def copy_calls(pool: DevicePool, shape: KvCopy, calls: int) -> list[Call]:
    """K and V of one layer into a slab: by slot index, or from consecutive slots."""
    kv = Decode(shape.heads, 1, shape.tokens)
    batch = decode_batch(pool, kv, calls, wide=False)

    def call(table: Any) -> Call:
        # A layer's own memory: a view of the whole pool would need 64-bit indices in the kernel.
        first, last = int(table.min()), int(table.max())
        k, v = batch.k_pages[first : last + 1], batch.v_pages[first : last + 1]
        slots = table[0] - first
        k_slab, v_slab = torch.empty_like(k[: shape.tokens]), torch.empty_like(k[: shape.tokens])

        def gather() -> None:
            torch.index_select(k, 0, slots, out=k_slab)
            torch.index_select(v, 0, slots, out=v_slab)

        def move() -> None:
            k_slab.copy_(k[: shape.tokens])
            v_slab.copy_(v[: shape.tokens])

        return gather if shape.gather else move

    return [call(table) for table in batch.tables]


def merge_calls(pool: DevicePool, shape: Merge, calls: int) -> list[Call]:
    """SGLang's merge of two partial results."""

    def call() -> Call:
        size = (shape.rows, shape.heads.q, shape.heads.dim)
        outs = [pool.randn(*size) for _ in range(2)]
        lses = [pool.randn(*size[:2]).float() for _ in range(2)]
        return lambda: baselines.merge_states(outs[0], lses[0], outs[1], lses[1])

    return [call() for _ in range(calls)]


def elementwise_calls(pool: DevicePool, op: str, shape: Elementwise, calls: int) -> list[Call]:
    """The two elementwise kernels of a layer."""

    def norm() -> Call:
        x, residual = pool.randn(shape.m, shape.n), pool.randn(shape.m, shape.n)
        weight = pool.randn(shape.n)
        return lambda: baselines.fused_add_rmsnorm(x, residual, weight)

    def silu() -> Call:
        gate_up, out = pool.randn(shape.m, 2 * shape.n), pool.randn(shape.m, shape.n)
        return lambda: baselines.silu_and_mul(gate_up, out)

    build = norm if op == "fused_add_rmsnorm" else silu
    return [build() for _ in range(calls)]


def stream_calls(pool: DevicePool, op: str, shape: Stream, calls: int) -> list[Call]:
    """A read or a copy of plain memory, counting bytes read and written."""
    if op == "roof_read":
        values = pool.k[: shape.moved_bytes // BF16_BYTES].view(torch.float32)
        return [lambda: torch.sum(values)] * calls
    source = pool.k[: shape.moved_bytes // 2 // BF16_BYTES]
    target = torch.empty_like(source)
    return [lambda: target.copy_(source)] * calls


def calls_of(pool: DevicePool, point: Point, calls: int) -> list[Call]:
    """The calls of a point, each with inputs of its own where the pool has room."""
    shape: Shape = point.shape
    match shape:
        case Gemm():
            return gemm_calls(pool, shape, calls)
        case Decode():
            return decode_calls(pool, shape, point.backend, calls)
        case Extend():
            return extend_calls(pool, shape, calls)
        case PrefixPass():
            return prefix_calls(pool, shape, calls)
        case PrefixSuffix():
            return prefix_suffix_calls(pool, shape, calls)
        case Merge():
            return merge_calls(pool, shape, calls)
        case KvCopy():
            return copy_calls(pool, shape, calls)
        case Elementwise():
            return elementwise_calls(pool, point.op, shape, calls)
        case Stream():
            return stream_calls(pool, point.op, shape, calls)
        case GraphLaunch():
            value = torch.zeros(1, device="cuda")
            return [lambda: value.add_(1.0)] * shape.kernels


def measure(pool: DevicePool, timer: GraphTimer, point: Point) -> list[float]:
    """Every timed repetition of a point in us: of one call, or of a whole graph for its launch."""
    calls = calls_of(pool, point, plan_calls(point.shape.guess_us()))
    if point.op == "graph_host":
        return timer.graph_host_us(calls)
    times_us = timer.times_us(calls, cold=point.backend != "fa3_warm_l2")
    if isinstance(point.shape, GraphLaunch):
        return [time_us * point.shape.kernels for time_us in times_us]
    return times_us


def _schedule(shape: Decode, batch: PagedBatch) -> Any:
    longest = shape.prefix_tokens + shape.private_tokens
    return baselines.fa3_decode_schedule(
        shape.heads, batch.seqlens, batch.query_starts, longest, shape.page_size
    )


def _prefix_view(batch: PagedBatch, table: Any, prefix_tokens: int) -> tuple[Any, Any]:
    first = int(table[0, 0])
    last = first + prefix_tokens
    return batch.k_pages[first:last, 0], batch.v_pages[first:last, 0]
