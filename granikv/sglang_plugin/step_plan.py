"""What a decode step of the live server shares, and how it is to run: on the host, once a step."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from granikv.core.dispatch import READS_COLD, Dispatcher
from granikv.core.row_tables import RowTables, row_tables
from granikv.core.step import Launch, Mode, StepPlan, StepShape
from granikv.kernels.overlap import Overlap, choose_overlap
from granikv.kernels.shapes import Heads
from granikv.sglang_plugin.radix_cache import GraniRadixCache

# Which kernels a step launches, and so which CUDA graph it replays: the memory-bound pass alone, or
# with a dense pass and their overlap. `fa3` is FlashAttention-3's pair.
Variant = Literal["stream", "serial", "split", "beside", "fa3"]

MAX_SEGMENTS = 64
PAIR_TOKENS = 2048  # private tokens of a row that FA3's pair has room for
_MAX_NODES = 1 << 16  # whose HOT path is remembered


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
        self._ends: dict[int, int | None] = {}
        self._hot_version = -1
        self._reqs: Sequence[Any] = ()
        self._batch: tuple[int, int, int, str] = (0, -1, -1, "")
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
        choice = self.dispatcher.choice
        batch = (len(reqs), tree.paths_version, tree.hot_version, choice)
        if reqs is not self._reqs or batch != self._batch:
            self._reqs, self._batch = reqs, batch
            if not self._share:
                found = row_tables([None] * len(reqs), lambda _: ())
            elif choice in READS_COLD:
                found = shared_tables(tree, reqs, len(reqs) if choice == "cascade_global" else 2)
            else:
                ends = self._hot_ends(tree, reqs)
                found = row_tables(ends, tree.hot_path, max_segments=MAX_SEGMENTS)
            self._tables = found
        return self._tables

    def _hot_ends(self, tree: GraniRadixCache, reqs: Sequence[Any]) -> list[int | None]:
        """The lowest HOT node of each row's path.

        A node is looked at once while HOT is as it is.
        """
        if tree.hot_version != self._hot_version or len(self._ends) > _MAX_NODES:
            self._ends.clear()
            self._hot_version = tree.hot_version
        known = self._ends
        last = [req.last_node for req in reqs]
        for node in last:
            if node.id not in known:
                end = tree.hot_end(node)
                known[node.id] = None if end is None else int(end.id)
        return [known[node.id] for node in last]

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
            is_one = len(shape.segments) == 1 and shape.segments[0].rows == shape.rows
            return "fa3" if is_one and shape.max_private_tokens <= PAIR_TOKENS else "stream"
        if plan.launch == Launch.TWO_CALL or "beside" not in self._overlaps:
            # Dividing the card, the kernels' own plan gives all of it to the dense pass if need be.
            return self._overlaps[0]
        return choose_overlap(shape.rows, shape.group, dense, shape.private_tokens)


def shared_tables(tree: GraniRadixCache, reqs: Sequence[Any], least_rows: int) -> RowTables:
    """Tables of all that so many rows share, wherever it lies.

    For comparisons and for a look now and then, and not made for speed.
    """
    paths = {req.last_node.id: tree.path(req.last_node) for req in reqs}
    rows = Counter(node.id for req in reqs for node in paths[req.last_node.id])
    base: dict[int, int] = {}
    for req in reqs:
        for node in paths[req.last_node.id]:
            # In COLD: where the first of its readers has it.
            base.setdefault(node.id, tree.base_of(node) or -1 - req.req_pool_idx)

    def shared_path(end: int) -> list[tuple[int, int, int]]:
        shared = takewhile(lambda node: rows[node.id] >= least_rows, paths[end])
        return [(node.id, base[node.id], len(node.key)) for node in shared]

    ends = [req.last_node.id for req in reqs]
    return row_tables(ends, shared_path, max_segments=MAX_SEGMENTS)
