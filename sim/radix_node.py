"""Node and Cursor: what the prefix index is made of, and the arithmetic of runs of tokens."""

from collections.abc import Sequence

from granikv.core.allocator import Slots
from granikv.core.errors import IntegrityError
from granikv.traces.request import Run

NodeRun = tuple[int, int, int]


class Node:
    """A radix node: the tokens between its parent's end and its own, and who uses them.

    `slots` holds COLD slots `[length]`; None means that the tokens lie in the directory's slab of
    this node. `lock_ref` counts the live requests whose path goes through the node.
    """

    __slots__ = (
        "children",
        "first_use_s",
        "hits",
        "in_heap",
        "last_access",
        "last_use_s",
        "length",
        "lock_ref",
        "node_id",
        "parent",
        "runs",
        "slots",
        "whole_runs",
    )

    def __init__(
        self,
        node_id: int,
        parent: "Node | None",
        runs: tuple[NodeRun, ...],
        length: int,
        slots: Slots | None,
    ) -> None:
        self.node_id = node_id
        self.parent = parent
        self.length = length
        self.slots = slots
        self.children: dict[tuple[int, int], Node] = {}
        self.lock_ref = 0
        self.last_access = 0
        self.hits = 0
        self.first_use_s = 0.0
        self.last_use_s = 0.0
        self.in_heap = False
        self.set_runs(runs)

    def set_runs(self, runs: tuple[NodeRun, ...]) -> None:
        """Set the key; `whole_runs` is its form in a prompt when every run starts at its stream's
        start.
        """
        self.runs = runs
        whole = all(start == 0 for _, start, _ in runs)
        self.whole_runs = tuple((segment, length) for segment, _, length in runs) if whole else None

    @property
    def is_hot(self) -> bool:
        """Whether the tokens lie in a HOT slab."""
        return self.slots is None

    @property
    def key(self) -> tuple[int, int]:
        """Where the node hangs below its parent: first segment and start in it."""
        return self.runs[0][0], self.runs[0][1]

    def path(self) -> "list[Node]":
        """Nodes from below the root down to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


class Cursor:
    """A place in a prompt and the node that holds the tokens before it."""

    __slots__ = ("depth", "node", "offset", "run")

    def __init__(self, node: Node, run: int = 0, offset: int = 0, depth: int = 0) -> None:
        self.node = node
        self.run = run
        self.offset = offset
        self.depth = depth


def common_tokens(
    runs: tuple[NodeRun, ...], prompt: Sequence[Run], run: int, offset: int, limit: int
) -> tuple[int, int, int]:
    """Tokens that a node's runs share with the prompt from (run, offset), and where they end."""
    common = 0
    for segment, start, length in runs:
        if run >= len(prompt) or common >= limit:
            break
        here, here_length = prompt[run]
        if here != segment or offset != start:
            break
        shared = min(length, here_length - offset, limit - common)
        common += shared
        offset += shared
        if offset == here_length:
            run, offset = run + 1, 0
        if shared < length:
            break
    return common, run, offset


def split_runs(
    runs: tuple[NodeRun, ...], left: int
) -> tuple[tuple[NodeRun, ...], tuple[NodeRun, ...]]:
    for index, (segment, start, length) in enumerate(runs):
        if left < length:
            if left == 0:
                return runs[:index], runs[index:]
            head = (*runs[:index], (segment, start, left))
            return head, ((segment, start + left, length - left), *runs[index + 1 :])
        left -= length
    raise IntegrityError("a node was split at its end")


def take_runs(
    prompt: Sequence[Run], run: int, offset: int, tokens: int
) -> tuple[tuple[NodeRun, ...], int, int]:
    """The prompt's next `tokens` tokens as node runs, and the place after them."""
    taken: list[NodeRun] = []
    while tokens:
        segment, length = prompt[run]
        part = min(tokens, length - offset)
        taken.append((segment, offset, part))
        tokens -= part
        offset += part
        if offset == length:
            run, offset = run + 1, 0
    return tuple(taken), run, offset
