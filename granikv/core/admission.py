"""HotAdmission: which prefixes deserve a HOT slab, and which idle slabs they may displace."""

import difflib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from granikv.core.errors import ConfigError

# Of e, in 64 bits.
_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, slots=True)
class PrefixView:
    """What is known about a prefix when its place is decided.

    Attributes:
        node: id of whatever the prefix index above calls this prefix.
        length: tokens that would become one slab.
        live_requests: requests that hold it now, the one asking included.
        hits: times it was used in all: 1 when it is made, and 1 more for every later match.
        first_use_s: when it was made.
        last_use_s: when it was made or matched last.
        now_s: the time of the decision.
        hinted: whether the client declared it shared.
    """

    node: int
    length: int
    live_requests: int
    hits: int
    first_use_s: float
    last_use_s: float
    now_s: float
    hinted: bool = False


@dataclass(frozen=True, slots=True)
class IdleSlab(PrefixView):
    """A prefix that has a slab and that no request holds, with the free HOT tokens at both ends."""

    base: int = 0
    gap_before: int = 0
    gap_after: int = 0


class HotAdmission(Protocol):
    """Policy for HOT; pure, so that every tensor-parallel rank decides alike."""

    def wants_slab(self, view: PrefixView) -> bool:
        """Whether this prefix should live in HOT, room or not."""

    def victims(self, view: PrefixView, idle: Sequence[IdleSlab]) -> list[int]:
        """Nodes to evict so that `view` fits; `idle` is in address order. Empty: none offered."""


@dataclass(frozen=True, slots=True)
class PaperAdmission:
    """HOT first, no demotion: everything shared is wanted, nothing is ever displaced."""

    def wants_slab(self, view: PrefixView) -> bool:
        """Whether the prefix is hinted, or was seen at least twice."""
        return view.hinted or view.hits >= 2 or view.live_requests >= 2

    def victims(self, view: PrefixView, idle: Sequence[IdleSlab]) -> list[int]:
        """Offer none."""
        return []


@dataclass(frozen=True, slots=True)
class SharedAdmission:
    """Only long prefixes that several live requests hold; displaces what was idle longest.

    Attributes:
        min_tokens: shortest prefix worth a slab.
        min_live: live requests that make a prefix shared; one is enough for a hinted prefix.
    """

    min_tokens: int = 256
    min_live: int = 2

    def __post_init__(self) -> None:
        """Check the options."""
        _check_positive(min_tokens=self.min_tokens, min_live=self.min_live)

    def wants_slab(self, view: PrefixView) -> bool:
        """Whether the prefix is long enough and shared now."""
        needed = 1 if view.hinted else self.min_live
        return view.length >= self.min_tokens and view.live_requests >= needed

    def victims(self, view: PrefixView, idle: Sequence[IdleSlab]) -> list[int]:
        """Offer the neighbours whose latest use is oldest; of equals, the fewest tokens."""
        uses = [slab.last_use_s for slab in idle]
        return _nodes(_cheapest_window(idle, view.length, lambda window: max(uses[window])))


@dataclass(frozen=True, slots=True)
class ValueAdmission:
    """A slab is worth the KV reads that it saves; displaces what saves clearly less.

    When N requests decode from one prefix, a shared pass reads it once instead of N times: it saves
    `length * (N - 1)` token reads per decode step, that is `N - 1` per HOT token. For the future, N
    is taken as Poisson with mean `a` (requests come independently, `rate` a second, and each holds
    the prefix for `residence_s`), so that

        rate  = (hits - 1) / max(last_use_s - first_use_s, residence_s)
        a     = rate * residence_s * P(in use)
        saved = E[max(N - 1, 0)] = a - 1 + exp(-a)

    and a prefix is worth `length * max(live_requests - 1, saved)`. A hinted prefix that is live
    counts as having at least two readers.

    A prefix may be out of use for good: yesterday's, or that of a tenant who has left. When uses
    come as a Poisson process that ends after a time that is exponential with mean `life_s`, then
    after `t` seconds of silence (the Pareto model of Schmittlein, Morrison and Colombo, Management
    Science 33(1), 1987, with both rates known)

        P(in use) = 1 / (1 + (exp((rate + 1 / life_s) * t) - 1) / (1 + rate * life_s))

    so that a prefix that was used every second is given up within ten, one of every minute is not.

    Attributes:
        min_tokens: shortest prefix worth a slab.
        min_saved: least `max(live_requests - 1, saved)` worth a slab.
        residence_s: how long a request typically holds its prefix.
        life_s: how long a prefix is typically in use.
        hysteresis: how many times the value of its victims a newcomer must have.
    """

    min_tokens: int = 256
    min_saved: float = 0.25
    residence_s: float = 10.0
    life_s: float = 600.0
    hysteresis: float = 1.5

    def __post_init__(self) -> None:
        """Check the options."""
        _check_positive(
            min_tokens=self.min_tokens,
            min_saved=self.min_saved,
            residence_s=self.residence_s,
            life_s=self.life_s,
        )
        if not self.hysteresis >= 1:
            raise ValueError(f"hysteresis must be at least 1, got {self.hysteresis!r}")

    def wants_slab(self, view: PrefixView) -> bool:
        """Whether the prefix is long enough and saves enough reads."""
        return view.length >= self.min_tokens and self.saved_reads(view) >= self.min_saved

    def victims(self, view: PrefixView, idle: Sequence[IdleSlab]) -> list[int]:
        """Offer the neighbours with the least total value, if the newcomer beats it."""
        worth = [self.value(slab) for slab in idle]
        window = _cheapest_window(idle, view.length, lambda window: math.fsum(worth[window]))
        displaced = math.fsum(self.value(slab) for slab in window)
        return _nodes(window) if self.value(view) > self.hysteresis * displaced else []

    def value(self, prefix: PrefixView) -> float:
        """Token reads that a slab for this prefix saves per decode step."""
        return prefix.length * self.saved_reads(prefix)

    def saved_reads(self, prefix: PrefixView) -> float:
        """Reads saved per HOT token and decode step."""
        used_s = max(prefix.last_use_s - prefix.first_use_s, self.residence_s)
        rate = max(prefix.hits - 1, 0) / used_s
        silent_s = max(prefix.now_s - prefix.last_use_s, 0.0)
        mean = rate * self.residence_s * self._in_use(rate, silent_s)
        readers = prefix.live_requests
        if prefix.hinted and readers:
            readers = max(readers, 2)
        return max(readers - 1.0, mean + math.expm1(-mean))

    def _in_use(self, rate: float, silent_s: float) -> float:
        """Probability that a prefix which was used so often will be used again."""
        exponent = (rate + 1 / self.life_s) * silent_s
        ended = math.expm1(min(exponent, _LARGEST_EXPONENT)) / (1 + rate * self.life_s)
        return 1 / (1 + ended)


_POLICIES: dict[str, Callable[..., HotAdmission]] = {
    "paper": PaperAdmission,
    "shared": SharedAdmission,
    "value": ValueAdmission,
}
ADMISSIONS: tuple[str, ...] = tuple(_POLICIES)


def make_admission(name: str, **options: float) -> HotAdmission:
    """Build a policy by name.

    Raises:
        ConfigError: the name or an option is not known, or an option is out of range.
    """
    if name not in _POLICIES:
        near = difflib.get_close_matches(name, _POLICIES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(_POLICIES)}."
        raise ConfigError(f"HOT admission policy {name!r} does not exist; {hint}")
    try:
        return _POLICIES[name](**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"HOT admission policy {name!r} cannot take its options: {error}"
        ) from None


def makes_run(nodes: Sequence[int], idle: Sequence[IdleSlab], length: int) -> bool:
    """Whether `nodes` are distinct idle slabs whose eviction gives a free run of `length`."""
    known = {slab.node: slab for slab in idle}
    if not nodes or len(set(nodes)) != len(nodes) or not known.keys() >= set(nodes):
        return False
    end = run = 0
    for slab in sorted((known[node] for node in nodes), key=lambda slab: slab.base):
        # Two windows join when only free slots lie between them.
        run = run if slab.base - slab.gap_before == end else slab.gap_before
        run += slab.length + slab.gap_after
        end = slab.base + slab.length
        if run >= length:
            return True
    return False


def _cheapest_window(
    idle: Sequence[IdleSlab], length: int, cost: Callable[[slice], float]
) -> Sequence[IdleSlab]:
    """Least `cost` of all windows that make the run; of equals, fewest tokens, then lowest."""
    lengths = [slab.length for slab in idle]

    def rank(window: slice) -> tuple[float, int, int]:
        tokens: int = sum(lengths[window])
        return cost(window), tokens, window.start

    windows = list(_windows(idle, length))
    return idle[min(windows, key=rank)] if windows else ()


def _windows(idle: Sequence[IdleSlab], length: int) -> Iterator[slice]:
    """Yield, per last slab, the smallest window of neighbours whose slots and gaps reach `length`.

    Between two neighbours lie only free slots. A larger window cannot cost less: neither the latest
    use nor a sum of values falls when a slab is added.
    """
    start = 0
    run = 0  # free tokens if idle[start : index + 1] went
    for index, slab in enumerate(idle):
        if index == 0 or not _neighbours(idle[index - 1], slab):
            start, run = index, slab.gap_before
        run += slab.length + slab.gap_after
        # Without its first slab a window still has the gap after that slab.
        while start < index and run - idle[start].gap_before - idle[start].length >= length:
            run -= idle[start].gap_before + idle[start].length
            start += 1
        if run >= length:
            yield slice(start, index + 1)


def _neighbours(left: IdleSlab, right: IdleSlab) -> bool:
    return left.base + left.length + left.gap_after == right.base


def _nodes(window: Sequence[IdleSlab]) -> list[int]:
    return [slab.node for slab in window]


def _check_positive(**options: float) -> None:
    for name, value in options.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value!r}")
