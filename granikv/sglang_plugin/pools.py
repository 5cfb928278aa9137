"""What run records say of a server's KV pools: of one with HOT and COLD, and of a stock one."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from granikv.core.step import StepPlan
from granikv.sglang_plugin.radix_cache import GraniRadixCache
from granikv.sglang_plugin.step_log import Reads
from granikv.sglang_plugin.step_plan import PlannedStep

_PAGED = StepPlan(())  # no segment


class HotColdPools:
    """Of a server with our tree; SGLang's flush makes a new directory, totals go on.

    Args:
        tree: of the server.
        last_step: the decode step that was planned last; None where GraniKV plans none.

    Attributes:
        retractions: requests that lost their row; whoever sees one counts it here.
    """

    def __init__(self, tree: GraniRadixCache, last_step: Callable[[], PlannedStep | None]) -> None:
        self._tree = tree
        self._last_step = last_step
        self._directory = tree.directory
        self._earlier_misses: Counter[str] = Counter()
        self.retractions = 0

    @property
    def hot_tokens(self) -> int:
        """Slots that are HOT."""
        return int(self._tree.token_to_kv_pool_allocator.core.hot_tokens)

    def now(self) -> tuple[int, int]:
        """hot_used and cold_free, in tokens."""
        core = self._tree.token_to_kv_pool_allocator.core
        return core.hot_used, core.cold_free

    def totals(self) -> tuple[int, int, int, int]:
        """hot_misses, evictions, retractions and copied tokens so far."""
        self._follow_flush()
        misses = sum(self._earlier_misses.values()) + sum(self._directory.misses.values())
        tree = self._tree
        moved = 0 if tree.repartitioner is None else tree.repartitioner.moved_tokens
        return misses, tree.evicted_nodes, self.retractions, tree.promoted_tokens + moved

    def misses(self) -> Counter[str]:
        """Slabs that could not be had, by reason."""
        self._follow_flush()
        return self._earlier_misses + self._directory.misses

    def reads(self, batch: Any) -> Reads:
        """Of the decode step that has just been launched, as it was planned."""
        step = self._last_step()
        if step is None:
            return Reads(context_tokens(batch), (), None)
        return Reads(step.shape.private_tokens, step.shape.segments, step.plan)

    def hot_tokens_of(self, req: Any) -> int:
        """Tokens on the path of one of SGLang's requests that are HOT."""
        end = None if req.last_node is None else self._tree.hot_end(req.last_node)
        return 0 if end is None else sum(tokens for _, _, tokens in self._tree.hot_path(end.id))

    def _follow_flush(self) -> None:
        directory = self._tree.directory
        if directory is not self._directory:
            self._earlier_misses += self._directory.misses
            self._directory = directory


class StockPools:
    """Of a server with SGLang's own tree: nothing is HOT, and every row reads all its tokens.

    Args:
        allocator: of KV slots, SGLang's.

    Attributes:
        retractions: requests that lost their row; whoever sees one counts it here.
        evicted_nodes: of the prefix tree; likewise.
    """

    hot_tokens = 0

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator
        self.retractions = 0
        self.evicted_nodes = 0

    def now(self) -> tuple[int, int]:
        """0, and free slots in tokens."""
        return 0, int(self._allocator.available_size())

    def totals(self) -> tuple[int, int, int, int]:
        """hot_misses, evictions, retractions and copied tokens so far."""
        return 0, self.evicted_nodes, self.retractions, 0

    def reads(self, batch: Any) -> Reads:
        """Of the decode step that has just been launched."""
        return Reads(context_tokens(batch), (), _PAGED)

    def hot_tokens_of(self, _req: Any) -> int:
        """None are."""
        return 0


def context_tokens(batch: Any) -> int:
    """KV tokens that a decode step reads, new ones included; does not wait for the device."""
    if batch.seq_lens_cpu is not None:
        return int(batch.seq_lens_cpu.sum())
    return sum(req.seqlen for req in batch.reqs)
