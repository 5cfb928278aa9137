"""What a decode step of the live server shares, and how it is to run: on the host, once a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from granikv.core.dispatch import Dispatcher
from granikv.core.row_tables import RowTables, row_tables
from granikv.core.step import Launch, Mode, StepPlan, StepShape
from granikv.kernels.overlap import Overlap, choose_overlap
from granikv.kernels.shapes import Heads
from granikv.sglang_plugin.radix_cache import GraniRadixCache

# Which kernels a step launches, and so which CUDA graph it replays: the memory-bound pass alone, or
# with a dense pass and their overlap. `fa3` is FlashAttention-3's pair.
Variant = Literal["stream", "serial", "split", "beside", "fa3"]

MAX_SEGMENTS = 64


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A decode step before it is launched.

    Attributes:
        shape: of the step.
        plan: of the dispatcher.
        variant: the kernels.
        tables: which segments each row reads; the same object while nothing has changed.
    """

    shape: StepShape
    plan: StepPlan
    variant: Variant
    tables: RowTables


class StepPlanner:
    """Plans a server's steps; remembers the last batch, which mostly is the next one too.

    Args:
        dispatcher: of the server.
        heads: of this rank.
        overlaps: of both passes that the device can run: `serial`, `split`, or `split` and
            `beside`.
        kernels: `granikv` or `fa3`.
        share: False lets every row read all its tokens by itself.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        heads: Heads,
        *,
        overlaps: tuple[Overlap, ...],
        kernels: Literal["granikv", "fa3"] = "granikv",
        share: bool = True,
    ) -> None:
        self.dispatcher = dispatcher
        self._share = share
        self._heads = heads
        self._overlaps = overlaps
        self._kernels = kernels
        self._reqs: Sequence[Any] = ()
        self._count = 0
        self._version: int | None = None
        self._tables = row_tables([], lambda _: ())

    def plan(
        self, tree: GraniRadixCache, reqs: Sequence[Any], seq_lens: NDArray[np.int64]
    ) -> PlannedStep:
        """The step of a batch.

        Args:
            tree: that the requests' paths are in.
            reqs: of the batch, by row.
            seq_lens: int64 `[rows]`, tokens that each row reads, its new one included.
        """
        tables = self._row_tables(tree, reqs)
        own = seq_lens - tables.shared_tokens
        rows, heads = len(reqs), self._heads
        shape = StepShape(
            rows, rows, int(own.sum()), int(own.max()), tables.segments, heads.q, heads.kv,
            heads.dim,
        )  # fmt: skip
        plan = self.dispatcher.plan(shape)
        return PlannedStep(shape, plan, self._variant(shape, plan), tables)

    def _row_tables(self, tree: GraniRadixCache, reqs: Sequence[Any]) -> RowTables:
        # SGLang makes a new list when rows leave a batch and extends the list when rows come.
        same = reqs is self._reqs and len(reqs) == self._count and tree.version == self._version
        if not same:
            ends = [tree.hot_end(req.last_node) if self._share else None for req in reqs]
            self._tables = row_tables(
                [None if end is None else int(end.id) for end in ends],
                tree.hot_path,
                max_segments=MAX_SEGMENTS,
            )
            self._reqs, self._count, self._version = reqs, len(reqs), tree.version
        return self._tables

    @property
    def variants(self) -> tuple[Variant, ...]:
        """All that `plan` may answer."""
        if not self._share:
            return ("stream",)
        if self._kernels == "fa3":
            return ("stream", "fa3")
        return ("stream", *self._overlaps)

    def _variant(self, shape: StepShape, plan: StepPlan) -> Variant:
        dense = [
            (segment.length, segment.rows)
            for segment, mode in zip(shape.segments, plan.modes, strict=True)
            if mode == Mode.DENSE
        ]
        if not dense:
            return "stream"
        if self._kernels == "fa3":
            return "fa3" if len(dense) == 1 and dense[0][1] == shape.rows else "stream"
        if plan.launch == Launch.TWO_CALL or "beside" not in self._overlaps:
            return self._overlaps[0]
        return choose_overlap(shape.rows, shape.group, dense, shape.private_tokens)
