"""PoolHolders: whoever holds slots of a simulated server, for `granikv.core.boundary`."""

import numpy as np

from granikv.core.allocator import Slab, Slots
from granikv.sim.pools import Pools


class PoolHolders:
    """The prefix index and the running rows of one replica; KV has no contents here."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    @property
    def evictable_tokens(self) -> int:
        """Cached COLD tokens that no request holds."""
        return self._pools.index.evictable_tokens

    def ensure_cold(self, tokens: int) -> bool:
        """Evict cached COLD tokens until so many slots are free; False when they cannot be."""
        return self._pools.index.ensure_cold(tokens)

    def is_hot_cached(self, node_id: int) -> bool:
        """Whether the node is HOT and still in the tree."""
        return self._pools.index.is_hot_cached(node_id)

    def evict_hot(self, node_id: int) -> None:
        """Drop an unlocked HOT node with everything cached below it."""
        self._pools.index.evict_hot(node_id)

    def move_cold(self, src: Slots, dst: Slots) -> None:
        """Whoever holds a slot of `src` holds `dst` now."""
        moved = np.arange(self._pools.allocator.size_tokens + 1, dtype=np.int32)
        moved[src] = dst
        self._pools.remap(moved)

    def copy_slab(self, src: Slots, dst: Slots) -> None:
        """Nothing to do: the step's cost is charged by its tokens."""

    def move_slab(self, node_id: int, old: Slab, new: Slab) -> None:
        """The node's readers read `new` now."""
        self._pools.groups.place(node_id, new.base)
