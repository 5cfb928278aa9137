"""Which part of a cached path moves into a HOT slab, whatever prefix tree is above it.

A HOT node's parent is HOT or the root, so a wanted node takes its COLD ancestors along into one
slab: they have at least as many readers.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from granikv.core.admission import PrefixView
from granikv.core.directory import Reservation, SlabDirectory


class PathNode(Protocol):
    """What a prefix tree knows about one of its nodes."""

    @property
    def node_id(self) -> int:
        """The tree's name for it."""

    @property
    def length(self) -> int:
        """Its tokens."""

    @property
    def lock_ref(self) -> int:
        """Live requests whose path goes through it."""

    @property
    def hits(self) -> int:
        """Uses: 1 when it is made, and 1 for every later request that runs on it."""

    @property
    def first_use_s(self) -> float:
        """When it was made."""

    @property
    def last_use_s(self) -> float:
        """When a request last ran on it."""


Member = TypeVar("Member", bound=PathNode, contravariant=True)


class HotTree(Protocol[Member]):
    """What placement asks of a prefix tree."""

    def is_hot_cached(self, node_id: int) -> bool:
        """Whether the node is HOT and still in the tree (its ancestor's eviction takes it)."""

    def evict_hot(self, node_id: int) -> None:
        """Drop an unlocked HOT node with everything cached below it."""

    def make_hot(self, node: Member, reservation: Reservation) -> None:
        """Move a COLD node into the next slots of `reservation`."""


def promote(
    directory: SlabDirectory, tree: HotTree[Member], chain: Sequence[Member], now_s: float
) -> int:
    """Move the longest wanted part of `chain` into one slab; returns its tokens, 0 for none.

    Args:
        directory: of the slabs.
        tree: that `chain` belongs to.
        chain: COLD nodes in a row, each the next one's parent, below HOT ones or the root.
        now_s: the time of the decision.
    """
    length = sum(node.length for node in chain)
    for count in range(len(chain), 0, -1):
        view = view_of(chain[count - 1], length, now_s)
        if directory.wants(view) and make_room(directory, tree, view):
            reservation = directory.reserve(view)
            if reservation is None:
                return 0
            for member in chain[:count]:
                tree.make_hot(member, reservation)
            directory.release(reservation)
            return length
        length -= chain[count - 1].length
    return 0


def promote_fitting(
    directory: SlabDirectory, tree: HotTree[Member], chain: Sequence[Member], now_s: float
) -> int:
    """As `promote`, of what free HOT has room for: nobody asks for it now, so that nothing is
    evicted and no miss counted.
    """
    room, fitting = directory.largest_free_run, 0
    for member in chain:
        room -= member.length
        if room < 0:
            break
        fitting += 1
    return promote(directory, tree, chain[:fitting], now_s)


def reserve_declared(
    directory: SlabDirectory, tree: HotTree[Member], node: int, length: int, now_s: float
) -> Reservation | None:
    """A slab for a prefix that the request that declares it is about to prefill; None for none.

    Args:
        directory: of the slabs.
        tree: that the prefix will be in.
        node: names a prefix that has no node yet.
        length: tokens of the slab.
        now_s: the time of the decision.
    """
    view = PrefixView(
        node=node,
        length=length,
        live_requests=1,
        hits=1,
        first_use_s=now_s,
        last_use_s=now_s,
        now_s=now_s,
        hinted=True,
    )
    if directory.wants(view) and make_room(directory, tree, view):
        return directory.reserve(view)
    return None


def make_room(directory: SlabDirectory, tree: HotTree[Member], view: PrefixView) -> bool:
    """Evict what admission offers for `view`; False, and a miss, when that is not enough."""
    victims = directory.victims(view)
    if victims is None:
        return False
    for node_id in victims:
        if tree.is_hot_cached(node_id):
            tree.evict_hot(node_id)
    return True


def view_of(node: PathNode, length: int, now_s: float) -> PrefixView:
    """A node, and the COLD ones above it, `length` tokens in all, as admission sees them."""
    return PrefixView(
        node=node.node_id,
        length=length,
        live_requests=node.lock_ref,
        hits=node.hits,
        first_use_s=node.first_use_s,
        last_use_s=node.last_use_s,
        now_s=now_s,
        hinted=False,
    )
