"""RowGroups: which running rows read which nodes of the prefix tree, as the segments of a step."""

from collections.abc import Sequence

from granikv.core.errors import IntegrityError
from granikv.core.step import Segment

PathNode = tuple[int, int, int]


class _Node:
    """A node that at least one running row reads."""

    __slots__ = ("base", "length", "parent", "rows")

    def __init__(self, parent: int | None, length: int, base: int, rows: int) -> None:
        self.parent = parent
        self.length = length
        self.base = base
        self.rows = rows

    def key(self) -> tuple[int | None, int, int]:
        return self.parent, self.length, self.base


class RowGroups:
    """Rows per tree node, kept up to date as rows come and go, and the segments they share.

    A node is an int of the caller's choice. A row's path lists its nodes from the root down; every
    path that holds a node holds the same nodes above it. Work per call is linear in the path, and
    `segments` is rebuilt from the shared nodes alone, only after a change.
    """

    def __init__(self, max_segments: int = 64) -> None:
        if max_segments < 1:
            raise ValueError(f"max_segments must be positive, got {max_segments}")
        self._max_segments = max_segments
        self._nodes: dict[int, _Node] = {}
        self._shared: dict[int, _Node] = {}
        self._segments: tuple[Segment, ...] | None = ()
        self._shared_tokens = 0

    def join(self, path: Sequence[PathNode]) -> None:
        """Add a row that reads `path`: `(node, length, base)` from the root down, base 0 = COLD.

        Raises:
            ValueError: a node is known with another parent, length or base, comes twice, or has no
                tokens; nothing has changed then.
        """
        nodes, shared = self._nodes, self._shared
        known = self._known_depth(path)
        for node, _, _ in path[:known]:
            entry = nodes[node]
            entry.rows += 1
            if entry.rows == 2:
                shared[node] = entry
        parent = path[known - 1][0] if known else None
        for node, length, base in path[known:]:
            nodes[node] = _Node(parent, length, base, 1)
            parent = node
        if known:
            self._segments = None

    def leave(self, path_nodes: Sequence[int]) -> None:
        """Remove a row that reads these nodes (the path as it is now, splits included).

        Raises:
            ValueError: the nodes are not the path of a row; nothing has changed then.
        """
        nodes, shared = self._nodes, self._shared
        parent: int | None = None
        for node in path_nodes:
            entry = nodes.get(node)
            if entry is None or entry.parent != parent:
                raise ValueError(f"path_nodes must be the path of a row, got {list(path_nodes)}")
            parent = node
        for node in path_nodes:
            entry = nodes[node]
            entry.rows -= 1
            if entry.rows == 1:
                del shared[node]
                self._segments = None
            elif not entry.rows:
                del nodes[node]
            else:
                self._segments = None

    def split(self, node: int, parent: int, left_length: int) -> None:
        """Put the new node `parent` above `node`, with its first `left_length` tokens.

        Every row of `node` reads `parent` from now on. A node that no row reads is ignored.

        Raises:
            ValueError: `parent` is known already, or `left_length` is not inside the node.
        """
        entry = self._nodes.get(node)
        if entry is None:
            return
        if parent in self._nodes or not 0 < left_length < entry.length:
            raise ValueError(
                f"split must make a new node from 1..{entry.length - 1} tokens of node {node},"
                f" got node {parent} with {left_length} tokens"
            )
        upper = _Node(entry.parent, left_length, entry.base, entry.rows)
        self._nodes[parent] = upper
        if entry.rows > 1:
            self._shared[parent] = upper
            self._segments = None
        entry.parent = parent
        entry.length -= left_length
        if entry.base:
            entry.base += left_length

    def place(self, node: int, base: int) -> None:
        """Say that the node's KV now starts at slot `base` (promoted, relocated), 0 for COLD.

        A node that no row reads is ignored.

        Raises:
            ValueError: `base` is negative.
        """
        if base < 0:
            raise ValueError(f"base must not be negative, got {base}")
        entry = self._nodes.get(node)
        if entry is None or entry.base == base:
            return
        entry.base = base
        if entry.rows > 1:
            self._segments = None

    def rows_of(self, node: int) -> int:
        """Running rows that read this node."""
        entry = self._nodes.get(node)
        return entry.rows if entry is not None else 0

    def segments(self) -> tuple[Segment, ...]:
        """Segments that two or more rows read: HOT by base, then COLD by falling length and node.

        A node and its parent make one segment when the same rows read both and both are COLD or
        follow each other in HOT. When there are more than `max_segments`, those with the most
        `rows * length` stay and the rest counts as private. The same tuple object comes back until
        something changes.
        """
        if self._segments is None:
            self._segments = self._build()
            self._shared_tokens = sum([s.rows * s.length for s in self._segments])
        return self._segments

    @property
    def shared_tokens(self) -> int:
        """KV tokens that rows read through segments: the sum of `rows * length`."""
        self.segments()
        return self._shared_tokens

    def check_integrity(self) -> None:
        """Check row counts against the tree and the cached segments against fresh ones.

        Raises:
            IntegrityError: the invariant that does not hold.
        """
        below = dict.fromkeys(self._nodes, 0)
        for node, entry in self._nodes.items():
            if entry.rows < 1 or entry.length < 1 or entry.base < 0:
                raise IntegrityError(f"node {node} must have rows, tokens and a base of 0 or more")
            if entry.parent is not None:
                if entry.parent not in below:
                    raise IntegrityError(f"parent {entry.parent} of node {node} must have rows")
                below[entry.parent] += entry.rows
        for node, rows in below.items():
            if rows > self._nodes[node].rows:
                raise IntegrityError(
                    f"rows of the children of {node} ({rows}) <= its rows must hold"
                )
        if self._shared != {n: e for n, e in self._nodes.items() if e.rows > 1}:
            raise IntegrityError("shared nodes must be the nodes with two or more rows")
        if self._segments is not None and self._segments != self._build():
            raise IntegrityError("cached segments must equal fresh ones")

    def _known_depth(self, path: Sequence[PathNode]) -> int:
        """Check a new path; return how many of its nodes, from the root, have rows already."""
        nodes = self._nodes
        parent: int | None = None
        known = 0
        for node, length, base in path:
            entry = nodes.get(node)
            if entry is None:
                break
            if entry.base != base or entry.length != length or entry.parent != parent:
                raise ValueError(
                    f"path must agree with what is known, got {(parent, length, base)}"
                    f" for node {node} which has (parent, length, base) {entry.key()}"
                )
            parent = node
            known += 1
        rest = path[known:]
        if rest:
            fresh = {node for node, length, base in rest if length > 0 and base >= 0}
            if len(fresh) != len(rest) or not fresh.isdisjoint(nodes):
                raise ValueError(
                    "path must hold each node once, below its parent, with tokens and a base of"
                    f" 0 or more, got {list(path)}"
                )
        return known

    def _build(self) -> tuple[Segment, ...]:
        shared = self._shared
        below: dict[int, tuple[int, _Node]] = {}
        heads: list[tuple[int, _Node]] = []
        for item in shared.items():
            entry = item[1]
            parent = entry.parent
            if parent is not None and parent in shared:
                upper = shared[parent]
                if upper.rows == entry.rows and _adjoin(upper, entry):
                    below[parent] = item
                    continue
            heads.append(item)
        chains = [(*_chain(node, entry, below), node) for node, entry in heads]
        if len(chains) > self._max_segments:
            chains.sort(key=lambda c: (-c[1] * c[2], *_order(c)))
            del chains[self._max_segments :]
        if len(chains) > 1:
            chains.sort(key=_order)
        return tuple([Segment(base, length, rows) for base, length, rows, _ in chains])


def _adjoin(upper: _Node, lower: _Node) -> bool:
    if upper.base == 0 or lower.base == 0:
        return upper.base == lower.base
    return upper.base + upper.length == lower.base


def _chain(node: int, head: _Node, below: dict[int, tuple[int, _Node]]) -> tuple[int, int, int]:
    length = head.length
    while node in below:
        node, entry = below[node]
        length += entry.length
    return head.base, length, head.rows


def _order(chain: tuple[int, int, int, int]) -> tuple[bool, int, int]:
    base, length, _, node = chain
    return (base == 0, base or -length, node)
