"""ScheduledPolicy: follows a list of HOT sizes that was written beforehand; RecordingPolicy writes
down what another policy asks for, so that it can be followed again.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from operator import attrgetter

from granikv.core.repartition import RepartitionPolicy, Window


@dataclass(frozen=True, slots=True)
class Ask:
    """From `at_s` on, `hot_tokens` are wanted; None is to stay wherever the boundary is."""

    at_s: float
    hot_tokens: int | None


@dataclass(frozen=True, slots=True)
class ScheduledPolicy:
    """Wants at every look what the last ask before it says, until the boundary stands there.

    A move that cannot begin, or that ends early for a slab in use, is thus asked for again.

    Attributes:
        asks: in order of time.
    """

    asks: tuple[Ask, ...]

    def __post_init__(self) -> None:
        """Check the order."""
        times = [ask.at_s for ask in self.asks]
        if times != sorted(times):
            raise ValueError("asks must be in order of time")

    def observe(self, window: Window) -> int | None:
        """HOT tokens that are due, None before the first ask."""
        place = bisect_right(self.asks, window.now_s, key=attrgetter("at_s"))
        return self.asks[place - 1].hot_tokens if place else None


@dataclass(slots=True)
class RecordingPolicy:
    """Answers as `policy` does.

    A ScheduledPolicy with the same asks, on the same load and server, gives the same run.

    Attributes:
        asks: its answer at every look.
    """

    policy: RepartitionPolicy
    asks: list[Ask] = field(default_factory=list)

    def observe(self, window: Window) -> int | None:
        """Ask the policy and keep its answer."""
        hot_tokens = self.policy.observe(window)
        self.asks.append(Ask(window.now_s, hot_tokens))
        return hot_tokens
