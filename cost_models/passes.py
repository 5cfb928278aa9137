"""The fitted terms for one model on one rank: surfaces at its fixed sizes, ready to be asked.

Built once for a StepCost; each answer is in ns for one layer.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from granikv.cost_models import ideal
from granikv.cost_models.ideal import EXTEND_TILE_ROWS, Peaks
from granikv.cost_models.models import Gemm
from granikv.cost_models.params import FittedSurface
from granikv.cost_models.piecewise import Piece, Pieces, piece_at
from granikv.cost_models.roofline import Heads, Rates, private_compute_ns_per_token
from granikv.cost_models.surface import Curve, FloatArray, Sheet, locate

_LIST_REQUESTS = 24  # below this many requests numpy's fixed cost per call exceeds the loop's
_MAX_OCTAVES = 40  # powers of two of a segment's length that are tabulated


class GemmTime:
    """One matrix product over its number of tokens."""

    def __init__(self, fitted: FittedSurface, peaks: Peaks, gemm: Gemm) -> None:
        """Fix n and k."""
        self._curve = fitted.surface().fix(2, gemm.k).fix(1, gemm.n).curve()
        self._latency_ns = fitted.latency_ns
        self._weight_ns = ideal.ELEMENT_BYTES * gemm.n * gemm.k / peaks.hbm_bytes
        self._row_memory_ns = ideal.ELEMENT_BYTES * (gemm.n + gemm.k) / peaks.hbm_bytes
        self._row_compute_ns = 2 * gemm.n * gemm.k / peaks.flops

    def ns(self, tokens: float) -> float:
        """Time for that many tokens."""
        memory = self._weight_ns + tokens * self._row_memory_ns
        work = max(memory, tokens * self._row_compute_ns)
        return (self._latency_ns + work) / self._curve.efficiency(tokens)


class PagedTime:
    """Paged decode attention: linear in tokens between the knots of tokens per row."""

    def __init__(self, fitted: FittedSurface, peaks: Peaks, heads: Heads) -> None:
        """Fix group and head_dim."""
        surface = fitted.surface().fix(3, heads.head_dim).fix(2, heads.q / heads.kv)
        self._log2_tiles, log2_tokens = surface.log2_knots
        self._log_efficiency = surface.log_efficiency
        self._tokens = 2.0**log2_tokens
        self._peaks, self._heads, self._latency_ns = peaks, heads, fitted.latency_ns
        self._lines: dict[float, Pieces] = {}

    def knots_ns(self, rows: ArrayLike) -> FloatArray:
        """`[rows, knots]`: time at every knot of tokens per row."""
        tiles = np.atleast_1d(np.asarray(rows, np.float64)) * self._heads.kv
        index, share = locate(self._log2_tiles, np.log2(tiles))
        above = np.minimum(index + 1, len(self._log2_tiles) - 1)
        low, high = self._log_efficiency[index], self._log_efficiency[above]
        efficiency = np.exp(low + share[:, None] * (high - low))
        group = self._heads.q / self._heads.kv
        best = ideal.paged_ns(
            self._peaks,
            self._latency_ns,
            tiles[:, None],
            self._tokens,
            group,
            self._heads.head_dim,
        )
        return np.asarray(best / efficiency)

    def line(self, rows: float) -> Pieces:
        """Time over the tokens of all `rows` rows together; flat below the first knot."""
        cached = self._lines.get(rows)
        if cached is None:
            cached = self._lines[rows] = self._make_line(rows)
        return cached

    def alone_ns(self, tokens: float) -> float:
        """Time of one row."""
        line = self.line(1)
        _, a, b = line[piece_at(line, tokens)]
        return a + b * tokens

    def _make_line(self, rows: float) -> Pieces:
        times: list[float] = self.knots_ns(rows)[0].tolist()
        places: list[float] = (self._tokens * rows).tolist()
        pieces: list[Piece] = [(0.0, times[0], 0.0)]
        for i in range(len(times) - 1):
            slope = (times[i + 1] - times[i]) / (places[i + 1] - places[i])
            piece = (places[i], times[i] - slope * places[i], slope)
            if slope == pieces[-1][2]:
                continue
            pieces.append(piece)
        return tuple(pieces)


class PrivatePass:
    """GraniKV's private pass: each row's own tokens, read once from any slots."""

    def __init__(self, rates: Rates, heads: Heads) -> None:
        """One layer of one rank."""
        read_ns = heads.kv_bytes / rates.private_bytes_per_ns
        self._token_ns = max(read_ns, private_compute_ns_per_token(rates, heads))
        self._latency_ns, self._row_ns = rates.private_latency_ns, rates.private_row_ns

    def line(self, rows: float) -> Pieces:
        """Time over the tokens of all `rows` rows together."""
        return ((0.0, self._latency_ns + rows * self._row_ns, self._token_ns),)

    def alone_ns(self, tokens: float) -> float:
        """Time of one row."""
        return self._latency_ns + self._row_ns + tokens * self._token_ns


class RereadCost:
    """What a token that several rows read in GraniKV's private pass costs each of them, as a share
    of a private token.

    Memory is read once for all of them and L2 once for each: the slower one counts. Rows of one
    prefix are neighbours in time (the pass goes through all rows' tokens in pieces of equal
    length), so that neither their number beyond that nor the length matters.
    """

    def __init__(self, share: float) -> None:
        """`share`: what a read from L2 costs, of a read from memory."""
        self._share = share

    def of(self, sharers: float, rows: float, length: int) -> float:
        """The share when `sharers` rows read the same tokens."""
        return max(self._share, 1.0 / max(1.0, sharers))


class ExtendTime:
    """Extend attention over cached prefixes and the new tokens themselves."""

    def __init__(self, fitted: FittedSurface, peaks: Peaks, heads: Heads) -> None:
        """Fix group and head_dim."""
        self._surface = fitted.surface().fix(3, heads.head_dim).fix(2, heads.q / heads.kv)
        self._sheet = Sheet.of(self._surface)
        self._latency_ns = fitted.latency_ns
        self._heads, self._group = heads, heads.q / heads.kv
        self._query_ns = 2 * ideal.ELEMENT_BYTES * heads.head_dim / peaks.hbm_bytes
        self._pair_ns = 4 * heads.head_dim / peaks.flops

    def ns(self, extend_lens: Sequence[int], prefix_lens: Sequence[int]) -> float:
        """Time of one batch.

        A batch of unlike requests takes as long as the worst uniform batch inside of it: for each
        request, as many of its kind as the others' work amounts to, counting none above its own.
        That is exact for a uniform batch, and more work never makes it less.
        """
        if len(extend_lens) > _LIST_REQUESTS:
            return self._many_ns(extend_lens, prefix_lens)
        requests = []
        for new, cached in zip(extend_lens, prefix_lens, strict=True):
            packed, keys = max(new * self._group, EXTEND_TILE_ROWS), cached + (new + 1) / 2
            requests.append((packed * keys, packed, keys))
        requests.sort()
        kv_heads, worst, seen, smaller = self._heads.kv, 0.0, None, 0.0
        for index, request in enumerate(requests):
            work, packed, keys = request
            if request != seen:
                like = len(requests) - index + smaller / work
                worst = max(worst, self._uniform_ns(like * kv_heads * packed, keys))
                seen = request
            smaller += work
        return worst

    def _many_ns(self, extend_lens: Sequence[int], prefix_lens: Sequence[int]) -> float:
        """The same for many requests, in numpy."""
        new = np.asarray(extend_lens, np.float64)
        packed = np.maximum(new * self._group, EXTEND_TILE_ROWS)
        keys = np.asarray(prefix_lens, np.float64) + (new + 1) / 2
        work = packed * keys
        order = np.argsort(work, kind="stable")
        ascending = work[order]
        # Sum of all smaller work, and how many requests are not smaller.
        first = np.searchsorted(ascending, work)
        smaller = np.concatenate([[0.0], np.cumsum(ascending)])[first]
        queries = (len(work) - first + smaller / work) * self._heads.kv * packed
        compute = queries * np.maximum(keys, ideal.LEAST_EXTEND_KEYS) * self._pair_ns
        best = self._latency_ns + np.maximum(queries * self._query_ns, compute)
        return float((best / self._surface.efficiency(queries, keys)).max())

    def _uniform_ns(self, queries: float, keys: float) -> float:
        compute = queries * max(keys, ideal.LEAST_EXTEND_KEYS) * self._pair_ns
        best = self._latency_ns + max(queries * self._query_ns, compute)
        return best / self._sheet.efficiency(queries, keys)


class AllReduceTime:
    """One all-reduce over a fixed number of GPUs."""

    def __init__(self, fitted: FittedSurface, peaks: Peaks, gpus: int) -> None:
        """Fix the number of GPUs."""
        self._curve = fitted.surface().fix(1, gpus).curve()
        self._latency_ns = fitted.latency_ns
        self._byte_ns = 2 * (gpus - 1) / gpus / peaks.nvlink_bytes
        self._gpus = gpus

    def ns(self, num_bytes: float) -> float:
        """Time for a message; nothing for a single GPU."""
        if self._gpus == 1:
            return 0.0
        best = self._latency_ns + self._byte_ns * num_bytes
        return best / self._curve.efficiency(num_bytes)


class DensePass:
    """The prefix pass over one contiguous segment, compute and memory apart."""

    def __init__(
        self, fitted: FittedSurface, peaks: Peaks, heads: Heads, step_efficiency: float = 1.0
    ) -> None:
        """Fix the heads; `step_efficiency` is the share of its rate that it reaches in a server."""
        self._surface = fitted.surface().fix(2, heads.kv)
        self.latency_ns = fitted.latency_ns
        self._group = heads.q / heads.kv
        self._row_compute_ns = 4 * heads.head_dim * heads.kv / peaks.flops
        self._token_memory_ns = heads.kv_bytes / peaks.hbm_bytes
        self._step_efficiency = step_efficiency
        self._of_rows: dict[float, tuple[Curve, float]] = {}

    def ns(self, length: float, rows: float) -> tuple[float, float]:
        """Compute and memory time of `rows` requests over `length` tokens, without latency."""
        cached = self._of_rows.get(rows)
        if cached is None:
            tile_rows = rows * self._group
            curve = self._surface.fix(0, tile_rows).curve()
            token_compute_ns = self._row_compute_ns * max(tile_rows, EXTEND_TILE_ROWS)
            cached = self._of_rows[rows] = (curve, token_compute_ns)
        curve, token_compute_ns = cached
        tokens = length / (curve.efficiency(length) * self._step_efficiency)
        return tokens * token_compute_ns, tokens * self._token_memory_ns


class ShareCost:
    """What a token that several rows read costs each of them, as a share of a private token.

    It falls with the rows that read the same pages at the same time: of all rows, as many run at
    once as there are SMs for their kv heads, and rows of different prefixes take turns. Over many
    such waves the readers drift apart.
    """

    def __init__(self, fitted: FittedSurface, heads: Heads, sm_count: int) -> None:
        """Fix the rows that run at once."""
        self._surface = fitted.surface()
        self._rows_at_once = sm_count / heads.kv
        self._octaves: dict[tuple[float, float], list[float]] = {}

    def of(self, sharers: float, rows: float, length: int) -> float:
        """The share when `sharers` of `rows` rows read the same `length` tokens."""
        octaves = self._octaves.get((sharers, rows))
        if octaves is None:
            octaves = self._octaves[sharers, rows] = self._make_octaves(sharers, rows)
        octave = length.bit_length() - 1
        low = octaves[octave]
        return low + (octaves[octave + 1] - low) * (length / (1 << octave) - 1.0)

    def _make_octaves(self, sharers: float, rows: float) -> list[float]:
        """The share at every power of two; linear between them, which needs no logarithm."""
        waves = rows / self._rows_at_once
        surface = self._surface.fix(1, waves).fix(0, sharers / max(1.0, waves))
        shares: list[float] = surface.efficiency(2.0 ** np.arange(_MAX_OCTAVES)).tolist()
        return shares
