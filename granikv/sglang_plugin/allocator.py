"""SGLang's token allocator on `HotColdAllocator`: requests get COLD slots, slabs are the tree's."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator

from granikv.core.admission import HotAdmission
from granikv.core.allocator import HotColdAllocator, Slots
from granikv.core.directory import SlabDirectory


class HotColdTokenAllocator(BaseTokenToKVPoolAllocator):
    """Page size 1. What the scheduler asks for and gives back is COLD; it never sees HOT.

    The free list is on the host, where policies read it, so freeing waits for the slots that are
    freed. SGLang frees in groups, once for all requests that finish in a step.

    Args:
        size: slots of the pool without the padding slot 0.
        dtype: of the pool, as SGLang passes it on.
        device: of the slot tensors that `alloc` returns.
        kvcache: the pool.
        need_sort: of SGLang's own free list; not used.
        hot_tokens: slots `1 .. hot_tokens` are for slabs.
        admission: who gets a slab.

    Attributes:
        core: owner of every slot.
        directory: of the slabs.
    """

    def __init__(
        self,
        size: int,
        dtype: torch.dtype,
        device: Any,
        kvcache: Any,
        need_sort: bool,
        *,
        hot_tokens: int,
        admission: HotAdmission,
    ) -> None:
        super().__init__(size, 1, dtype, device, kvcache, need_sort)
        self._hot_tokens = hot_tokens
        self._admission = admission
        self.clear()

    def clear(self) -> None:
        """Forget all slabs and slots, as SGLang's flush does behind the tree's reset."""
        self.core = HotColdAllocator(self.size, self._hot_tokens)
        self.directory = SlabDirectory(self.core, self._admission)
        self.is_not_in_free_group = True
        self.free_group: list[torch.Tensor] = []
        self._parts: Sequence[tuple[Slots, int]] = ()

    def configure(
        self, hot_tokens: int | None = None, admission: HotAdmission | None = None
    ) -> None:
        """Choose anew; it takes hold, and everything is forgotten, at the next `clear`."""
        self._hot_tokens = self._hot_tokens if hot_tokens is None else hot_tokens
        self._admission = self._admission if admission is None else admission

    def available_size(self) -> int:
        """Tokens that `alloc` can give now: free COLD slots."""
        return self.core.cold_free

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """COLD slots, int64 `[need_size]` on the device; None when fewer are free.

        Inside `mixing`, the HOT slots lie between them.
        """
        slots = self.core.alloc_cold(need_size)
        if slots is None:
            return None
        return self.to_device(_mix(self._parts, slots) if self._parts else slots)

    @contextmanager
    def mixing(self, parts: Sequence[tuple[Slots, int]]) -> Iterator[None]:
        """Let one `alloc` in here give HOT slots too: of each part, and so many COLD ones after."""
        self._parts = parts
        try:
            yield
        finally:
            self._parts = ()

    def free(self, free_index: torch.Tensor) -> None:
        """Give COLD slots back; inside a group, at its end.

        Raises:
            ValueError: a slot is HOT, free already or comes twice.
        """
        if free_index.numel() == 0:
            return
        if not self.is_not_in_free_group:
            self.free_group.append(free_index)
            return
        self.core.free_cold(to_host(free_index))

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """One wait for the device for all that is freed in here, or in the group around it."""
        if not self.is_not_in_free_group:
            yield
            return
        self.free_group_begin()
        try:
            yield
        finally:
            self.free_group_end()

    def get_cpu_copy(self, indices: torch.Tensor, mamba_indices: Any = None) -> Any:
        """KV of slots on the host, as SGLang's own allocator gives it."""
        return self._kvcache.get_cpu_copy(indices, mamba_indices=mamba_indices)

    def load_cpu_copy(
        self, kv_cache_cpu: Any, indices: torch.Tensor, mamba_indices: Any = None
    ) -> Any:
        """Write such a copy back."""
        return self._kvcache.load_cpu_copy(kv_cache_cpu, indices, mamba_indices=mamba_indices)

    def to_device(self, slots: Slots) -> torch.Tensor:
        """Slots as SGLang holds them: int64 on the device."""
        return torch.from_numpy(slots.astype(np.int64)).to(self.device, non_blocking=True)


def to_host(slots: torch.Tensor) -> Slots:
    """Slots as the core holds them: int32 on the host. Waits for the device."""
    return slots.to("cpu", torch.int32).numpy()


def _mix(parts: Sequence[tuple[Slots, int]], cold: Slots) -> Slots:
    ends = np.cumsum([count for _, count in parts])
    if ends[-1] != len(cold):
        raise ValueError(f"need_size must be the {ends[-1]} COLD slots of parts, got {len(cold)}")
    split = np.split(cold, ends[:-1])
    return np.concatenate(
        [x for (hot, _), rest in zip(parts, split, strict=True) for x in (hot, rest)]
    )
