"""Moving the boundary in a running server: bounded, sound at every moment, and no request lost."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from drift_support import load, throughput
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_support import Bench, lone, prompt, real_cost, run, servers, workloads

from granikv.core.errors import ConfigError
from granikv.core.repartition import Window
from granikv.sim import repartitioner
from granikv.sim.config import ServerConfig
from granikv.sim.repartitioner import Repartitioner
from granikv.sim.scheduler import Scheduler
from granikv.traces.request import Request


class _Targets:
    """Asks for one share of the pool after the other, at every look."""

    def __init__(self, shares: list[float]) -> None:
        self.shares = shares
        self.looks = 0

    def observe(self, window: Window) -> int | None:
        self.looks += 1
        return int(self.shares[self.looks % len(self.shares)] * window.size_tokens)


@contextmanager
def _policy(policy: object) -> Iterator[list[int]]:
    """Servers made inside follow `policy`; pools are checked after every move or piece of one.

    Yields the tokens copied by each piece.
    """
    copied: list[int] = []
    advance = Repartitioner.advance

    def checked(self: Repartitioner, now_ns: int, scheduler: Scheduler, retractions: int) -> int:
        moved, was_moving = self.boundary.moved_tokens, self.boundary.is_moving
        tokens = advance(self, now_ns, scheduler, retractions)
        if was_moving or self.boundary.is_moving or tokens:
            copied.append(self.boundary.moved_tokens - moved)
            self._pools.check_integrity()
        return tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repartitioner, "make_policy", lambda name: policy)
        patch.setattr(Repartitioner, "advance", checked)
        yield copied


@settings(max_examples=80)
@given(
    workloads(),
    servers(),
    st.lists(st.floats(0.0, 0.5), min_size=2, max_size=6),
    st.sampled_from([1, 20, 10_000]),
)
def test_every_request_finishes_while_the_boundary_moves(
    requests: list[Request], config: ServerConfig, shares: list[float], budget_tokens: int
) -> None:
    """All requests that fit into the smallest COLD finish, whatever is asked for meanwhile."""
    moving = config.model_copy(
        update={
            "system": "granikv",
            "hot_fraction": 0.3,
            # SGLang aborts a lone row that finds no slot while a prompt in chunks holds the rest.
            "chunked_prefill_size": 10_000,
            "policy_interval_s": 0.02,
            "move_tokens_per_step": budget_tokens,
        }
    )
    cold = moving.size_tokens // 2
    fitting = [
        request
        for request in requests
        if request.after is None and request.prompt_tokens + request.output_tokens + 1 < cold
    ]
    with _policy(_Targets(shares)) as copied:
        bench = Bench(fitting, moving, real_cost()).run()
    assert sorted(state.request.request_id for state in bench.ended) == [
        request.request_id for request in fitting
    ]
    assert {state.status.value for state in bench.ended} <= {"finished"}
    assert max(copied, default=0) <= budget_tokens
    assert sum(copied) == bench.engine.repartitioner.boundary.moved_tokens
    bench.pools.check_integrity()


def _steady(count: int) -> list[Request]:
    """A prefix that somebody always reads, and enough private tokens to fill COLD with cache."""
    return [
        Request(i, 0.05 * i, prompt((1, 300), (10 + i, 80)), 60, prefix_tokens=300)
        for i in range(count)
    ]


def test_growth_makes_room_in_a_cache_that_is_full() -> None:
    # After 2.5 s 50 requests have left 140 tokens each, twice what COLD holds.
    config = ServerConfig(size_tokens=4000, hot_fraction=0.1, policy_interval_s=2.5)
    with _policy(_Targets([0.4])) as copied:
        bench = Bench(_steady(100), config, real_cost()).run()
    assert bench.pools.allocator.hot_tokens == 1600
    assert bench.engine.repartitioner.boundary.moves == 1
    assert 0 < sum(copied) < 1200


def test_shrinking_ends_above_the_slab_that_is_always_read() -> None:
    config = ServerConfig(size_tokens=4000, hot_fraction=0.5, policy_interval_s=0.5)
    with _policy(_Targets([0.0])):
        bench = Bench(_steady(100), config, real_cost()).run(4.0)
        assert bench.pools.allocator.hot_tokens == 300
        assert not bench.engine.repartitioner.boundary.is_moving
        bench.run()
    assert len(bench.ended) == 100


@pytest.mark.parametrize(("share", "promoted"), [(0.05, 0), (0.075, 300)])
def test_what_rows_read_in_cold_fills_the_room_that_hot_got(share: float, promoted: int) -> None:
    """Nobody asks for it any more; where 300 tokens do not fit, no miss is counted."""
    config = ServerConfig(size_tokens=4000, hot_fraction=0.01, policy_interval_s=0.5)
    requests = [Request(i, 0.05 * i, prompt((1, 300), (10 + i, 20)), 1000) for i in range(3)]
    with _policy(_Targets([share])):
        bench = Bench(requests, config, real_cost()).run(0.4)
        misses = dict(bench.pools.directory.misses)
        bench.run(1.2)
        assert bench.pools.allocator.hot_tokens == share * 4000
        placement = bench.pools.placement
        assert placement is not None
        assert placement.promoted_tokens == promoted
        assert bench.pools.directory.misses == misses != {}


@pytest.mark.parametrize("target", [-1, 4000, 0.5, 10.0])
def test_a_target_that_cannot_be_is_refused_in_words(target: float) -> None:
    class Wrong:
        def observe(self, window: Window) -> object:
            return target

    config = ServerConfig(size_tokens=4000, policy_interval_s=0.1)
    with _policy(Wrong()), pytest.raises(ConfigError, match=f"asked for {target} HOT tokens; it"):
        run(_steady(20), config, real_cost())


def test_a_stock_engine_has_no_boundary_to_move() -> None:
    config = ServerConfig(system="sglang", size_tokens=4000, policy_interval_s=0.1)
    with _policy(_Targets([0.4])):
        bench = Bench(_steady(20), config, real_cost()).run()
    assert bench.pools.allocator.hot_tokens == 0


def test_windows_say_what_cold_is_short_of() -> None:
    """Three requests of 300 tokens over a COLD of 500: one is refused until another ends."""
    seen: list[Window] = []

    class Watcher:
        def observe(self, window: Window) -> None:
            seen.append(window)

    config = ServerConfig(size_tokens=625, hot_fraction=0.2, policy_interval_s=0.01)
    with _policy(Watcher()):
        run([lone(i, 0.0, 250, 50) for i in range(3)], config, real_cost())
    assert any(window.cold_refusals for window in seen)
    for window in seen:
        assert window.cold_used + window.cold_free == window.size_tokens - window.hot_tokens
        assert window.cold_evictable <= window.cold_used
        assert window.private_tokens <= window.cold_used
    assert {len(window.rows_per_cold_run) for window in seen} == {0}


@pytest.mark.parametrize("name", ["watermark", "marginal"])
@pytest.mark.parametrize("of_load", ["flips every 6 s", "prefix-heavy", "suffix-heavy"])
def test_moving_costs_little_where_it_cannot_win_much(name: str, of_load: str) -> None:
    """Flips are meant to provoke useless moves; the other two need no move after the first ones."""
    requests = load(of_load, 0)
    assert throughput(requests, name) >= 0.95 * throughput(requests, "static")


@pytest.mark.parametrize(
    ("of_load", "best_fp", "least"),
    [
        ("large morning and night", 0.7, 1.3),
        ("night and large morning", 0.6, 1.15),
        ("a day that drifts", 0.6, 1.0),
        ("tenants come and go", 0.5, 0.98),
        ("mixed", 0.4, 0.98),
        ("prefix-heavy", 0.6, 0.98),
        ("suffix-heavy", 0.05, 0.98),
        ("new prefixes every 20 s", 0.3, 0.98),
    ],
)
def test_marginal_against_the_best_fixed_fraction(
    of_load: str, best_fp: float, least: float
) -> None:
    """The first two gain, the others lose little; docs/policies.md has the best of eight."""
    requests = load(of_load, 0)
    best = throughput(requests, "static", best_fp)
    assert throughput(requests, "marginal") >= least * best
