"""Routers: which replica a request goes to."""

import difflib
from collections.abc import Callable, Sequence
from typing import Protocol

from granikv.core.errors import ConfigError
from granikv.traces.request import Request

ROUTERS = ("round_robin", "least_loaded", "prefix_affinity")

# prefix_affinity leaves the preferred replica when it holds this many requests more than the
# emptiest one and twice as many: sharing a prefix saves less than queueing costs then. (Stated; the
# factor of two keeps small loads put.)
_IMBALANCE_REQUESTS = 16


class Replica(Protocol):
    """What a router sees of a replica."""

    @property
    def load(self) -> int:
        """Requests inside."""


Route = Callable[[Request, Sequence[Replica]], int]


def make_router(name: str) -> Route:
    """Build a router by name; it answers the replica's position.

    Raises:
        ConfigError: the name is not known.
    """
    if name == "round_robin":
        return _RoundRobin()
    if name == "least_loaded":
        return _least_loaded
    if name == "prefix_affinity":
        return _PrefixAffinity()
    near = difflib.get_close_matches(name, ROUTERS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(ROUTERS)}."
    raise ConfigError(f"Router {name!r} does not exist; {hint}")


class _RoundRobin:
    def __init__(self) -> None:
        self._next = 0

    def __call__(self, request: Request, replicas: Sequence[Replica]) -> int:
        chosen = self._next % len(replicas)
        self._next += 1
        return chosen


def _least_loaded(request: Request, replicas: Sequence[Replica]) -> int:
    return min(range(len(replicas)), key=lambda i: (replicas[i].load, i))


class _PrefixAffinity:
    """Requests with the same first run go where the first of them went, unless that replica is far
    behind.
    """

    def __init__(self) -> None:
        self._home: dict[int, int] = {}

    def __call__(self, request: Request, replicas: Sequence[Replica]) -> int:
        emptiest = _least_loaded(request, replicas)
        home = self._home.setdefault(request.prompt[0].segment, emptiest)
        load, least = replicas[home].load, replicas[emptiest].load
        if load > least + _IMBALANCE_REQUESTS and load > 2 * least:
            return emptiest
        return home
