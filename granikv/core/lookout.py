"""Lookout: makes windows of what a server counts, the same way for a simulated and a live one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from granikv.core.allocator import HotColdAllocator
from granikv.core.directory import SlabDirectory
from granikv.core.repartition import Window
from granikv.core.step import Segment


@dataclass(frozen=True, slots=True)
class _Totals:
    """Counts since a server's start; `Window` says what each is."""

    hot_misses: Mapping[str, int] = field(default_factory=dict)
    hot_miss_tokens: int = 0
    evictions: int = 0
    cold_refusals: int = 0
    retractions: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """What requests need now, and what became of them; `Window` says what each is.

    Attributes:
        cold_refusals, retractions: since the server's start.
        segments: that two or more running rows read, base 0 for those in COLD.
    """

    cold_evictable: int
    cold_promised: int
    cold_waiting_tokens: int
    private_tokens: int
    cold_refusals: int
    retractions: int
    segments: Sequence[Segment]


class Lookout:
    """Remembers the totals of the last look."""

    def __init__(self, allocator: HotColdAllocator, directory: SlabDirectory) -> None:
        self._allocator = allocator
        self._directory = directory
        self._seen = _Totals()

    def look(self, now_s: float, load: Load) -> Window:
        """The window that ends now."""
        allocator, seen, totals = self._allocator, self._seen, self._totals(load)
        self._seen = totals
        return Window(
            now_s=now_s,
            size_tokens=allocator.size_tokens,
            hot_tokens=allocator.hot_tokens,
            hot_used=allocator.hot_used,
            hot_free=allocator.hot_free,
            largest_free_run=allocator.largest_free_run,
            cold_used=allocator.cold_used,
            cold_free=allocator.cold_free,
            cold_evictable=load.cold_evictable,
            cold_promised=load.cold_promised,
            cold_waiting_tokens=load.cold_waiting_tokens,
            hot_misses=dict(Counter(totals.hot_misses) - Counter(seen.hot_misses)),
            hot_miss_tokens=totals.hot_miss_tokens - seen.hot_miss_tokens,
            evictions=totals.evictions - seen.evictions,
            cold_refusals=totals.cold_refusals - seen.cold_refusals,
            retractions=totals.retractions - seen.retractions,
            private_tokens=load.private_tokens,
            rows_per_slab=tuple((s.length, s.rows) for s in load.segments if s.base),
            rows_per_cold_run=tuple((s.length, s.rows) for s in load.segments if not s.base),
        )

    def _totals(self, load: Load) -> _Totals:
        directory = self._directory
        return _Totals(
            dict(directory.misses),
            directory.hot_miss_tokens,
            directory.evictions,
            load.cold_refusals,
            load.retractions,
        )
