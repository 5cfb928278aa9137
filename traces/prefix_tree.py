"""A radix tree over runs: which prefixes a trace shares, how often and how densely in time."""

from collections import deque
from collections.abc import Iterator
from itertools import pairwise

from granikv.core.errors import IntegrityError
from granikv.traces.request import Run
from granikv.traces.segments import is_private

# A child is found by what its first token is: a stream and a place in it.
_Key = tuple[int, int]


class PrefixNode:
    """A prefix of some prompts, from the root to `depth_tokens`.

    Attributes:
        depth_tokens: tokens from the start of the prompt.
        requests: prompts that have this prefix.
        first_s: arrival of the first of them.
        last_s: arrival of the latest.
        peak: most of them in one window.
    """

    __slots__ = (
        "children",
        "depth_tokens",
        "first_s",
        "last_s",
        "length",
        "parent",
        "peak",
        "recent",
        "requests",
        "segment",
        "start",
    )

    def __init__(self, parent: "PrefixNode | None", segment: int, start: int, length: int) -> None:
        self.parent = parent
        self.segment = segment
        self.start = start
        self.length = length
        self.depth_tokens: int = length + (parent.depth_tokens if parent is not None else 0)
        self.children: dict[_Key, PrefixNode] = {}
        self.requests = 0
        self.first_s = 0.0
        self.last_s = 0.0
        self.peak = 0
        self.recent: deque[float] = deque()


class PrefixTree:
    """Prompts in order of arrival, merged where they share tokens from the first on.

    Private runs are never stored, so a trace without prefixes needs no memory here.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._root = PrefixNode(None, 0, 0, 0)

    def add(self, prompt: tuple[Run, ...], now_s: float) -> int:
        """Insert a prompt; the tokens that it shares with earlier ones."""
        node = self._root
        shared = 0
        for segment, length in prompt:
            if is_private(segment):
                break
            start = 0
            while start < length:
                child = node.children.get((segment, start))
                if child is None:
                    child = PrefixNode(node, segment, start, length - start)
                    node.children[segment, start] = child
                    child.first_s = now_s
                else:
                    if child.length > length - start:
                        child = self._split(child, length - start)
                    shared += child.length
                self._visit(child, now_s)
                start += child.length
                node = child
        return shared

    def nodes(self) -> Iterator[PrefixNode]:
        """All prefixes where a run ends or prompts part, parents first."""
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def shared_prefixes(self) -> list[PrefixNode]:
        """Maximal prefixes of two or more prompts: any longer one has fewer."""
        return [
            node
            for node in self.nodes()
            if node.requests > 1
            and all(child.requests < node.requests for child in node.children.values())
        ]

    def check_integrity(self) -> None:
        """Check the tree's invariants.

        Raises:
            IntegrityError: a prefix has fewer prompts than the longer ones, or a wrong depth.
        """
        for node in self.nodes():
            below = sum(child.requests for child in node.children.values())
            times = list(node.recent)
            assert node.parent is not None
            sound = (
                below <= node.requests
                and node.depth_tokens == node.parent.depth_tokens + node.length
                and all(before <= after for before, after in pairwise(times))
            )
            if not sound:
                raise IntegrityError(f"prefix of {node.depth_tokens} tokens breaks the tree.")

    def _visit(self, node: PrefixNode, now_s: float) -> None:
        node.requests += 1
        node.last_s = now_s
        recent = node.recent
        recent.append(now_s)
        while recent[0] <= now_s - self._window_s:
            recent.popleft()
        if len(recent) > node.peak:
            node.peak = len(recent)

    @staticmethod
    def _split(node: PrefixNode, length: int) -> PrefixNode:
        """Cut a node in two; the upper part of `length` tokens, which takes its place."""
        assert node.parent is not None
        upper = PrefixNode(node.parent, node.segment, node.start, length)
        upper.requests, upper.peak = node.requests, node.peak
        upper.first_s, upper.last_s = node.first_s, node.last_s
        upper.recent = node.recent.copy()
        node.parent.children[node.segment, node.start] = upper
        node.parent = upper
        node.start += length
        node.length -= length
        upper.children[node.segment, node.start] = node
        return upper
