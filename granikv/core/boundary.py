"""Boundary: moves the HOT/COLD boundary of a running server piece by piece, and compacts HOT.

Growing HOT evicts cached COLD tokens until the rest fits behind the new boundary, and copies what
is in the way. Shrinking copies the slabs in the way to free runs below; of those that fit nowhere,
it evicts the idle ones and ends above the highest one in use. No step copies more than a budget,
and no slab in use is demoted.
"""

from collections.abc import Callable
from typing import Protocol

from granikv.core.allocator import HotColdAllocator, Slab, Slots
from granikv.core.directory import SlabDirectory
from granikv.core.migration import Migration
from granikv.core.relocation import Relocation
from granikv.core.repartition import RepartitionPolicy, Window, target_of


class Holders(Protocol):
    """Whoever holds slots: a prefix tree and the rows of requests."""

    @property
    def evictable_tokens(self) -> int:
        """Cached COLD tokens that no request holds."""

    def ensure_cold(self, tokens: int) -> bool:
        """Evict cached COLD tokens until so many slots are free; False when they cannot be."""

    def is_hot_cached(self, node_id: int) -> bool:
        """Whether the node is HOT and still in the tree."""

    def evict_hot(self, node_id: int) -> None:
        """Drop an unlocked HOT node with everything cached below it."""

    def move_cold(self, src: Slots, dst: Slots) -> None:
        """Copy KV from `src` to `dst`, disjoint; whoever holds a slot of `src` holds `dst` now."""

    def copy_slab(self, src: Slots, dst: Slots) -> None:
        """Copy KV of a part of a slab; its readers stay on `src` for now."""

    def move_slab(self, node_id: int, old: Slab, new: Slab) -> None:
        """The node's KV has been copied from `old` to `new`; all its readers read it there now."""


class Boundary:
    """One server's boundary: the allocator plans, the holders carry out.

    Args:
        allocator: of the server.
        directory: of its slabs.
        holders: of its slots.
        budget_tokens: most tokens that are copied in one step.

    Attributes:
        moves: times that the boundary has moved.
        moved_tokens: tokens copied so far, by moves and by compaction.
    """

    def __init__(
        self,
        allocator: HotColdAllocator,
        directory: SlabDirectory,
        holders: Holders,
        budget_tokens: int,
    ) -> None:
        if budget_tokens < 1:
            raise ValueError(f"budget_tokens must be positive, got {budget_tokens}")
        self.moves = 0
        self.moved_tokens = 0
        self._allocator = allocator
        self._directory = directory
        self._holders = holders
        self._budget_tokens = budget_tokens
        self._relocation: Relocation | None = None
        self._is_compacting = False

    @property
    def is_moving(self) -> bool:
        """Whether `advance` has something left to do."""
        return self._allocator.move is not None or self._is_compacting

    def steer(
        self, policy: RepartitionPolicy, window: Window, all_fit: Callable[[int], bool]
    ) -> None:
        """Ask a policy and set out for what it wants; HOT in pieces is compacted where it stays.

        Args:
            policy: of the server.
            window: that ends now.
            all_fit: whether every request inside could still run with so much COLD.

        Raises:
            ConfigError: the policy asked for what no pool can have.
        """
        target = target_of(policy, window)
        if target is None:
            if window.hot_misses.get("fragmented"):
                self.compact()
        elif all_fit(window.size_tokens - target):
            self.begin(target, window.cold_promised)

    def begin(self, hot_tokens: int, promised_tokens: int = 0) -> bool:
        """Set out for a boundary, or as near as it can come; False when it cannot move at all now.

        Args:
            hot_tokens: HOT wanted.
            promised_tokens: COLD that must be left beside what requests hold.

        Raises:
            ValueError: `hot_tokens` is not in 0..size_tokens - 1, or a move is under way.
        """
        if self.is_moving:
            raise ValueError("only one move at a time: another is under way")
        migration = self._plan(hot_tokens, promised_tokens)
        if migration is None:
            return False
        self._allocator.begin_move(migration)
        return True

    def compact(self) -> bool:
        """Set out to copy slabs to lower free runs; False when none would fit or a move is under
        way.
        """
        if not self.is_moving:
            self._is_compacting = self._relocate_lower()
        return self._is_compacting

    def advance(self) -> int:
        """Do one step's share; returns the tokens that were copied."""
        if self._relocation is not None:
            copied = self._relocate(self._relocation)
        elif self._is_compacting:
            self._is_compacting = self._relocate_lower()
            copied = 0 if self._relocation is None else self._relocate(self._relocation)
        elif self._allocator.move is None:
            return 0
        elif self._allocator.move.grows:
            copied = self._copy_cold()
        else:
            copied = self._clear_the_way(self._allocator.move)
        if self._relocation is None and self._allocator.can_finish_move():
            self._allocator.finish_move()
            self.moves += 1
        self.moved_tokens += copied
        return copied

    # ------------------------------------------------------------------ growing

    def _plan(self, hot_tokens: int, promised_tokens: int) -> Migration | None:
        allocator = self._allocator
        growth = hot_tokens - allocator.hot_tokens
        if growth > 0:
            # As many free slots as the region is long: then what is held there fits behind it.
            if growth + promised_tokens > allocator.cold_free + self._holders.evictable_tokens:
                return None
            self._holders.ensure_cold(growth)
            migration = allocator.plan_move(hot_tokens)
            return migration if migration.feasible else None
        # Prefills cannot be moved, and nobody knows when they end.
        lowest = max(hot_tokens, self._directory.highest_reserved_slot())
        return None if lowest >= allocator.hot_tokens else allocator.plan_move(lowest)

    def _copy_cold(self) -> int:
        src, dst = self._allocator.next_piece(self._budget_tokens)
        if len(src):
            self._holders.move_cold(src, dst)
        return len(src)

    # ------------------------------------------------------------------ shrinking and compacting

    def _clear_the_way(self, migration: Migration) -> int:
        """Deal with the slabs in the way, the highest first; the fence keeps others out."""
        for node, is_locked in reversed(self._directory.blocked_by(migration)):
            if not is_locked and not self._holders.is_hot_cached(node):
                continue  # gone with its ancestor
            self._relocation = self._directory.begin_relocation(node)
            if self._relocation is not None:
                return self._relocate(self._relocation)
            if is_locked:
                self._stop_above(node)
                return 0
            self._holders.evict_hot(node)
        return 0

    def _stop_above(self, node: int) -> None:
        """End the move above a slab that cannot go: its surroundings would be withheld for as long
        as it is in use.
        """
        slab = self._directory.slab_of(node)
        self._allocator.abort_move()
        if slab is not None and slab.end - 1 < self._allocator.hot_tokens:
            self._allocator.begin_move(self._allocator.plan_move(slab.end - 1))

    def _relocate_lower(self) -> bool:
        """Begin with the highest slab that fits lower, as long as free HOT is in pieces."""
        if self._allocator.largest_free_run == self._allocator.hot_free:
            return False
        for node, slab in self._directory.by_falling_address():
            self._relocation = self._directory.begin_relocation(node, below=slab.base)
            if self._relocation is not None:
                return True
        return False

    def _relocate(self, relocation: Relocation) -> int:
        """Copy a piece; with the last one the slab's readers change over."""
        copied = 0
        if self._directory.is_current(relocation):
            src, dst = relocation.next_piece(self._budget_tokens)
            self._holders.copy_slab(src, dst)
            copied = len(src)
            if not relocation.is_copied:
                return copied
        self._relocation = None
        if self._directory.end_relocation(relocation):
            self._holders.move_slab(relocation.node, relocation.old, relocation.new)
        return copied
