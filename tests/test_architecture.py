"""One heart: what a simulation asks of `granikv.core`, the same classes answer alone.

A simulation runs on recording subclasses of the core's classes. Then its calls are replayed, in
order, on plain core objects with nothing of the simulator around them, and every slot array, slab,
segment tuple, migration and plan has to come out again. That is what makes a simulated allocator
the live server's allocator.
"""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from sim_support import Bench, prompt, real_cost

from granikv.core.admission import make_admission
from granikv.core.allocator import HotColdAllocator
from granikv.core.cost_table import CostTable
from granikv.core.directory import Reservation, SlabDirectory
from granikv.core.dispatch import DispatchChoice, Dispatcher
from granikv.core.groups import RowGroups
from granikv.core.migration import Migration
from granikv.core.repartition import Window
from granikv.cost_models.dispatch_table import build_cost_table
from granikv.sim import pools as sim_pools
from granikv.sim import repartitioner as sim_repartitioner
from granikv.sim.config import ServerConfig
from granikv.traces.request import Request

_CLASSES: dict[str, type] = {
    "allocator": HotColdAllocator,
    "directory": SlabDirectory,
    "groups": RowGroups,
    "dispatcher": Dispatcher,
}


@dataclass
class _Call:
    """One call from outside on a core object, with copies of what went in and out."""

    target: str
    method: str
    arguments: tuple[Any, ...]
    result: Any


@dataclass
class _Made:
    """Stands for an object that an earlier call returned: a replay has its own."""

    call: int


@dataclass
class _Log:
    calls: list[_Call] = field(default_factory=list)
    depth: int = 0
    handles: dict[int, tuple[int, object]] = field(default_factory=dict)

    def freeze(self, value: Any) -> Any:
        """A copy that later changes do not reach; what a call made stands for that call."""
        if isinstance(value, Reservation | Migration) and id(value) in self.handles:
            return _Made(self.handles[id(value)][0])
        if isinstance(value, tuple | list):
            frozen = [self.freeze(item) for item in value]
            return type(value)(*frozen) if hasattr(value, "_fields") else type(value)(frozen)
        return copy.deepcopy(value)


def _recorded(cls: type, target: str, log: _Log) -> type:
    """A subclass that writes down calls from outside, not what core objects ask each other."""

    def wrap(method: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: object, *arguments: Any) -> Any:
            if log.depth:
                return inner(self, *arguments)
            frozen = tuple(log.freeze(argument) for argument in arguments)
            log.depth += 1
            try:
                result = inner(self, *arguments)
            finally:
                log.depth -= 1
            log.calls.append(_Call(target, method, frozen, copy.deepcopy(result)))
            if isinstance(result, Reservation | Migration):
                log.handles[id(result)] = (len(log.calls) - 1, result)
            return result

        return call

    names = [n for n in dir(cls) if not n.startswith("_") and callable(getattr(cls, n))]
    body = {n: wrap(n, getattr(cls, n)) for n in names if n != "check_integrity"}
    return type(f"Recorded{cls.__name__}", (cls,), body)


def _replay(
    calls: list[_Call],
    size_tokens: int,
    hot_tokens: int,
    admission: str,
    table: CostTable,
    choice: DispatchChoice,
) -> dict[str, Any]:
    """Repeat the calls on fresh core objects; only `granikv.core` takes part."""
    allocator = HotColdAllocator(size_tokens, hot_tokens)
    objects: dict[str, Any] = {
        "allocator": allocator,
        "directory": SlabDirectory(allocator, make_admission(admission)),
        "groups": RowGroups(),
        "dispatcher": Dispatcher(table, choice),
    }
    results: list[Any] = []
    for number, call in enumerate(calls):
        arguments = [
            results[argument.call] if isinstance(argument, _Made) else argument
            for argument in call.arguments
        ]
        result = getattr(objects[call.target], call.method)(*arguments)
        assert _equal(result, call.result), f"call {number}: {call.target}.{call.method}"
        results.append(result)
    return objects


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, Reservation):
        return (left.slab, left.filled, left.bound) == (right.slab, right.filled, right.bound)
    if isinstance(left, Migration):
        return left.same_as(right)
    if isinstance(left, tuple | list):
        pairs = zip(left, right, strict=True)
        return type(left) is type(right) and all(_equal(a, b) for a, b in pairs)
    return type(left) is type(right) and bool(left == right)


class _UpAndDown:
    """Moves the boundary up once, and later down as far as the slabs in use allow."""

    def __init__(self) -> None:
        self.looks = 0

    def observe(self, window: Window) -> int | None:
        self.looks += 1
        if self.looks == 2:
            return window.hot_tokens + window.size_tokens // 5
        return 0 if self.looks >= 8 else None


_SIZE_TOKENS = 9000


def _requests() -> list[Request]:
    """Prefixes that are promoted, declared, nested and split; more rows than fit at times."""
    requests = []
    for i in range(90):
        path = [
            ((1, 600),),
            ((1, 600), (2, 500)),
            ((1, 600 - 100 * (i % 4)), (3, 300)),
            ((4 + i // 30, 800),),
        ][i % 4]
        hint = 800 if i % 8 == 3 else 0
        requests.append(
            Request(
                i, 0.02 * i, prompt(*path, (100 + i, 30 + i)), 60 + 5 * (i % 7), prefix_tokens=hint
            )
        )
    return requests


def _config(admission: str, *, overlap: bool) -> ServerConfig:
    return ServerConfig(
        size_tokens=_SIZE_TOKENS,
        hot_fraction=0.3,
        admission=admission,
        overlap_schedule=overlap,
        chunked_prefill_size=700,
        schedule_conservativeness=0.0,
        policy_interval_s=0.15,
        move_tokens_per_step=400,
    )


@pytest.mark.parametrize(("admission", "overlap"), [("value", True), ("shared", False)])
def test_core_alone_gives_every_answer_again(
    monkeypatch: pytest.MonkeyPatch, admission: str, overlap: bool
) -> None:
    log, config, cost = _Log(), _config(admission, overlap=overlap), real_cost()
    made = {name: _recorded(cls, name, log) for name, cls in _CLASSES.items()}
    monkeypatch.setattr(sim_pools, "HotColdAllocator", made["allocator"])
    monkeypatch.setattr(sim_pools, "SlabDirectory", made["directory"])
    monkeypatch.setattr(sim_pools, "RowGroups", made["groups"])
    monkeypatch.setattr(sim_repartitioner, "make_policy", lambda name: _UpAndDown())
    table = build_cost_table(cost)
    dispatcher = made["dispatcher"](table, config.dispatch_choice)
    bench = Bench(_requests(), config, cost, dispatcher=dispatcher).run()
    bench.pools.check_integrity()
    assert len(bench.ended) == 90

    called = Counter((call.target, call.method) for call in log.calls)
    _assert_everything_happened(bench, called)
    alone = _replay(
        log.calls, _SIZE_TOKENS, config.hot_tokens, config.admission, table, config.dispatch_choice
    )
    alone["allocator"].check_integrity()
    alone["directory"].check_integrity()
    assert alone["allocator"].stats() == bench.pools.allocator.stats()
    assert alone["directory"].misses == bench.pools.directory.misses
    assert alone["groups"].segments() == bench.pools.groups.segments()


def _assert_everything_happened(bench: Bench, called: Counter[tuple[str, str]]) -> None:
    """The recording holds all that it is meant to test; else the replay proves little."""
    for target, methods in {
        "allocator": ("alloc_cold", "free_cold", "begin_move", "next_piece", "finish_move"),
        "directory": ("wants", "victims", "reserve", "take", "bind", "release", "split", "evict"),
        "groups": ("join", "leave", "split", "place", "segments"),
        "dispatcher": ("plan",),
    }.items():
        for method in methods:
            assert called[target, method] > 0, f"no {target}.{method} was recorded"
    assert called["allocator", "finish_move"] >= 2
    assert bench.engine.repartitioner.boundary.moved_tokens > 0
    assert bench.pools.placement is not None
    assert bench.pools.placement.promoted_tokens > 0
    assert sum(called.values()) > 1000


def test_the_replay_notices_a_wrong_answer() -> None:
    """A recording with one slot changed does not pass."""
    allocator = HotColdAllocator(100, 20)
    slots = allocator.alloc_cold(5)
    assert slots is not None
    call = _Call("allocator", "alloc_cold", (5,), slots.copy())
    table = build_cost_table(real_cost())
    _replay([call], 100, 20, "paper", table, "cost")
    call.result[3] += 1
    with pytest.raises(AssertionError, match=r"call 0: allocator\.alloc_cold"):
        _replay([call], 100, 20, "paper", table, "cost")
