"""Pools: one replica's KV state - allocator, slabs, prefix index, running rows - and the moves
between them.

The classes are `granikv.core`'s; this module only keeps them in step with each other.
"""

from granikv.core.admission import make_admission
from granikv.core.allocator import HotColdAllocator, Slots
from granikv.core.directory import SlabDirectory
from granikv.core.errors import IntegrityError
from granikv.core.groups import RowGroups
from granikv.core.step import StepShape
from granikv.sim.config import ServerConfig
from granikv.sim.decode_batch import DecodeBatch
from granikv.sim.placement import HotPlacement
from granikv.sim.prefix_index import PrefixIndex
from granikv.sim.radix_node import Node
from granikv.sim.requests import RequestState


class Pools:
    """All that holds KV slots; `heads` are query heads, kv heads and head_dim of one rank."""

    def __init__(self, config: ServerConfig, heads: tuple[int, int, int]) -> None:
        self.allocator = HotColdAllocator(config.size_tokens, config.hot_tokens)
        self.directory = SlabDirectory(self.allocator, make_admission(config.admission))
        self.groups = RowGroups()
        self.index = PrefixIndex(self.allocator, self.directory, self.groups)
        self.batch = DecodeBatch()
        has_hot = config.system == "granikv"
        self.placement = HotPlacement(self.directory, self.index) if has_hot else None
        self._heads = heads

    @property
    def cold_tokens(self) -> int:
        """Slots on the COLD side."""
        return self.allocator.size_tokens - self.allocator.hot_tokens

    @property
    def hot_misses(self) -> int:
        """Wanted slabs that could not be had, so far."""
        return sum(self.directory.misses.values())

    @property
    def fragmentation(self) -> float:
        """Share of free HOT tokens outside the largest free run, 0..1."""
        free = self.allocator.hot_free
        return 1.0 - self.allocator.largest_free_run / free if free else 0.0

    def shape(self, rows: int, padded_rows: int) -> StepShape:
        """The next decode step: every row reads its context and the token it is about to write."""
        segments = self.groups.segments()
        return StepShape(
            rows,
            padded_rows,
            self.batch.context_tokens + rows - self.groups.shared_tokens,
            self.batch.longest_private() + 1,
            segments,
            *self._heads,
        )

    def join(self, state: RequestState) -> None:
        """A running request whose prompt has just been cached starts to read its path."""
        path = _locked(state).path()
        base_of = self.index.base_of
        self.groups.join([(node.node_id, node.length, base_of(node)) for node in path])
        self.batch.set_private(state, state.fill_tokens - _hot_tokens(path))

    def promote_used(self, now_s: float) -> int:
        """Place what prompts have shown to be shared; returns the tokens copied into HOT."""
        copied = self.placement.promote_used(now_s) if self.placement is not None else 0
        return self._promoted(copied)

    def promote_read(self, now_s: float) -> int:
        """Copy what running rows read in common in COLD into free HOT; returns the tokens."""
        placement, rows = self.placement, self.batch.states
        copied = placement.promote_read(rows, now_s) if placement is not None else 0
        return self._promoted(copied)

    def _promoted(self, copied: int) -> int:
        """Rows that read what has become HOT read less alone."""
        if copied:
            for state in self.batch.states:
                hot_tokens = _hot_tokens(_locked(state).path())
                self.batch.set_private(state, state.fill_tokens - hot_tokens)
        return copied

    def hot_tokens_of(self, state: RequestState) -> int:
        """Tokens on a request's path that are HOT."""
        return _hot_tokens(_locked(state).path())

    def decode(self, steps: int) -> None:
        """Take the slots of `steps` decode steps of all rows; they were promised when the jump was
        chosen.

        Evicts for one step when it must, never for later ones in advance: the slots are those that
        stepping would have taken.
        """
        rows = len(self.batch)
        while steps:
            fitting = self.allocator.cold_free // rows
            if not fitting:
                self.index.ensure_cold(rows)
                fitting = self.allocator.cold_free // rows
            taken = min(fitting, steps)
            slots = self.allocator.alloc_cold(taken * rows) if taken else None
            if slots is None:
                raise IntegrityError("a decode step found no COLD slots that were counted as free")
            self.batch.advance(slots, taken)
            steps -= taken

    def release(self, state: RequestState) -> None:
        """A finished row leaves; its output is cached below its prompt, as the live tree does.

        The last output token has KV only if an overlapped scheduler ran the row once more.
        """
        node = _locked(state)
        slots = self._leave(state, node)
        if len(slots):
            run = (state.output_segment, state.generated, len(slots))
            self.index.append_leaf(node, run, slots)
        self.index.refresh(node)
        self.index.unlock(node)
        state.last_node = state.cursor = None

    def retract(self, state: RequestState, kept: int) -> None:
        """A running row goes back to the queue with `kept` output tokens; its prompt stays cached,
        its output's slots are freed.
        """
        node = _locked(state)
        self.allocator.free_cold(self._leave(state, node))
        self.index.unlock(node)
        state.retract(kept)

    def _leave(self, state: RequestState, node: Node) -> Slots:
        self.groups.leave([member.node_id for member in node.path()])
        return self.batch.leave(state)

    def remap(self, moved: Slots) -> None:
        """Follow moved COLD slots (`moved[old] = new`, int32 `[size + 1]`) to all holders."""
        self.index.remap(moved)
        self.batch.ring.remap(moved)

    def check_integrity(self) -> None:
        """Check every part and that no slot is lost: used = cached + decoding.

        Raises:
            IntegrityError: the invariant that does not hold.
        """
        self.allocator.check_integrity()
        self.directory.check_integrity()
        self.groups.check_integrity()
        self.index.check_integrity()
        cached = sum(len(n.slots) for n in self.index.nodes() if n.slots is not None)
        decoding = sum(self.batch.step - s.join_step for s in self.batch.states)
        if cached + decoding != self.allocator.cold_used:
            raise IntegrityError(
                f"cached + decoding == cold_used must hold, got {cached} + {decoding} and"
                f" {self.allocator.cold_used}"
            )


def _hot_tokens(path: list[Node]) -> int:
    return sum([node.length for node in path if node.slots is None])


def _locked(state: RequestState) -> Node:
    if state.last_node is None:
        raise IntegrityError(f"request {state.request.request_id} holds no prefix")
    return state.last_node
