"""The COLD nodes that hold slots in the way of a growing HOT.

Slots of nodes are on the device. They are read once, when a move begins; from then on, whatever is
made of such a node, and every new node, is followed too: its slots may come from a row that was
filled earlier.
"""

from collections.abc import Iterable

import torch
from sglang.srt.mem_cache.radix_cache import TreeNode


class RegionNodes:
    """The nodes of one move.

    Args:
        nodes: COLD ones of the tree.
        lo: first slot of the region.
        hi: slot behind its last one.
    """

    def __init__(self, nodes: Iterable[TreeNode], lo: int, hi: int) -> None:
        self.bounds = (lo, hi)
        candidates = list(nodes)
        self._nodes: dict[int, TreeNode] = {}
        if candidates:
            slots = torch.cat([node.value for node in candidates])
            inside = ((slots >= lo) & (slots < hi)).cpu()
            parts = inside.split([len(node.value) for node in candidates])
            for node, part in zip(candidates, parts, strict=True):
                if part.any():
                    self.add(node)

    def add(self, node: TreeNode) -> None:
        """Follow a node; twice is harmless."""
        self._nodes[node.id] = node

    def discard(self, node: TreeNode) -> None:
        """The node is not COLD any more, or not in the tree."""
        self._nodes.pop(node.id, None)

    def remap(self, moved: torch.Tensor) -> None:
        """Follow moved slots.

        Args:
            moved: int64 `[size + 1]`, the slot that each slot's KV is in now.
        """
        nodes = list(self._nodes.values())
        if nodes:
            slots = moved[torch.cat([node.value for node in nodes])]
            parts = slots.split([len(node.value) for node in nodes])
            for node, part in zip(nodes, parts, strict=True):
                node.value = part
