"""PrefixIndex: a radix tree over runs of tokens, with SGLang 0.5.17's rules for matching, splitting
and eviction.

A node's key is a few `(segment, start, length)` runs, so a 16K prefix costs one comparison. HOT
nodes form a top part of the tree: a HOT node's parent is HOT or the root, so an unlocked COLD node
never hides a HOT descendant and every unlocked COLD token can be evicted.
"""

import heapq
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from granikv.core.allocator import HotColdAllocator, Slots
from granikv.core.directory import Reservation, SlabDirectory
from granikv.core.errors import IntegrityError
from granikv.core.groups import RowGroups
from granikv.sim.radix_node import Cursor, Node, NodeRun, common_tokens, split_runs, take_runs
from granikv.traces.request import Run


class PrefixIndex:
    """The cached prefixes of one replica; the only owner of `lock_ref` and of cached COLD slots."""

    def __init__(
        self, allocator: HotColdAllocator, directory: SlabDirectory, groups: RowGroups
    ) -> None:
        self.allocator = allocator
        self.directory = directory
        self.groups = groups
        self.root = Node(0, None, (), 0, None)
        self.root.lock_ref = 1
        self.evictable_tokens = 0
        self.evicted_nodes = 0
        self._next_id = 1
        self._clock = 0
        self._heap: list[tuple[int, int, Node]] = []
        self._hot_nodes: dict[int, Node] = {}

    # ------------------------------------------------------------------ matching

    def start(self) -> Cursor:
        """A cursor before the first token."""
        return Cursor(self.root)

    def match(self, prompt: tuple[Run, ...], limit: int) -> tuple[Cursor, list[Node]]:
        """Longest cached prefix of `prompt`, at most `limit` tokens; may split the last node.

        Refreshes the nodes' recency, as the live radix cache does; `count_use` is for a prompt that
        is complete.
        """
        self._clock += 1
        cursor = Cursor(self.root)
        path: list[Node] = []
        while True:
            child, _ = self._step_down(cursor, prompt, limit)
            if child is None:
                return cursor, path
            child.last_access = self._clock
            path.append(child)

    def refresh(self, node: Node) -> None:
        """Make the path down to `node` the most recently used one."""
        self._clock += 1
        while node.parent is not None:
            node.last_access = self._clock
            node = node.parent

    def count_use(self, path: list[Node], now_s: float) -> None:
        """A request has run on this path: what admission policies judge a prefix by."""
        for node in path:
            node.hits += 1
            node.last_use_s = now_s
            if node.hits == 1:
                node.first_use_s = now_s
            elif node.slots is None:  # a new node's slab has its first use
                self.directory.touch(node.node_id, now_s)

    def _step_down(
        self, cursor: Cursor, prompt: tuple[Run, ...], limit: int
    ) -> tuple[Node | None, int]:
        """Follow one edge; splits the child when only a part of it matches. Returns child and its
        length.
        """
        run, offset = cursor.run, cursor.offset
        if run >= len(prompt) or cursor.depth >= limit:
            return None, 0
        child = cursor.node.children.get((prompt[run][0], offset))
        if child is None:
            return None, 0
        whole = child.whole_runs
        room = limit - cursor.depth
        if whole is not None and offset == 0 and child.length <= room:
            after = run + len(whole)
            if prompt[run:after] == whole:
                cursor.node, cursor.run, cursor.depth = child, after, cursor.depth + child.length
                return child, child.length
        common, run, offset = common_tokens(child.runs, prompt, run, offset, room)
        if common < child.length:
            child = self._split(child, common)
        cursor.node, cursor.run, cursor.offset = child, run, offset
        cursor.depth += common
        return child, common

    def _split(self, node: Node, left: int) -> Node:
        """Split after `left` tokens; the new upper node is returned, `node` keeps the rest and its
        id.
        """
        left_runs, right_runs = split_runs(node.runs, left)
        parent = node.parent
        if parent is None:
            raise IntegrityError("the root cannot be split")
        upper = Node(self._new_id(), parent, left_runs, left, None)
        if node.slots is None:
            self.directory.split(node.node_id, upper.node_id, left)
            self._hot_nodes[upper.node_id] = upper
        else:
            upper.slots = node.slots[:left]
            node.slots = node.slots[left:]
        self.groups.split(node.node_id, upper.node_id, left)
        upper.lock_ref = node.lock_ref
        # Whoever splits a node has just looked at all of it: the live tree refreshes both parts.
        upper.last_access = node.last_access = self._clock
        upper.hits = node.hits
        upper.first_use_s, upper.last_use_s = node.first_use_s, node.last_use_s
        parent.children[upper.key] = upper
        node.parent = upper
        node.length -= left
        node.set_runs(right_runs)
        upper.children[node.key] = node
        return upper

    # ------------------------------------------------------------------ inserting

    def insert(
        self,
        cursor: Cursor,
        prompt: tuple[Run, ...],
        cold_slots: Slots,
        reservation: Reservation | None = None,
        hot_tokens: int = 0,
    ) -> None:
        """Cache the tokens after `cursor`: `hot_tokens` from `reservation`, then `cold_slots`.

        Moves `cursor` to their end. Tokens that another request has cached meanwhile keep their
        place: ours are freed, except that HOT ones take over the cached COLD copy (they hold the
        same KV).
        """
        end = cursor.depth + hot_tokens + len(cold_slots)
        while hot_tokens:
            node, tokens = self._step_down(cursor, prompt, cursor.depth + hot_tokens)
            if node is None:
                tokens = hot_tokens
                node = self._append(cursor, prompt, hot_tokens, None)
            elif node.slots is not None:
                self._drop_cold(node)
            else:  # promoted meanwhile: our copy is surplus
                self._discard(reservation, tokens)
                hot_tokens -= tokens
                continue
            self._bind(node, reservation, tokens)
            hot_tokens -= tokens
        used = 0
        while cursor.depth < end:
            node, tokens = self._step_down(cursor, prompt, end)
            if node is None:
                self._append(cursor, prompt, end - cursor.depth, cold_slots[used:])
                return
            self.allocator.free_cold(cold_slots[used : used + tokens])
            used += tokens

    def _append(
        self,
        cursor: Cursor,
        prompt: tuple[Run, ...],
        tokens: int,
        slots: Slots | None,
    ) -> Node:
        runs, run, offset = take_runs(prompt, cursor.run, cursor.offset, tokens)
        node = Node(self._new_id(), cursor.node, runs, tokens, slots)
        self._clock += 1
        node.last_access = self._clock
        cursor.node.children[node.key] = node
        cursor.node, cursor.run, cursor.offset = node, run, offset
        cursor.depth += tokens
        if slots is not None:
            self.evictable_tokens += tokens
            self._offer(node)
        return node

    def append_leaf(self, parent: Node, run: NodeRun, slots: Slots) -> None:
        """Hang generated tokens below a finished prompt; what is cached already keeps its place."""
        segment, start, length = run
        self.insert(Cursor(parent, 0, start), (Run(segment, start + length),), slots)

    # ------------------------------------------------------------------ locking

    def lock(self, node: Node, stop: Node | None = None) -> None:
        """One more request holds `node` and its ancestors, up to but not including `stop` (default:
        the root).
        """
        top = self.root if stop is None else stop
        while node is not top:
            if node.lock_ref == 0:
                if node.slots is None:
                    self.directory.lock(node.node_id)
                else:
                    self.evictable_tokens -= node.length
            node.lock_ref += 1
            if node.parent is None:
                raise IntegrityError("locking went past the root")
            node = node.parent

    def unlock(self, node: Node) -> None:
        """One request less holds `node` and its ancestors."""
        while node is not self.root:
            node.lock_ref -= 1
            if node.lock_ref < 0 or node.parent is None:
                raise IntegrityError(f"node {node.node_id} was unlocked more often than locked")
            if node.lock_ref == 0:
                if node.slots is None:
                    self.directory.unlock(node.node_id)
                else:
                    self.evictable_tokens += node.length
                    self._offer(node)
            node = node.parent

    # ------------------------------------------------------------------ evicting

    def ensure_cold(self, tokens: int) -> bool:
        """Evict least recently used COLD leaves until `tokens` slots are free; False when they
        cannot be.
        """
        shortfall = tokens - self.allocator.cold_free
        while shortfall > 0:
            node = self._pop_evictable()
            if node is None:
                return False
            shortfall -= node.length
            self._remove_cold_leaf(node)
        return True

    def _offer(self, node: Node) -> None:
        if not node.children and not node.in_heap and node.lock_ref == 0 and node.slots is not None:
            node.in_heap = True
            heapq.heappush(self._heap, (node.last_access, node.node_id, node))

    def _pop_evictable(self) -> Node | None:
        heap = self._heap
        while heap:
            access, _, node = heapq.heappop(heap)
            node.in_heap = False
            if node.slots is None or node.parent is None or node.lock_ref or node.children:
                continue
            if access == node.last_access:
                return node
            self._offer(node)
        return None

    def _remove_cold_leaf(self, node: Node) -> None:
        if node.slots is None or node.parent is None:
            raise IntegrityError(f"node {node.node_id} is not a COLD leaf")
        self.allocator.free_cold(node.slots)
        self.evictable_tokens -= node.length
        self.evicted_nodes += 1
        parent = node.parent
        del parent.children[node.key]
        node.parent = None
        self._offer(parent)

    def evict_hot(self, node_id: int) -> None:
        """Drop an unlocked HOT node with everything cached below it."""
        top = self._hot_nodes[node_id]
        if top.parent is None:
            return
        del top.parent.children[top.key]
        stack = [top]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            node.parent = None
            node.children = {}
            self.evicted_nodes += 1
            if node.slots is None:
                del self._hot_nodes[node.node_id]
                self.directory.evict(node.node_id)
            else:
                self.allocator.free_cold(node.slots)
                self.evictable_tokens -= node.length

    # ------------------------------------------------------------------ HOT and moves

    def is_hot_cached(self, node_id: int) -> bool:
        """Whether the node is HOT and still in the tree (its ancestor's eviction takes it)."""
        return node_id in self._hot_nodes

    def make_hot(self, node: Node, reservation: Reservation) -> None:
        """Promote a COLD node into `reservation`; the caller charges the copy."""
        self.directory.take(reservation, node.length)
        self._drop_cold(node)
        self._bind(node, reservation, node.length)

    def _drop_cold(self, node: Node) -> None:
        if node.slots is None:
            raise IntegrityError(f"node {node.node_id} is already HOT")
        self.allocator.free_cold(node.slots)
        if node.lock_ref == 0:
            self.evictable_tokens -= node.length
        node.slots = None

    def _bind(self, node: Node, reservation: Reservation | None, tokens: int) -> None:
        if reservation is None:
            raise IntegrityError("HOT tokens were inserted without a reservation")
        # The directory counts a slab as held or idle: one lock for all the requests that hold the
        # node.
        locks = 1 if node.lock_ref else 0
        slab = self.directory.bind(node.node_id, reservation, tokens, locks)
        self._hot_nodes[node.node_id] = node
        self.groups.place(node.node_id, slab.base)

    def _discard(self, reservation: Reservation | None, tokens: int) -> None:
        if reservation is None:
            raise IntegrityError("HOT tokens were inserted without a reservation")
        surplus = self._new_id()
        self.directory.bind(surplus, reservation, tokens)
        self.directory.evict(surplus)

    def base_of(self, node: Node) -> int:
        """First slot of a HOT node, 0 for a COLD one: the form that `RowGroups.join` takes."""
        if node.slots is not None:
            return 0
        slab = self.directory.slab_of(node.node_id)
        if slab is None:
            raise IntegrityError(f"HOT node {node.node_id} has no slab")
        return slab.base

    def remap(self, moved: NDArray[np.int32]) -> None:
        """Rewrite all cached COLD slots through `moved` (int32 `[size + 1]`, identity where nothing
        moved).
        """
        for node in self.nodes():
            if node.slots is not None:
                node.slots = moved[node.slots]

    def nodes(self) -> Iterator[Node]:
        """All nodes below the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self) -> None:
        """Recompute counters and shape from the tree.

        Raises:
            IntegrityError: a counter, parent link, region rule or lock does not hold.
        """
        evictable = 0
        for node in self.nodes():
            parent = node.parent
            if parent is None or parent.children.get(node.key) is not node:
                raise IntegrityError(f"node {node.node_id} is not its parent's child")
            if sum(length for _, _, length in node.runs) != node.length:
                raise IntegrityError(f"node {node.node_id} has runs of another length")
            if node.slots is None and not parent.is_hot:
                raise IntegrityError(f"HOT node {node.node_id} hangs below a COLD one")
            if parent is not self.root and parent.lock_ref < node.lock_ref:
                raise IntegrityError(f"node {node.node_id} is locked more often than its parent")
            if node.slots is not None:
                if len(node.slots) != node.length:
                    raise IntegrityError(f"node {node.node_id} has {len(node.slots)} slots")
                evictable += node.length if node.lock_ref == 0 else 0
        if evictable != self.evictable_tokens:
            raise IntegrityError(f"evictable is {evictable}, counted {self.evictable_tokens}")

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id
