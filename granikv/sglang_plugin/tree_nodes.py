"""What our radix tree says of its nodes: to placement, and to whoever holds a node's slots."""

from dataclasses import dataclass

from sglang.srt.mem_cache.radix_cache import TreeNode

from granikv.core.allocator import Slots


@dataclass(frozen=True, slots=True)
class HotMove:
    """A node whose tokens lie elsewhere now, in HOT; every holder of `src` is to hold `dst`.

    Attributes:
        node: that has moved.
        start: its first token on its path.
        src: slots that it had, int32 `[n]`.
        dst: its HOT slots, int32 `[n]`.
    """

    node: TreeNode
    start: int
    src: Slots
    dst: Slots


@dataclass(frozen=True, slots=True)
class Use:
    """How often a node was used, and when."""

    hits: int
    first_s: float
    last_s: float


@dataclass(frozen=True, slots=True)
class Member:
    """A node as placement sees it."""

    node: TreeNode
    start: int
    use: Use

    @property
    def node_id(self) -> int:
        return int(self.node.id)

    @property
    def length(self) -> int:
        return len(self.node.key)

    @property
    def lock_ref(self) -> int:
        return int(self.node.lock_ref)

    @property
    def hits(self) -> int:
        return self.use.hits

    @property
    def first_use_s(self) -> float:
        return self.use.first_s

    @property
    def last_use_s(self) -> float:
        return self.use.last_s
