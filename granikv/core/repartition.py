"""RepartitionPolicy: whether and where the HOT/COLD boundary should move."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from granikv.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Window:
    """What happened since the last look, and how the pool stands now.

    Attributes:
        now_s: time of this look.
        size_tokens: HOT and COLD together.
        hot_tokens: HOT now.
        hot_used: HOT tokens in slabs.
        hot_free: HOT tokens in no slab.
        largest_free_run: longest slab that fits now.
        cold_used: COLD tokens held, cached ones included.
        cold_free: COLD tokens free.
        cold_evictable: cached COLD tokens that no request holds: they go when room is needed.
        cold_promised: COLD tokens that a prompt in chunks has still to take: it cannot wait.
        cold_waiting_tokens: COLD tokens that queued requests need before they can run.
        hot_misses: wanted slabs that could not be had in this window, by reason.
        hot_miss_tokens: tokens of those slabs.
        evictions: slabs evicted in this window.
        cold_refusals: times that the first queued request was refused in this window for want of
            COLD.
        retractions: running requests put back into the queue in this window for want of COLD.
        private_tokens: KV tokens that each running row reads alone in one decode step, all rows
            together.
        rows_per_slab: `(length, rows)` of what two or more running rows read in HOT.
        rows_per_cold_run: the same of what they read in common in COLD.
    """

    now_s: float
    size_tokens: int
    hot_tokens: int
    hot_used: int
    hot_free: int
    largest_free_run: int
    cold_used: int
    cold_free: int
    cold_evictable: int
    cold_promised: int
    cold_waiting_tokens: int
    hot_misses: Mapping[str, int]
    hot_miss_tokens: int
    evictions: int
    cold_refusals: int
    retractions: int
    private_tokens: int
    rows_per_slab: tuple[tuple[int, int], ...]
    rows_per_cold_run: tuple[tuple[int, int], ...]

    @property
    def cold_is_short(self) -> bool:
        """Whether requests had to wait or to go back for want of COLD."""
        return self.cold_refusals > 0 or self.retractions > 0

    @property
    def cold_idle(self) -> int:
        """COLD tokens that no request holds or was promised."""
        return max(0, self.cold_free + self.cold_evictable - self.cold_promised)

    @property
    def hot_unread(self) -> int:
        """HOT tokens that no two running rows read in common: free, cached or read by one row."""
        return self.hot_tokens - sum(length for length, _ in self.rows_per_slab)


class RepartitionPolicy(Protocol):
    """Watches windows and names the HOT size it wants."""

    def observe(self, window: Window) -> int | None:
        """HOT tokens to move to, None to stay."""


def target_of(policy: RepartitionPolicy, window: Window) -> int | None:
    """HOT tokens that a policy wants in place of those there are; None to stay.

    Raises:
        ConfigError: it asked for what no pool can have.
    """
    target = policy.observe(window)
    if target is None or target == window.hot_tokens:
        return None
    if not isinstance(target, int) or not 0 <= target < window.size_tokens:
        raise ConfigError(
            f"The repartition policy asked for {target} HOT tokens; it must ask for a whole"
            f" number from 0 to {window.size_tokens - 1}, or return None."
        )
    return target


class StaticPolicy:
    """Never moves the boundary."""

    def observe(self, window: Window) -> int | None:
        """Stay."""
        return None


@dataclass(slots=True)
class Hold:
    """The wait between two moves: twice as long after each reversal, half after any other move.

    A load that turns with the policy (or against it) is therefore followed ever more slowly.

    Attributes:
        windows: shortest wait, in windows.
        longest: longest wait, in windows.
    """

    windows: int
    longest: int
    _wait: int = field(default=0, init=False)
    _left: int = field(default=0, init=False)
    _grew: bool | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Check the options."""
        if not 1 <= self.windows <= self.longest:
            raise ValueError(
                f"windows must be in 1..longest, got {self.windows} and longest {self.longest}"
            )
        self._wait = self.windows

    def is_over(self) -> bool:
        """Whether a move may be asked for in this window; call it once a window."""
        self._left = max(0, self._left - 1)
        return self._left == 0

    def begin(self, *, grows: bool) -> None:
        """A move has been asked for."""
        is_reversal = self._grew is not None and self._grew != grows
        wait = self._wait * 2 if is_reversal else self._wait // 2
        self._wait = min(max(wait, self.windows), self.longest)
        self._left, self._grew = self._wait, grows
