"""Relocation: a slab that is being copied to another free run, piece by piece."""

from dataclasses import dataclass

import numpy as np

from granikv.core.slots import Slab, Slots


@dataclass(slots=True, eq=False)
class Relocation:
    """A node's slab on its way; readers stay on the old one until all is copied.

    Attributes:
        node: whose slab it is.
        old: the slab now.
        new: room for it, of the same length; the two have no slot in common.
        copied: tokens of `new` that have been handed out.
    """

    node: int
    old: Slab
    new: Slab
    copied: int = 0

    @property
    def is_copied(self) -> bool:
        """Whether nothing is left to copy."""
        return self.copied == self.old.length

    def next_piece(self, max_tokens: int) -> tuple[Slots, Slots]:
        """Hand out the next `max_tokens` pairs to copy, or what is left: int32 `[n]` each."""
        count = min(max_tokens, self.old.length - self.copied)
        offsets = np.arange(self.copied, self.copied + count, dtype=np.int32)
        self.copied += count
        return self.old.base + offsets, self.new.base + offsets
