"""Shared prefixes find their way into HOT slabs, and a HOT that is too small is never an error."""

import json

import pytest
from sim_support import (
    COPY_NS_PER_TOKEN,
    EXTEND_NS,
    EXTEND_NS_PER_TOKEN,
    STEP_NS,
    Bench,
    Result,
    prompt,
    run,
    tiny,
)

from granikv.core.step import Segment
from granikv.sim.config import ServerConfig
from granikv.traces.request import Request


def _hot(**changes: object) -> ServerConfig:
    settings: dict[str, object] = {
        "system": "granikv",
        "size_tokens": 4000,
        "hot_fraction": 0.5,
        "admission": "paper",
        "chunked_prefill_size": 8192,
        "max_prefill_tokens": 16384,
    }
    return tiny(**{**settings, **changes})


def _ask(
    id_: int, at_s: float, *runs: tuple[int, int], output: int = 500, hint: int = 0
) -> Request:
    return Request(id_, at_s, prompt(*runs, (100 + id_, 20)), output, prefix_tokens=hint)


def _slabs(bench: Bench) -> list[tuple[int, int]]:
    """(base, length) of every HOT node, in address order."""
    index = bench.pools.index
    return sorted((index.base_of(node), node.length) for node in index.nodes() if node.is_hot)


def _hot_segments(bench: Bench) -> list[Segment]:
    return [segment for segment in bench.pools.groups.segments() if segment.base]


def _last_segments(result: Result) -> list[list[int]]:
    return json.loads(result.steps.filter(result.steps["kind"] == "decode")["segments_json"][-1])


@pytest.mark.parametrize("admission", ["paper", "shared", "value"])
def test_a_prefix_is_promoted_on_its_second_use(admission: str) -> None:
    """Only what is shared moves: 400 tokens, without the 20 that follow. The second prompt
    counts once it is complete, so that a decode step pays the copy.
    """
    requests = [_ask(0, 0.0, (1, 400)), _ask(1, 100e-6, (1, 400))]
    bench = Bench(requests, _hot(admission=admission)).run(90e-6)
    assert _slabs(bench) == []
    bench.run(200e-6)
    assert _slabs(bench) == [(1, 400)]
    assert _hot_segments(bench) == [Segment(1, 400, 2)]
    result = run(requests, _hot(admission=admission))
    assert result.requests["hot_tokens"].to_list() == [400, 400]
    assert result.outcome.promoted_tokens == 400
    kinds, ns = result.steps["kind"].to_list(), (result.steps["gpu_us"] * 1e3).round().to_list()
    assert kinds == ["extend", "decode", "extend", "decode", "decode"]
    assert ns[2] == EXTEND_NS + 20 * EXTEND_NS_PER_TOKEN
    steps = result.steps["iter"][4] - result.steps["iter"][3]
    assert ns[3] == steps * STEP_NS + 400 * COPY_NS_PER_TOKEN


def test_a_declared_prefix_is_prefilled_in_place() -> None:
    """With a hint the first request fills the slab itself, and nothing is copied."""
    requests = [_ask(0, 0.0, (1, 400), hint=400), _ask(1, 100e-6, (1, 400), hint=400)]
    bench = Bench(requests, _hot()).run(90e-6)
    assert _slabs(bench) == [(1, 400)]
    result = run(requests, _hot())
    assert result.requests["hot_tokens"].to_list() == [400, 400]
    assert result.outcome.promoted_tokens == 0
    second = result.steps.filter(result.steps["kind"] == "extend")["gpu_us"][1]
    assert round(second * 1e3) == EXTEND_NS + 20 * EXTEND_NS_PER_TOKEN


def test_chunks_of_a_declared_prefix_follow_each_other_in_one_run() -> None:
    requests = [_ask(0, 0.0, (1, 400), hint=400), _ask(1, 200e-6, (1, 400), hint=400)]
    bench = Bench(requests, _hot(chunked_prefill_size=150)).run(400e-6)
    assert _slabs(bench) == [(1, 150), (151, 150), (301, 100)]
    assert _hot_segments(bench) == [Segment(1, 400, 2)]


def test_of_two_requests_with_one_declared_prefix_the_first_fills_it() -> None:
    """Both are in the same batch; the second one's copy of the prefix is dropped."""
    requests = [_ask(i, 0.0, (1, 400), hint=400) for i in range(2)]
    bench = Bench(requests, _hot()).run(200e-6)
    assert _slabs(bench) == [(1, 400)]
    assert bench.pools.allocator.hot_used == 400
    assert _hot_segments(bench) == [Segment(1, 400, 2)]
    bench.pools.check_integrity()


def test_a_split_leaves_two_slabs_in_a_row() -> None:
    requests = [_ask(i, 100e-6 * i, (1, 400)) for i in range(2)]
    requests.append(_ask(2, 300e-6, (1, 150), (2, 30)))
    bench = Bench(requests, _hot()).run(290e-6)
    assert _slabs(bench) == [(1, 400)]
    bench.run(400e-6)
    assert _slabs(bench) == [(1, 150), (151, 250)]
    assert _hot_segments(bench) == [Segment(1, 150, 3), Segment(151, 250, 2)]
    bench.pools.check_integrity()


def test_nested_prefixes_are_nested_segments() -> None:
    """A system prompt for all, tools for two each, a tenant below one of the tools."""
    paths = [((1, 300), (2, 200)), ((1, 300), (3, 250)), ((1, 300), (2, 200), (4, 100))]
    requests = [_ask(i, 200e-6 * i, *path, output=5000) for i, path in enumerate([*paths, *paths])]
    bench = Bench(requests, _hot(size_tokens=80_000)).run(2000e-6)
    found = {(segment.length, segment.rows) for segment in _hot_segments(bench)}
    assert found == {(300, 6), (200, 4), (250, 2), (100, 2)}
    slabs = {length: base for base, length in _slabs(bench)}
    assert slabs[200] == slabs[300] + 300
    bench.pools.check_integrity()


def test_segments_reach_the_records() -> None:
    result = run([_ask(i, 1e-6 * i, (1, 400), hint=400) for i in range(3)], _hot())
    assert [1, 400, 3] in [s for text in result.steps["segments_json"] for s in json.loads(text)]


@pytest.mark.parametrize("hint", [0, 400])
def test_a_prefix_longer_than_hot_stays_cold_and_is_counted(hint: int) -> None:
    config = _hot(hot_fraction=0.05)
    result = run([_ask(i, 100e-6 * i, (1, 400), hint=hint) for i in range(3)], config)
    assert result.outcome.finished == 3
    assert result.requests["hot_tokens"].to_list() == [0, 0, 0]
    assert result.outcome.hot_misses["too_long"] >= 1
    assert result.steps["hot_misses"].sum() == sum(result.outcome.hot_misses.values())
    assert result.steps["hot_used"].max() == 0


@pytest.mark.parametrize("admission", ["paper", "shared", "value"])
def test_without_room_a_prefix_stays_cold_and_is_counted(admission: str) -> None:
    """The slab in the way is in use: no policy may take it."""
    config = _hot(admission=admission, hot_fraction=0.15)
    requests = [_ask(i, 100e-6 * i, (1 + i // 2, 400)) for i in range(4)]
    result = run(requests, config)
    assert result.outcome.finished == 4
    assert result.requests["hot_tokens"].to_list() == [400, 400, 0, 0]
    assert result.outcome.hot_misses == {"no_room": 1}


_RIVALS = [_ask(i, at, (1, 400), output=50) for i, at in [(0, 0.0), (1, 20e-6)]] + [
    _ask(i, at, (2, 400)) for i, at in [(2, 100.0), (3, 100.0001)]
]


@pytest.mark.parametrize(
    ("admission", "slab_of_rival"), [("paper", 0), ("shared", 400), ("value", 400)]
)
def test_an_idle_slab_gives_way_as_the_policy_says(admission: str, slab_of_rival: int) -> None:
    """Nobody has used the first prefix for 100 s when two requests share the second one."""
    requests = [*_RIVALS, _ask(4, 200.0, (1, 400))]
    result = run(requests, _hot(admission=admission, hot_fraction=0.15))
    rows = result.requests.select("hot_tokens", "cached_tokens").rows()
    assert rows[1] == (400, 400)
    assert rows[3] == (slab_of_rival, 400)
    evicted = slab_of_rival == 400
    assert rows[4] == ((0, 0) if evicted else (400, 400))
    assert ("no_room" in result.outcome.hot_misses) is not evicted


def test_a_slab_in_use_outlives_cold_pressure() -> None:
    """COLD is filled up again and again; the prefix that rows hold never leaves HOT."""
    requests = [_ask(i, 100e-6 * i, (1, 400), output=1200) for i in range(2)]
    requests += [_ask(i, 100e-6 * (i + 1), (i, 800), output=10) for i in range(2, 12)]
    bench = Bench(requests, _hot(size_tokens=6000, hot_fraction=0.08)).run(300e-6)
    while len(bench.ended) < 8:
        bench.env.step()
        assert _hot_segments(bench)[0] == Segment(1, 400, 2)
    assert bench.pools.index.evicted_nodes > 0
    bench.run()
    assert len(bench.ended) == 12


def test_the_comparison_systems_have_no_hot_pool() -> None:
    for system in ("sglang", "cascade"):
        config = _hot(system=system)
        result = run([_ask(i, 1e-6 * i, (1, 400), hint=400) for i in range(3)], config)
        assert result.requests["hot_tokens"].sum() == 0
        assert all(segment[0] == 0 for segment in _last_segments(result))
