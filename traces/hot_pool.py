"""Which whole prefixes a HOT pool should hold, if the trace were known: a greedy oracle."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from granikv.traces.prefix_tree import PrefixNode

SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000)


@dataclass(frozen=True, slots=True)
class PoolRow:
    """A pool of the best `prefixes` prefixes: what it stores and which prompt tokens it serves.

    Each prefix is stored whole, also where it begins with another one (slabs share nothing). The
    request that brings a prefix counts as served, so the sum can pass an infinite cache's hits.
    """

    prefixes: int
    stored_tokens: int
    served_tokens: int


class _Pool:
    """Prefixes chosen so far, and what another one would add."""

    def __init__(self) -> None:
        self.chosen: set[PrefixNode] = set()
        # Requests of a node that a chosen longer prefix serves already.
        self._served_below: dict[PrefixNode, int] = {}

    def _nearest_chosen(self, node: PrefixNode) -> PrefixNode | None:
        above = node.parent
        while above is not None and above not in self.chosen:
            above = above.parent
        return above

    def gain_tokens(self, node: PrefixNode) -> int:
        """Prompt tokens that the pool would serve in addition with this prefix."""
        above = self._nearest_chosen(node)
        new_tokens = node.depth_tokens - (above.depth_tokens if above is not None else 0)
        return new_tokens * (node.requests - self._served_below.get(node, 0))

    def choose(self, node: PrefixNode) -> None:
        """Take a prefix into the pool."""
        new_requests = node.requests - self._served_below.get(node, 0)
        self.chosen.add(node)
        above = node.parent
        while above is not None:
            self._served_below[above] = self._served_below.get(above, 0) + new_requests
            if above in self.chosen:
                return
            above = above.parent


def greedy_pool(
    prefixes: Iterable[PrefixNode], sizes: tuple[int, ...] = SIZES
) -> tuple[PoolRow, ...]:
    """Pools of growing size, each prefix the one that serves most tokens per token stored.

    A prefix serves a request the tokens that no chosen shorter prefix serves it. What a prefix
    adds only falls as others are chosen, so an estimate that is still the best after an update is
    exact.
    """
    pool = _Pool()
    # Ties go to the shorter prefix, then to the one that came first.
    waiting = [
        (-float(node.requests), node.depth_tokens, order, node)
        for order, node in enumerate(sorted(prefixes, key=lambda node: node.first_s))
    ]
    heapq.heapify(waiting)
    rows: list[PoolRow] = []
    stored = served = 0
    while waiting and len(pool.chosen) < sizes[-1]:
        _, depth, order, node = waiting[0]
        gain = pool.gain_tokens(node)
        current = (-gain / node.depth_tokens, depth, order, node)
        if len(waiting) > 1 and current > min(waiting[1:3])[:4]:
            heapq.heapreplace(waiting, current)
            continue
        heapq.heappop(waiting)
        if gain <= 0:
            break
        pool.choose(node)
        stored += node.depth_tokens
        served += gain
        if len(pool.chosen) in sizes:
            rows.append(PoolRow(len(pool.chosen), stored, served))
    return tuple(rows)
