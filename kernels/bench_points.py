"""The cells of the decode benchmark and the backends that run on each; needs no GPU.

A cell is one decode batch: how many rows, which shared segments they read, how many tokens each row
has alone. Tiers order the run so that a short budget loses the fine grid, never a figure.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from granikv.kernels.shapes import BF16_BYTES, Columns, Heads
from granikv.kernels.sweep_points import LLAMA, QWEN_TP2, QWEN_TP4

TIERS = ("figures", "passes", "coarse", "heads", "grid")

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
ROWS = (8, 32, 64, 128, 256, 512)
PRIVATE = (64, 256, 1024, 2048)

MAX_CALLS = 16  # of one graph

# Larger batches are left out: FA3 alone would need over ten milliseconds a call.
_MAX_PAGED_US = 12_000.0
_MAX_LAYER_SLOTS = 1_500_000

# What one H200 showed, rounded down; only orders the run and sizes its repetitions.
_PRIVATE_BYTES_PER_US = 2.7e6
_SHARED_BYTES_PER_US = 6.0e6
_FLOPS_PER_US = 4.0e8
_LATENCY_US = 15.0
_CUBLAS_BYTES_PER_US = 3.0e6


@dataclass(frozen=True, slots=True)
class Segment:
    """`tokens` in consecutive slots that the rows of a range read."""

    tokens: int
    rows: range


@dataclass(frozen=True, slots=True)
class Cell:
    """One decode batch; segments outermost first, `private_tokens` for each row."""

    heads: Heads
    rows: int
    private_tokens: int
    segments: tuple[Segment, ...] = ()

    @property
    def shared_slots(self) -> int:
        """Tokens of all segments."""
        return sum(segment.tokens for segment in self.segments)

    @property
    def shared_reads(self) -> int:
        """Shared tokens summed over the rows that read them."""
        return sum(segment.tokens * len(segment.rows) for segment in self.segments)

    @property
    def slots(self) -> int:
        """Tokens of one layer that the batch reads."""
        return self.shared_slots + self.rows * self.private_tokens

    @property
    def row_tokens(self) -> list[int]:
        """Shared tokens of each row."""
        tokens = [0] * self.rows
        for segment in self.segments:
            for row in segment.rows:
                tokens[row] += segment.tokens
        return tokens

    @property
    def is_one_level(self) -> bool:
        """Whether no row reads two segments."""
        return sum(len(segment.rows) for segment in self.segments) <= self.rows

    def bases(self, page_size: int = 1) -> list[int]:
        """First slot of each segment, whole pages behind the padding page 0."""
        bases, base = [], page_size
        for segment in self.segments:
            bases.append(base)
            base += -(-segment.tokens // page_size) * page_size
        return bases

    def columns(self, page_size: int = 1) -> Columns:
        """Row columns of the batch."""
        segments = [
            [base, segment.tokens, len(segment.rows)]
            for base, segment in zip(self.bases(page_size), self.segments, strict=True)
        ]
        return {
            **self.heads.columns(),
            "page_size": page_size,
            "rows": self.rows,
            "segments_json": json.dumps(segments),
            "private_tokens": self.rows * self.private_tokens,
        }

    @property
    def least_bytes(self) -> int:
        """Every token's K and V once, queries read and results written."""
        query = 2 * self.rows * self.heads.q * self.heads.dim * BF16_BYTES
        return self.slots * self.heads.kv_bytes + query

    @property
    def flops(self) -> int:
        """Of both matrix products, without padding."""
        reads = self.shared_reads + self.rows * self.private_tokens
        return 4 * self.heads.q * self.heads.dim * reads

    def floor_us(self, bytes_per_us: float, flops_per_us: float) -> float:
        """Overlapped floor: the slower of the traffic and of the matrix work."""
        return max(self.least_bytes / bytes_per_us, self.flops / flops_per_us)

    def guess_us(self, work: str) -> float:
        """Guess for a backend that reads prefixes by row (`paged`), once, or as `cublas`."""
        kv_bytes = self.heads.kv_bytes
        private = self.rows * self.private_tokens * kv_bytes / _PRIVATE_BYTES_PER_US
        if work == "paged":
            read_us = self.shared_reads * kv_bytes / _SHARED_BYTES_PER_US
            padded = 4 * 64 * self.heads.kv * self.heads.dim
            tokens = self.shared_reads + self.rows * self.private_tokens
            return max(private + read_us, padded * tokens / _FLOPS_PER_US) + _LATENCY_US
        prefix = 4 * self.heads.q * self.heads.dim * self.shared_reads / _FLOPS_PER_US
        prefix = max(prefix, self.shared_slots * kv_bytes / _PRIVATE_BYTES_PER_US)
        if work == "cublas":  # the score matrix is written and read three times
            prefix += 6 * BF16_BYTES * self.heads.q * self.shared_reads / _CUBLAS_BYTES_PER_US
        return private + prefix + _LATENCY_US


def plan_calls(guess_us: float) -> int:
    """Calls in one graph: four layers, more of short calls, fewer of very long ones."""
    if guess_us > 1500:
        return 1 if guess_us > 4000 else 2
    if guess_us > 100:
        return 4
    return 8 if guess_us > 40 else MAX_CALLS


class Backend(NamedTuple):
    """One way to compute a cell.

    Attributes:
        name: `backend` of its rows.
        family: which builder of `bench_cases` makes its calls.
        work: how its time is guessed.
        page_size: of the page table it reads.
        mode: group mode of every segment: 0 paged, 1 cascade, 2 dense.
        options: keyword arguments of the builder's calls.
    """

    name: str
    family: str
    work: str = "shared"
    page_size: int = 1
    mode: int = 2
    options: tuple[tuple[str, str], ...] = ()

    @property
    def op(self) -> str:
        """`op` of its rows over a whole batch."""
        return "plan" if self.family == "plan" else "decode_attention"

    def supports(self, cell: Cell) -> bool:
        """Whether it can compute the cell at all."""
        if self.family == "pair":
            tiled = sum(len(segment.rows) for segment in cell.segments) == cell.rows
            return bool(cell.segments) and cell.is_one_level and tiled
        if self.family in ("flashinfer", "cublas"):
            return len(cell.segments) == 1 and len(cell.segments[0].rows) == cell.rows
        if self.family == "fa3" and self.page_size > 1:
            return all(segment.tokens % self.page_size == 0 for segment in cell.segments)
        return True


def _granikv(name: str, mode: str, **options: str) -> Backend:
    number = {"paged": 0, "cascade": 1, "dense": 2}[mode]
    prefix = options.get("prefix")
    named = prefix if prefix != "none" else None
    full = "_".join(filter(None, ("granikv", name, mode, named)))
    work = "paged" if mode == "paged" else "shared"
    return Backend(full, "granikv", work, 1, number, tuple(options.items()))


def _two_call(overlap: str, prefix: str | None = None) -> Backend:
    name = "two_call" if overlap == "serial" else f"two_call_{overlap}"
    return _granikv(name, "dense", overlap=overlap, **({"prefix": prefix} if prefix else {}))


FA3 = Backend("fa3", "fa3", "paged")
FA3_PAGES = tuple(Backend("fa3", "fa3", "paged", page) for page in (16, 64, 128))
PAIR = Backend("fa3_prefix_suffix_merge", "pair", options=(("overlap", "serial"),))
PAIR_STREAMS = Backend("fa3_prefix_suffix_merge_streams", "pair", options=(("overlap", "streams"),))
FLASHINFER = Backend("flashinfer_cascade", "flashinfer")
CUBLAS = Backend("cublas_dense", "cublas", "cublas")
FA3_PREFIX = Backend("fa3", "fa3_prefix")
OUR_PREFIX = tuple(
    Backend(f"granikv_{prefix}", "granikv_prefix", options=(("prefix", prefix),))
    for prefix in ("triton", "hopper")
)
OUR_PRIVATE = Backend("granikv_private", "granikv_private")
PLAN = Backend("granikv_plan", "plan")
FUSED = tuple(_granikv("fused", mode, launch="fused") for mode in ("dense", "cascade", "paged"))
SERIAL, SPLIT, BESIDE = (_two_call(overlap) for overlap in ("serial", "split", "beside"))
TRITON_PREFIX, FA3_AS_PREFIX = (_two_call("serial", prefix) for prefix in ("triton", "fa3"))
# Without the dense pass: one pass over everything.
STREAM_CASCADE, STREAM_PAGED = (_granikv("stream", m, prefix="none") for m in ("cascade", "paged"))

# Which backends run on which kind of cell, in this order. FA3 comes first: the others are compared
# with its result.
BACKENDS: dict[str, tuple[Backend, ...]] = {
    "figure": (
        FA3, *FUSED, SERIAL, SPLIT, BESIDE, TRITON_PREFIX, FA3_AS_PREFIX, STREAM_CASCADE,
        STREAM_PAGED, PAIR,
        PAIR_STREAMS, PLAN, *FA3_PAGES, CUBLAS, FLASHINFER,
    ),
    "private": (FA3, OUR_PRIVATE, FUSED[0], STREAM_PAGED, *FA3_PAGES),
    "prefix": (FA3_PREFIX, *OUR_PREFIX, FUSED[0], SERIAL, TRITON_PREFIX, FA3_AS_PREFIX),
    "coarse": (
        FA3, FUSED[0], SERIAL, SPLIT, BESIDE, STREAM_CASCADE, PAIR, PAIR_STREAMS, PLAN, *FA3_PAGES,
    ),
    "grid": (FA3, SERIAL, SPLIT, BESIDE, PAIR, PAIR_STREAMS),
    "few": (FA3, SPLIT, BESIDE, STREAM_CASCADE, PAIR, PAIR_STREAMS),
    "short": (FA3, STREAM_PAGED, STREAM_CASCADE, SPLIT, BESIDE, PAIR),
}  # fmt: skip


class Job(NamedTuple):
    """One cell and its backends."""

    tier: str
    kind: str
    cell: Cell

    @property
    def backends(self) -> list[Backend]:
        """Backends that can compute the cell, in the order they run."""
        return [backend for backend in BACKENDS[self.kind] if backend.supports(self.cell)]

    def op(self, backend: Backend) -> str:
        """`op` of a row: whole passes are `decode_attention`, a prefix alone `prefix_pass`."""
        return "prefix_pass" if self.kind == "prefix" else backend.op


def one_prefix(heads: Heads, rows: int, tokens: int, private_tokens: int) -> Cell:
    """All rows over one segment."""
    return Cell(heads, rows, private_tokens, (Segment(tokens, range(rows)),))


def slabs(heads: Heads, rows: int, tokens: Sequence[int], private_tokens: int) -> Cell:
    """Row `i` over segment `i % len(tokens)`: neighbours in a batch share nothing."""
    count = len(tokens)
    segments = tuple(Segment(length, range(i, rows, count)) for i, length in enumerate(tokens))
    return Cell(heads, rows, private_tokens, segments)


def nested(heads: Heads, rows: int, outer: int, inner: int, groups: int, private: int) -> Cell:
    """All rows over `outer` tokens, then row `i` over `inner` tokens of group `i % groups`."""
    inside = tuple(Segment(inner, range(i, rows, groups)) for i in range(groups))
    return Cell(heads, rows, private, (Segment(outer, range(rows)), *inside))


MIXED = slabs(LLAMA, 256, (2048, 4096, 8192, 16384), 256)
NESTED = nested(LLAMA, 256, 4096, 2048, 4, 256)


def jobs(tiers: Sequence[str] = TIERS) -> list[Job]:
    """Jobs of some tiers in the order they are to run; a cell is measured once.

    Raises:
        ValueError: no such tier.
    """
    for tier in tiers:
        if tier not in TIERS:
            raise ValueError(f"tier must be one of {', '.join(TIERS)}, got {tier}")
    first: dict[Cell, Job] = {}
    for job in _all_jobs():
        if job.tier in tiers and _fits(job.cell):
            first.setdefault(job.cell, job)
    return list(first.values())


def _fits(cell: Cell) -> bool:
    return cell.slots <= _MAX_LAYER_SLOTS and cell.guess_us("paged") <= _MAX_PAGED_US


def _all_jobs() -> Iterator[Job]:
    yield from _figures()
    yield from _passes()
    yield from _coarse()
    yield from _other_heads()
    for rows, tokens, private in product(ROWS, LENGTHS, PRIVATE):
        cell = one_prefix(LLAMA, rows, tokens, private)
        yield Job("grid", _grid_kind(cell), cell)


def _grid_kind(cell: Cell) -> str:
    """Rows by rows over the same pages may be the best choice only for little sharing."""
    if cell.shared_reads <= 64 * 2048:
        return "short"
    return "few" if cell.rows <= 32 else "grid"


def _figures() -> Iterator[Job]:
    pairs = ((16384, 256), (8192, 256), (32768, 256), (16384, 64), (8192, 64), (2048, 32))
    for tokens, rows in pairs:
        yield Job("figures", "figure", one_prefix(LLAMA, rows, tokens, 256))
    for private in (1024, 2048):
        yield Job("figures", "figure", one_prefix(LLAMA, 256, 8192, private))
    yield Job("figures", "figure", MIXED)


def _passes() -> Iterator[Job]:
    for rows in (128, 256, 512):
        yield Job("passes", "private", Cell(LLAMA, rows, 256))
    for tokens, rows in product((8192, 16384), (256, 512)):
        yield Job("passes", "prefix", one_prefix(LLAMA, rows, tokens, 0))


def _coarse() -> Iterator[Job]:
    yield Job("coarse", "coarse", NESTED)
    for rows, tokens in product((8, 64, 256), (512, 2048, 8192, 32768)):
        cell = one_prefix(LLAMA, rows, tokens, 256)
        yield Job("coarse", "coarse" if rows > 8 else "short", cell)
    for count, tokens in product((4, 8, 16), (2048, 8192)):
        yield Job("coarse", "coarse", slabs(LLAMA, 256, (tokens,) * count, 256))
    yield Job("coarse", "coarse", slabs(LLAMA, 64, (2048, 4096, 8192, 16384), 256))
    yield Job("coarse", "coarse", nested(LLAMA, 64, 2048, 1024, 8, 256))


def _other_heads() -> Iterator[Job]:
    sizes = product((QWEN_TP2, QWEN_TP4), (8, 64, 256), (512, 2048, 8192, 32768))
    for heads, rows, tokens in sizes:
        cell = one_prefix(heads, rows, tokens, 256)
        yield Job("heads", _grid_kind(cell), cell)
    for heads in (QWEN_TP2, QWEN_TP4):
        yield Job("heads", "grid", slabs(heads, 256, (2048, 4096, 8192, 16384), 256))
