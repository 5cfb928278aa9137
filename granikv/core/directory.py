"""SlabDirectory: the life of HOT slabs by node of whichever prefix index is above it."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from granikv.core.admission import HotAdmission, IdleSlab, PrefixView, makes_run
from granikv.core.allocator import HotColdAllocator, Migration, Slab, Slots
from granikv.core.errors import IntegrityError
from granikv.core.relocation import Relocation


@dataclass(slots=True, eq=False)
class Reservation:
    """Room for a prefix that is being prefilled; the directory alone changes it.

    Attributes:
        view: the prefix as it was seen when the room was reserved.
        slab: the part that is bound to no node yet, None when all is bound or the room is released.
        filled: tokens handed out by `take`.
        bound: tokens that belong to nodes.
    """

    view: PrefixView
    slab: Slab | None
    filled: int = 0
    bound: int = 0


@dataclass(slots=True, eq=False)
class _Resident:
    """A node with a slab, and what admission wants to know about it."""

    slab: Slab
    locks: int
    hits: int
    first_use_s: float
    last_use_s: float
    hinted: bool


class SlabDirectory:
    """Which node has which slab, who holds it, and how room for the next one is found.

    Node ids are ints that only the prefix index above understands. The index asks `wants`, then
    `victims`, evicts those nodes, and then reserves (to prefill in place) or promotes (to copy).
    An unlocked slab stays as a cache until it is evicted.

    Attributes:
        misses: wanted slabs that could not be had: `too_long` (longer than HOT), `no_room` (free
            tokens short), `fragmented` (enough free tokens but no run).
        hot_miss_tokens: tokens of those slabs.
        evictions: slabs freed by `evict`.
        relocated_tokens: tokens copied from slab to slab.
    """

    def __init__(self, allocator: HotColdAllocator, admission: HotAdmission) -> None:
        self.misses: Counter[str] = Counter()
        self.hot_miss_tokens = 0
        self.evictions = 0
        self.relocated_tokens = 0
        self._allocator = allocator
        self._admission = admission
        self._residents: dict[int, _Resident] = {}
        self._reservations: dict[Reservation, None] = {}
        self._relocations: dict[Relocation, None] = {}

    def wants(self, view: PrefixView) -> bool:
        """Whether the prefix should get a slab: not attached yet, fits the pool, policy says yes.

        A prefix that only a larger HOT could hold is wanted; `victims` then counts it as a miss.
        """
        return (
            view.node not in self._residents
            and 0 < view.length < self._allocator.size_tokens
            and self._admission.wants_slab(view)
        )

    @property
    def largest_free_run(self) -> int:
        """Tokens of the longest slab that fits without eviction."""
        return self._allocator.largest_free_run

    def victims(self, view: PrefixView) -> list[int] | None:
        """Nodes to evict before `view` fits, [] when it fits now; None, and a miss, when it cannot.

        The policy's offer counts only if it consists of idle nodes and makes a run long enough.
        """
        allocator = self._allocator
        if allocator.can_reserve(view.length):
            return []
        if view.length <= allocator.slab_limit_tokens:
            idle = [
                slab
                for slab in self.idle(view.now_s)
                if slab.base + slab.length <= allocator.slab_limit_tokens + 1
            ]
            nodes = self._admission.victims(view, idle)
            if makes_run(nodes, idle, view.length):
                return nodes
        self.misses[self._miss_reason(view.length)] += 1
        self.hot_miss_tokens += view.length
        return None

    def reserve(self, view: PrefixView) -> Reservation | None:
        """Take room for `view.length` tokens without asking admission; None when no run fits."""
        slab = self._allocator.reserve_slab(view.length)
        if slab is None:
            return None
        reservation = Reservation(view, slab)
        self._reservations[reservation] = None
        return reservation

    def take(self, reservation: Reservation, n: int) -> Slots:
        """Next `n` slots to fill, int32 `[n]` in a row.

        Raises:
            ValueError: the reservation is not open, or has fewer than `n` slots left.
        """
        slab = self._open_slab(reservation)
        start = slab.base + reservation.filled - reservation.bound
        if n < 0 or start + n > slab.end:
            raise ValueError(f"n must be in 0..{slab.end - start}, got {n}")
        reservation.filled += n
        return np.arange(start, start + n, dtype=np.int32)

    def bind(self, node: int, reservation: Reservation, n: int, locks: int = 0) -> Slab:
        """Make the next `n` filled tokens the slab of `node`; `locks` requests hold it already.

        Raises:
            ValueError: the node has a slab, the reservation is not open, or `n` is not in
                1..filled and not bound.
        """
        slab = self._open_slab(reservation)
        self._check_new(node, locks)
        if not 0 < n <= reservation.filled - reservation.bound:
            raise ValueError(f"n must be in 1..{reservation.filled - reservation.bound}, got {n}")
        if n < slab.length:
            slab, reservation.slab = self._allocator.split_slab(slab, n)
        else:
            reservation.slab = None
            del self._reservations[reservation]
        reservation.bound += n
        self._attach(node, slab, reservation.view, locks)
        return slab

    def release(self, reservation: Reservation) -> None:
        """Free what is not bound, when a prefill ends or is given up; twice is harmless."""
        if reservation not in self._reservations:
            return
        self._allocator.free_slab(self._open_slab(reservation))
        reservation.slab = None
        del self._reservations[reservation]

    def slab_of(self, node: int) -> Slab | None:
        """The node's slab, None when it is in COLD or unknown."""
        resident = self._residents.get(node)
        return resident.slab if resident is not None else None

    def split(self, node: int, parent: int, left_length: int) -> None:
        """Give the first `left_length` tokens of `node` to the new node `parent` above it.

        Both are locked by the same requests and have the same past afterwards.

        Raises:
            ValueError: `node` has no slab, `parent` has one, or `left_length` is not inside it.
        """
        resident = self._resident(node)
        self._check_new(parent, resident.locks)
        lower, upper = self._allocator.split_slab(resident.slab, left_length)
        resident.slab = upper
        self._residents[parent] = _Resident(
            lower,
            resident.locks,
            resident.hits,
            resident.first_use_s,
            resident.last_use_s,
            resident.hinted,
        )

    def lock(self, node: int) -> None:
        """One more request holds the node.

        Raises:
            ValueError: the node has no slab.
        """
        self._resident(node).locks += 1

    def unlock(self, node: int) -> None:
        """One request less holds the node.

        Raises:
            ValueError: the node has no slab or no lock.
        """
        resident = self._resident(node)
        if not resident.locks:
            raise ValueError(f"node must be locked, got node {node} without a lock")
        resident.locks -= 1

    def locks_of(self, node: int) -> int:
        """Requests that hold the node.

        Raises:
            ValueError: the node has no slab.
        """
        return self._resident(node).locks

    def touch(self, node: int, now_s: float) -> None:
        """A request has matched the node.

        Raises:
            ValueError: the node has no slab.
        """
        resident = self._resident(node)
        resident.hits += 1
        resident.last_use_s = now_s

    def evict(self, node: int) -> None:
        """Free the node's slab; its KV is gone.

        Raises:
            ValueError: the node has no slab or is locked.
        """
        resident = self._resident(node)
        if resident.locks:
            raise ValueError(
                f"node must not be locked, got node {node} with {resident.locks} locks"
            )
        self._allocator.free_slab(resident.slab)
        del self._residents[node]
        self.evictions += 1

    def begin_relocation(self, node: int, below: int | None = None) -> Relocation | None:
        """Take room for a copy of a slab, locked or not, entirely below slot `below` if given.

        None when no run fits. For compaction, pass the slab's own base as `below`.

        Raises:
            ValueError: the node has no slab.
        """
        old = self._resident(node).slab
        new = self._allocator.reserve_slab(old.length, below)
        if new is None:
            return None
        relocation = Relocation(node, old, new)
        self._relocations[relocation] = None
        return relocation

    def end_relocation(self, relocation: Relocation) -> bool:
        """Make the copy the node's slab and free the old one: the caller remaps every holder before
        it calls the allocator again. False, and the copy is freed, when it is not complete or the
        slab was split or evicted meanwhile.

        Raises:
            ValueError: the relocation has ended.
        """
        if relocation not in self._relocations:
            raise ValueError("relocation must be under way, got one that has ended")
        del self._relocations[relocation]
        resident = self._residents.get(relocation.node)
        if resident is None or resident.slab != relocation.old or not relocation.is_copied:
            self._allocator.free_slab(relocation.new)
            return False
        self._allocator.free_slab(relocation.old)
        resident.slab = relocation.new
        self.relocated_tokens += relocation.new.length
        return True

    def is_current(self, relocation: Relocation) -> bool:
        """Whether the node still has the slab that is being copied."""
        return self.slab_of(relocation.node) == relocation.old

    def clear(self) -> None:
        """Free every slab and reservation, locked ones too; counters stay."""
        for resident in self._residents.values():
            self._allocator.free_slab(resident.slab)
        self._residents.clear()
        for reservation in list(self._reservations):
            self.release(reservation)
        for relocation in self._relocations:
            self._allocator.free_slab(relocation.new)
        self._relocations.clear()

    def idle(self, now_s: float) -> list[IdleSlab]:
        """Slabs that no request holds, as admission sees them at `now_s`, in address order."""
        found = [(r.slab.base, node, r) for node, r in self._residents.items() if not r.locks]
        found.sort(key=lambda item: item[0])
        before, after = self._allocator.gaps_around([r.slab for _, _, r in found])
        return [
            IdleSlab(
                node=node,
                length=resident.slab.length,
                live_requests=0,
                hits=resident.hits,
                first_use_s=resident.first_use_s,
                last_use_s=resident.last_use_s,
                now_s=now_s,
                hinted=resident.hinted,
                base=base,
                gap_before=gap_before,
                gap_after=gap_after,
            )
            for (base, node, resident), gap_before, gap_after in zip(
                found, before, after, strict=True
            )
        ]

    def blocked_by(self, migration: Migration) -> list[tuple[int, bool]]:
        """Nodes whose slab now lies in the part that HOT gives up, as `(node, locked)` by address.

        Reservations there are not listed: they end up as nodes, or are released, by themselves.
        """
        if migration.grows:
            return []
        blocking = [
            (resident.slab.base, node, resident.locks > 0)
            for node, resident in self._residents.items()
            if resident.slab.end > migration.new_hot_tokens + 1
        ]
        return [(node, locked) for _, node, locked in sorted(blocking)]

    def by_falling_address(self) -> list[tuple[int, Slab]]:
        """Nodes with their slabs, the highest first."""
        slabs = [(node, resident.slab) for node, resident in self._residents.items()]
        return sorted(slabs, key=lambda item: -item[1].base)

    def highest_reserved_slot(self) -> int:
        """Last HOT slot that a prefill may write; 0 when there is none."""
        ends = [r.slab.end for r in self._reservations if r.slab is not None]
        return max(ends, default=1) - 1

    def check_integrity(self) -> None:
        """Check that the allocator knows exactly the slabs of nodes, reservations and copies.

        Raises:
            IntegrityError: the invariant that does not hold.
        """
        slabs = [resident.slab for resident in self._residents.values()]
        for reservation in self._reservations:
            if reservation.slab is None or reservation.bound > reservation.filled:
                raise IntegrityError(f"an open reservation must have a slab, got {reservation}")
            slabs.append(reservation.slab)
        slabs += [relocation.new for relocation in self._relocations]
        if len({slab.base for slab in slabs}) != len(slabs):
            raise IntegrityError("slabs of nodes, reservations and copies must be disjoint")
        for slab in slabs:
            if not self._allocator.owns(slab):
                raise IntegrityError(f"the allocator must know every slab, got {slab}")
        total = sum(slab.length for slab in slabs)
        if total != self._allocator.hot_used:
            raise IntegrityError(
                "slabs of nodes + reservations + copies == hot_used must hold,"
                f" got {total} and {self._allocator.hot_used}"
            )
        if any(resident.locks < 0 for resident in self._residents.values()):
            raise IntegrityError("locks must not be negative")

    def _miss_reason(self, length: int) -> str:
        if length > self._allocator.hot_tokens:
            return "too_long"
        return "no_room" if self._allocator.hot_free < length else "fragmented"

    def _attach(self, node: int, slab: Slab, view: PrefixView, locks: int) -> None:
        self._residents[node] = _Resident(
            slab, locks, view.hits, view.first_use_s, view.last_use_s, view.hinted
        )

    def _check_new(self, node: int, locks: int) -> None:
        if node in self._residents:
            raise ValueError(f"node must have no slab yet, got node {node} which has one")
        if locks < 0:
            raise ValueError(f"locks must not be negative, got {locks}")

    def _resident(self, node: int) -> _Resident:
        resident = self._residents.get(node)
        if resident is None:
            raise ValueError(f"node must have a slab, got node {node} without one")
        return resident

    def _open_slab(self, reservation: Reservation) -> Slab:
        if reservation not in self._reservations or reservation.slab is None:
            raise ValueError("reservation must be open, got one that is fully bound or released")
        return reservation.slab
