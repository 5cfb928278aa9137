"""HotPlacement: brings shared prefixes into HOT slabs, in place or later by a copy."""

from collections.abc import Callable, Sequence

from granikv.core.directory import SlabDirectory
from granikv.core.placement import promote, promote_fitting, reserve_declared
from granikv.sim.prefix_index import PrefixIndex
from granikv.sim.radix_node import Node
from granikv.sim.requests import RequestState

# Node ids start above this, so it names a prefix that has no node yet.
_UNBORN_NODE = 0


class HotPlacement:
    """Asks the admission policy about prefixes and carries out what it wants: about a declared one
    before it is prefilled, about all others when a prompt on them is complete, as the live server
    does.
    """

    def __init__(self, directory: SlabDirectory, index: PrefixIndex) -> None:
        self._directory = directory
        self._index = index
        self.promoted_tokens = 0
        self._being_placed: set[tuple[int, int, int]] = set()
        self._candidates: list[RequestState] = []

    @property
    def has_candidates(self) -> bool:
        """Whether `promote_used` has somebody to ask about."""
        return bool(self._candidates)

    def admit(self, state: RequestState, path: list[Node], now_s: float) -> None:
        """Reserve a slab for what a request that is about to be prefilled declares.

        `path` is the matched path, already locked; only below HOT can a slab be filled in place.
        """
        if any(node.slots is not None for node in path):
            return
        if state.request.prefix_tokens > sum(node.length for node in path):
            self._reserve(state, now_s)

    def used(self, state: RequestState) -> None:
        """A request has run on its path: admission is asked about it before the next step."""
        self._candidates.append(state)

    def promote_used(self, now_s: float) -> int:
        """Copy what admission wants of the paths used since the last call; returns the tokens."""
        states, self._candidates = self._candidates, []
        return self._place(promote, states, now_s)

    def promote_read(self, rows: Sequence[RequestState], now_s: float) -> int:
        """Copy what rows read in common in COLD into free HOT; returns the tokens.

        Otherwise a prefix waits for its next request, which may itself wait for want of COLD.
        """
        return self._place(promote_fitting, rows, now_s)

    def _place(
        self,
        place: Callable[[SlabDirectory, PrefixIndex, list[Node], float], int],
        states: Sequence[RequestState],
        now_s: float,
    ) -> int:
        """Of each path that one of them is on."""
        ends = {s.last_node.node_id: s.last_node for s in states if s.last_node is not None}
        copied = 0
        for node in ends.values():
            chain = [member for member in node.path() if member.slots is not None]
            copied += place(self._directory, self._index, chain, now_s)
        self.promoted_tokens += copied
        return copied

    def _reserve(self, state: RequestState, now_s: float) -> None:
        """Reserve a slab for a declared prefix, so that it is prefilled in place."""
        cursor = state.cursor
        if cursor is None or state.reservation is not None:
            return
        place = (cursor.node.node_id, state.fill[cursor.run][0], cursor.offset)
        if place in self._being_placed:
            return
        length = state.request.prefix_tokens - cursor.depth
        state.reservation = reserve_declared(
            self._directory, self._index, _UNBORN_NODE, length, now_s
        )
        if state.reservation is not None:
            state.placing = place
            self._being_placed.add(place)

    def finish(self, state: RequestState) -> None:
        """End a placement by prefilling: what was not filled goes back."""
        if state.reservation is None:
            return
        self._directory.release(state.reservation)
        state.reservation = None
        if state.placing is not None:
            self._being_placed.discard(state.placing)
            state.placing = None
