"""What one measured call computes: its sizes, the row columns that say so, and a guess of its time.

The guesses only order the sweep and size its repetitions; nothing is fitted from them. Rates are
what one H200 showed on 2026-11-30 (copy 4.3 TB/s, bf16 matrix product 790 TFLOP/s, FA3 over private
slots 2.8 TB/s, over shared pages 6.9 TB/s, its prefix pass 550 TFLOP/s), rounded down.
"""

import json
from dataclasses import dataclass
from typing import NamedTuple

Columns = dict[str, int | str | None]

BF16_BYTES = 2
_HBM_BYTES_PER_US = 3.5e6
_PRIVATE_BYTES_PER_US = 2.7e6
_SHARED_BYTES_PER_US = 6.0e6
_GEMM_FLOPS_PER_US = 6.5e8
_ATTENTION_FLOPS_PER_US = 5.0e8
_ATTENTION_LATENCY_US = 10.0


class Heads(NamedTuple):
    """Attention heads of one rank."""

    q: int
    kv: int
    dim: int = 128

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.kv * self.dim * BF16_BYTES

    def columns(self) -> Columns:
        """Row columns of the heads."""
        return {"num_q_heads": self.q, "num_kv_heads": self.kv, "head_dim": self.dim}


@dataclass(frozen=True, slots=True)
class Gemm:
    """`[m, k] x [k, n]`; `m` is the number of tokens."""

    m: int
    n: int
    k: int

    def columns(self) -> Columns:
        """Row columns of the sizes."""
        return {"m": self.m, "n": self.n, "k": self.k}

    def guess_us(self) -> float:
        """Roofline guess of one call."""
        moved = BF16_BYTES * (self.n * self.k + self.m * (self.n + self.k))
        flops = 2 * self.m * self.n * self.k
        return max(moved / _HBM_BYTES_PER_US, flops / _GEMM_FLOPS_PER_US) + 4


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode attention of `rows` requests over paged KV.

    Row `i` reads prefix `i % prefixes` (the same physical pages as every other row of that prefix)
    and then `private_tokens` of its own. `contiguous` says that a prefix lies in consecutive pages;
    private pages are random.
    """

    heads: Heads
    rows: int
    private_tokens: int
    page_size: int = 1
    prefix_tokens: int = 0
    prefixes: int = 0
    contiguous: bool = True

    def __post_init__(self) -> None:
        if self.prefix_tokens % self.page_size:
            raise ValueError(f"prefix_tokens must be whole pages, got {self.prefix_tokens}")
        if (self.prefixes > 0) != (self.prefix_tokens > 0):
            raise ValueError("prefixes and prefix_tokens must both be zero or both be positive")
        if self.prefixes and self.rows % self.prefixes:
            raise ValueError(f"rows must be a multiple of prefixes, got {self.rows}")

    @property
    def prefix_pages(self) -> int:
        """Pages of one prefix."""
        return self.prefix_tokens // self.page_size

    @property
    def private_pages(self) -> int:
        """Private pages of one row."""
        return -(-self.private_tokens // self.page_size)

    @property
    def pages(self) -> int:
        """Distinct physical pages of the whole batch."""
        return self.prefixes * self.prefix_pages + self.rows * self.private_pages

    def columns(self) -> Columns:
        """Row columns: the prefixes as segments, everything else private."""
        share = self.rows // self.prefixes if self.prefixes else 0
        first = self.page_size  # page 0 is the engine's padding page
        bases = [
            first + i * self.prefix_tokens if self.contiguous else 0 for i in range(self.prefixes)
        ]
        segments = [[base, self.prefix_tokens, share] for base in bases]
        return {
            **self.heads.columns(),
            "page_size": self.page_size,
            "rows": self.rows,
            "segments_json": json.dumps(segments),
            "private_tokens": self.rows * self.private_tokens,
        }

    def guess_us(self) -> float:
        """Shared and private reads at their seen rates."""
        kv_bytes = self.heads.kv_bytes
        shared = self.rows * self.prefix_tokens * kv_bytes / _SHARED_BYTES_PER_US
        private = self.rows * self.private_tokens * kv_bytes / _PRIVATE_BYTES_PER_US
        # One 64-row tile per (row, kv head): fewer heads do not shrink the padded matrix work.
        tokens = self.rows * (self.prefix_tokens + self.private_tokens)
        padded = 4 * 64 * self.heads.kv * self.heads.dim * tokens / _ATTENTION_FLOPS_PER_US
        return max(shared + private, padded) + _ATTENTION_LATENCY_US


@dataclass(frozen=True, slots=True)
class Extend:
    """Causal attention of `new_tokens` a request over `cached_tokens` and themselves.

    `shared` says that all requests hold the same physical cached tokens.
    """

    heads: Heads
    rows: int
    new_tokens: int
    cached_tokens: int
    shared: bool = False

    def columns(self) -> Columns:
        """Row columns: `m` is the new tokens of all requests, `private_tokens` their KV tokens.

        `private_tokens` holds cached plus new tokens, less what is in a shared segment.
        """
        own = self.new_tokens + (0 if self.shared else self.cached_tokens)
        segments = [[1, self.cached_tokens, self.rows]] if self.shared else []
        return {
            **self.heads.columns(),
            "page_size": 1,
            "rows": self.rows,
            "segments_json": json.dumps(segments),
            "private_tokens": self.rows * own,
            "m": self.rows * self.new_tokens,
        }

    def guess_us(self) -> float:
        """Matrix work below the diagonal, or one read of the KV."""
        pairs = self.new_tokens * self.cached_tokens + self.new_tokens**2 / 2
        flops = 4 * self.heads.q * self.heads.dim * self.rows * pairs
        tokens = self.rows * (self.new_tokens + self.cached_tokens)
        moved = tokens * self.heads.kv_bytes / _PRIVATE_BYTES_PER_US
        return max(flops / _ATTENTION_FLOPS_PER_US, moved) + _ATTENTION_LATENCY_US


@dataclass(frozen=True, slots=True)
class PrefixPass:
    """All rows as one sequence over one prefix, no mask; `paged` reads it through a page table."""

    heads: Heads
    rows: int
    prefix_tokens: int
    paged: bool = False

    def columns(self) -> Columns:
        """Row columns: one segment that every row holds, nothing private."""
        return {
            **self.heads.columns(),
            "page_size": 1 if self.paged else None,
            "rows": self.rows,
            "segments_json": json.dumps([[1, self.prefix_tokens, self.rows]]),
            "private_tokens": 0,
        }

    def guess_us(self) -> float:
        """Matrix work in whole tiles, or one read of the prefix."""
        tile_rows = max(64, self.rows * self.heads.q // self.heads.kv)
        flops = 4 * tile_rows * self.heads.kv * self.heads.dim * self.prefix_tokens
        moved = self.prefix_tokens * self.heads.kv_bytes / _HBM_BYTES_PER_US
        return max(flops / _ATTENTION_FLOPS_PER_US, moved) + _ATTENTION_LATENCY_US


@dataclass(frozen=True, slots=True)
class PrefixSuffix:
    """Prefix pass, suffix pass over private tokens, merge: three calls for one decode step."""

    heads: Heads
    rows: int
    prefix_tokens: int
    private_tokens: int

    @property
    def prefix(self) -> PrefixPass:
        """The first call."""
        return PrefixPass(self.heads, self.rows, self.prefix_tokens)

    @property
    def suffix(self) -> Decode:
        """The second call."""
        return Decode(self.heads, self.rows, self.private_tokens)

    def columns(self) -> Columns:
        """Row columns: one segment that every row holds, and the private tokens."""
        private: Columns = {"page_size": 1, "private_tokens": self.rows * self.private_tokens}
        return {**self.prefix.columns(), **private}

    def guess_us(self) -> float:
        """The sum of the three."""
        merge_us = Merge(self.heads, self.rows).guess_us()
        return self.prefix.guess_us() + self.suffix.guess_us() + merge_us


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge of two partial results of `rows` rows by their log-sum-exp."""

    heads: Heads
    rows: int

    @property
    def moved_bytes(self) -> int:
        """Two partial results and their LSEs read, one of each written."""
        return 3 * self.rows * self.heads.q * (self.heads.dim * BF16_BYTES + 4)

    def columns(self) -> Columns:
        """Row columns."""
        return {**self.heads.columns(), "rows": self.rows, "bytes": self.moved_bytes}

    def guess_us(self) -> float:
        """One pass over the traffic."""
        return self.moved_bytes / _HBM_BYTES_PER_US + 3


@dataclass(frozen=True, slots=True)
class KvCopy:
    """K and V of `tokens` tokens of one layer copied to consecutive slots.

    `gather` reads them from random slots (a promotion), else from consecutive ones (a relocation).
    """

    heads: Heads
    tokens: int
    gather: bool = True

    @property
    def moved_bytes(self) -> int:
        """Bytes read plus bytes written."""
        return 2 * self.tokens * self.heads.kv_bytes

    def columns(self) -> Columns:
        """Row columns."""
        heads = self.heads.columns()
        heads["num_q_heads"] = None
        return {**heads, "page_size": 1, "m": self.tokens, "bytes": self.moved_bytes}

    def guess_us(self) -> float:
        """One pass over the traffic."""
        return self.moved_bytes / (_HBM_BYTES_PER_US / 2) + 8


@dataclass(frozen=True, slots=True)
class Elementwise:
    """A normalisation or activation over `[m, n]` that moves `vectors` arrays of that size."""

    m: int
    n: int
    vectors: int

    @property
    def moved_bytes(self) -> int:
        """Bytes read plus bytes written."""
        return self.vectors * self.m * self.n * BF16_BYTES

    def columns(self) -> Columns:
        """Row columns."""
        return {"m": self.m, "n": self.n, "bytes": self.moved_bytes}

    def guess_us(self) -> float:
        """One pass over the traffic."""
        return self.moved_bytes / _HBM_BYTES_PER_US + 3


@dataclass(frozen=True, slots=True)
class Stream:
    """A plain pass over device memory: its own roof of this run."""

    moved_bytes: int

    def columns(self) -> Columns:
        """Row columns."""
        return {"bytes": self.moved_bytes}

    def guess_us(self) -> float:
        """One pass over the traffic."""
        return self.moved_bytes / _HBM_BYTES_PER_US + 5


@dataclass(frozen=True, slots=True)
class GraphLaunch:
    """Replay of a CUDA graph of `kernels` kernels that do nothing worth timing."""

    kernels: int

    def columns(self) -> Columns:
        """Row columns: `m` is the number of kernels in the graph."""
        return {"m": self.kernels}

    def guess_us(self) -> float:
        """A gap between two kernels of a graph."""
        return 2.0 * self.kernels


Shape = (
    Gemm
    | Decode
    | Extend
    | PrefixPass
    | PrefixSuffix
    | Merge
    | KvCopy
    | Elementwise
    | Stream
    | GraphLaunch
)
