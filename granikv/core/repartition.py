"""RepartitionPolicy: whether and where the HOT/COLD boundary should move."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
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
        cold_waiting_tokens: COLD tokens that queued requests need before they can run.
        hot_misses: wanted slabs that could not be had in this window, by reason.
        hot_miss_tokens: tokens of those slabs.
        evictions: slabs evicted in this window.
        retractions: running requests put back into the queue in this window for want of COLD.
        rows_per_slab: `(length, rows)` of each slab with its running rows.
    """

    now_s: float
    size_tokens: int
    hot_tokens: int
    hot_used: int
    hot_free: int
    largest_free_run: int
    cold_used: int
    cold_free: int
    cold_waiting_tokens: int
    hot_misses: Mapping[str, int]
    hot_miss_tokens: int
    evictions: int
    retractions: int
    rows_per_slab: tuple[tuple[int, int], ...]


class RepartitionPolicy(Protocol):
    """Watches windows and names the HOT size it wants."""

    def observe(self, window: Window) -> int | None:
        """HOT tokens to move to, None to stay."""


class StaticPolicy:
    """Never moves the boundary."""

    def observe(self, window: Window) -> int | None:
        """Stay."""
        return None


def make_policy(name: str) -> RepartitionPolicy:
    """Build a policy by name.

    Raises:
        ConfigError: the name is not known.
    """
    names = ["static"]
    if name == "static":
        return StaticPolicy()
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(names)}."
    raise ConfigError(f"Repartition policy {name!r} does not exist; {hint}")
