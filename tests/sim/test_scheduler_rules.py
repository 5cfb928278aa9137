"""SGLang 0.5.17's scheduling rules, one by one, on schedules small enough to work out by hand.

With the constant cost model an extend step takes 10 us and 0.1 us a token, a decode step 1 us.
"""

import json

import pytest
from sim_support import Bench, Result, constant_cost, lone, prompt, run, tiny

from granikv.sim.config import (
    INIT_NEW_TOKEN_RATIO,
    MIN_NEW_TOKEN_RATIO_FACTOR,
    NEW_TOKEN_RATIO_DECAY_STEPS,
    ServerConfig,
)
from granikv.sim.scheduler import NewTokenRatio
from granikv.traces.request import Request


def _us(result: Result, column: str) -> list[int | None]:
    values = result.requests[column].to_list()
    return [None if value is None else round(value * 1e6) for value in values]


def _steps(result: Result) -> list[tuple[str, int, int, int]]:
    return result.steps.select("kind", "rows", "prefill_tokens", "steps").rows()


def _extends(result: Result) -> list[list[list[int]]]:
    """New and prefix tokens of each request of each extend step."""
    plans = result.steps.filter(result.steps["kind"] == "extend")["plan_json"]
    return [json.loads(plan)["extend"] for plan in plans]


# ---------------------------------------------------------------------- admission


def test_prefill_goes_before_decode() -> None:
    """Arrivals interrupt decoding at the next step boundary, however many rows run."""
    result = run([lone(0, 0.0, 10, 30), lone(1, 15.5e-6, 10, 5), lone(2, 16.5e-6, 10, 5)], tiny())
    assert _steps(result)[:4] == [
        ("extend", 1, 10, 1),
        ("decode", 1, 0, 5),
        ("extend", 1, 10, 1),
        ("extend", 1, 10, 1),
    ]


def test_a_request_that_does_not_fit_closes_admission_until_a_row_leaves() -> None:
    """Request 1 needs 711 of `1000 - 10 - 0.7 * 399`; 2 would fit but has to wait for 0."""
    requests = [lone(0, 0.0, 10, 400), lone(1, 5e-6, 10, 700), lone(2, 50e-6, 10, 5)]
    result = run(requests, tiny())
    end_of_0 = 11 + 399
    assert _us(result, "finish_s")[0] == end_of_0
    assert _us(result, "first_token_s")[1:] == [end_of_0 + 12, end_of_0 + 12]


@pytest.mark.parametrize(("output_tokens", "is_admitted"), [(709, True), (710, False)])
def test_admission_reserves_a_share_of_the_running_output(
    output_tokens: int, is_admitted: bool
) -> None:
    """Needed < free - ratio * left: 10 + output + 1 < 1000 - 10 - 0.7 * 385 = 720.5."""
    config = tiny(schedule_conservativeness=1.0)
    result = run([lone(0, 0.0, 10, 386), lone(1, 5e-6, 10, output_tokens)], config)
    assert (_us(result, "first_token_s")[1] == 22) is is_admitted


@pytest.mark.parametrize(("output_tokens", "is_admitted"), [(879, True), (880, False)])
def test_a_prefilled_row_has_one_token_out(output_tokens: int, is_admitted: bool) -> None:
    """Ratio 1: request 0 has 99 of 100 tokens left right after its prefill: 891 are free."""
    config = tiny(schedule_conservativeness=2.0)
    result = run([lone(0, 0.0, 10, 100), lone(1, 5e-6, 10, output_tokens)], config)
    assert (_us(result, "first_token_s")[1] == 22) is is_admitted


@pytest.mark.parametrize(("output_tokens", "is_admitted"), [(879, True), (880, False)])
def test_an_overlapped_scheduler_has_not_seen_the_last_token(
    output_tokens: int, is_admitted: bool
) -> None:
    """One decode step later the row holds 11 tokens, but 99 still count as left, at the ratio after
    one decay: 1000 - 11 - 99 * (1 - 0.86 / 600) = 890.14 are free.
    """
    config = tiny(schedule_conservativeness=2.0, overlap_schedule=True)
    result = run([lone(0, 0.0, 10, 100), lone(1, 5e-6, 10, output_tokens)], config)
    assert (_us(result, "first_token_s")[1] == 23) is is_admitted


def test_a_row_that_ends_during_a_prefill_opens_admission() -> None:
    """Request 1 ends at 16 us. 2 and 3 come then, 3 does not fit and closes admission. The decode
    step after 2's prefill drops row 1, and that opens it: with 2 running, 3 fits.
    """
    requests = [
        lone(0, 0.0, 10, 200),
        lone(1, 0.0, 10, 5),
        lone(2, 15.5e-6, 10, 300),
        lone(3, 15.6e-6, 10, 530),
    ]
    result = run(requests, tiny(max_prefill_tokens=9999))
    assert _us(result, "first_token_s") == [12, 12, 27, 39]


def test_a_prefill_batch_that_shrinks_opens_admission() -> None:
    """Request 2 lacks a few tokens while 1 is counted; 1 ends with its prefill, so 2 is next."""
    requests = [lone(0, 0.0, 10, 30), lone(1, 11.5e-6, 10, 1), lone(2, 11.6e-6, 10, 969)]
    result = run(requests, tiny(schedule_conservativeness=0.0))
    assert _us(result, "first_token_s") == [11, 23, 34]


def test_only_4096_output_tokens_are_counted() -> None:
    """Request 0 takes 10 + 4096 + 1 of 6000, so 10 + 1800 + 1 fit beside it."""
    requests = [lone(0, 0.0, 10, 5500), lone(1, 0.0, 10, 1800)]
    result = run(requests, tiny(size_tokens=6000))
    assert _us(result, "first_token_s") == [12, 12]
    assert result.outcome.finished == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_no_more_rows_than_max_running_requests(overlap: bool) -> None:
    config = tiny(max_running_requests=2, overlap_schedule=overlap)
    result = run([lone(i, 0.0, 10, 20) for i in range(5)], config)
    assert result.steps["rows"].max() == 2
    assert result.outcome.finished == 5


def test_max_prefill_tokens_closes_a_batch_after_the_request_that_reaches_it() -> None:
    config = tiny(chunked_prefill_size=8192, max_prefill_tokens=100)
    result = run([lone(i, 0.0, 60, 2) for i in range(3)], config)
    assert _steps(result)[:2] == [("extend", 2, 120, 1), ("extend", 1, 60, 1)]


@pytest.mark.parametrize(("output_tokens", "status"), [(48, "finished"), (49, "refused")])
def test_what_can_never_fit_is_refused_at_once(output_tokens: int, status: str) -> None:
    """Prompt + output + 1 must be less than COLD; the queue behind does not wait."""
    requests = [lone(0, 0.0, 10, 40), lone(1, 1e-6, 50, output_tokens), lone(2, 30e-6, 10, 2)]
    result = run(requests, tiny(size_tokens=100))
    assert result.requests["status"].to_list() == ["finished", status, "finished"]
    if status == "refused":
        assert _us(result, "first_token_s") == [11, None, 41]


def test_only_cold_counts_for_what_can_ever_fit() -> None:
    config = tiny(system="granikv", size_tokens=200, hot_fraction=0.5)
    result = run([lone(0, 0.0, 50, 48), lone(1, 0.0, 50, 49)], config)
    assert result.requests["status"].to_list() == ["finished", "refused"]


# ---------------------------------------------------------------------- chunks


def test_a_long_prompt_is_prefilled_in_chunks() -> None:
    """The last chunk leaves room for others; decoding waits."""
    requests = [lone(0, 0.0, 10, 9), lone(1, 11.5e-6, 600, 2), lone(2, 30e-6, 100, 2)]
    result = run(requests, tiny(max_prefill_tokens=9999))
    assert _steps(result)[:6] == [
        ("extend", 1, 10, 1),
        ("decode", 1, 0, 1),
        ("extend", 1, 256, 1),
        ("extend", 1, 256, 1),
        ("extend", 2, 188, 1),
        ("decode", 3, 0, 1),
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_finished_chunks_are_cached_at_once(overlap: bool) -> None:
    """Request 1 repeats the first 256 tokens of a prompt whose last chunk it is prefilled with."""
    requests = [
        Request(0, 0.0, prompt((1, 300)), 5),
        Request(1, 0.0, prompt((1, 256), (2, 20)), 5),
    ]
    result = run(requests, tiny(overlap_schedule=overlap))
    assert result.requests["cached_tokens"].to_list() == [0, 256]
    assert _steps(result)[:2] == [("extend", 1, 256, 1), ("extend", 2, 64, 1)]
    assert _extends(result) == [[[256, 0]], [[44, 256], [20, 256]]]


def test_a_chunk_skips_what_was_cached_before_it_started() -> None:
    requests = [
        Request(0, 0.0, prompt((1, 500), (2, 5)), 2),
        Request(1, 1e-3, prompt((1, 500), (3, 300)), 2),
    ]
    result = run(requests, tiny(size_tokens=3000))
    assert result.requests["cached_tokens"].to_list() == [0, 500]
    extends = [tokens for kind, _, tokens, _ in _steps(result) if kind == "extend"]
    assert extends == [256, 249, 256, 44]
    assert _extends(result) == [[[256, 0]], [[249, 256]], [[256, 500]], [[44, 756]]]


@pytest.mark.parametrize(("overlap", "cached"), [(False, [0, 200, 200]), (True, [0, 0, 200])])
def test_a_prefill_hits_what_its_scheduler_has_seen(overlap: bool, cached: list[int]) -> None:
    """An overlapped scheduler decides the second batch before the first one's result is there."""
    requests = [Request(i, 0.0, prompt((1, 200), (10 + i, 10)), 5) for i in range(3)]
    config = tiny(chunked_prefill_size=210, size_tokens=5000, overlap_schedule=overlap)
    assert run(requests, config).requests["cached_tokens"].to_list() == cached


@pytest.mark.parametrize(("overlap", "cached"), [(False, 119), (True, 120)])
def test_an_answer_is_cached_with_its_prompt(overlap: bool, cached: int) -> None:
    """The last token has KV only if an overlapped scheduler has run the row once more."""
    requests = [
        Request(0, 0.0, prompt((1, 100)), 20, output_segment=7),
        Request(1, 1e-3, prompt((1, 100), (7, 20), (2, 30)), 5),
    ]
    result = run(requests, tiny(overlap_schedule=overlap))
    assert result.requests["cached_tokens"].to_list() == [0, cached]


def test_the_last_prompt_token_is_always_computed() -> None:
    requests = [Request(i, i * 1e-3, prompt((1, 100)), 2) for i in range(2)]
    result = run(requests, tiny())
    assert result.requests["cached_tokens"].to_list() == [0, 99]


# ---------------------------------------------------------------------- eviction


@pytest.mark.parametrize("overlap", [False, True])
def test_what_finished_first_is_evicted_first(overlap: bool) -> None:
    """Request 0 came before 1 but ended after it, so 1's prompt goes when 2 needs room."""
    requests = [
        Request(0, 0.0, prompt((1, 200)), 100),
        Request(1, 40e-6, prompt((2, 200)), 2),
        Request(2, 1e-3, prompt((3, 500)), 10),
        Request(3, 2e-3, prompt((1, 200), (4, 1)), 2),
        Request(4, 3e-3, prompt((2, 200), (5, 1)), 2),
    ]
    result = run(requests, tiny(overlap_schedule=overlap, chunked_prefill_size=8192))
    assert result.requests["cached_tokens"].to_list() == [0, 0, 0, 200, 0]


def test_no_more_is_evicted_than_needed() -> None:
    """Three prompts of 150 are cached; 560 more tokens fit when one of them goes."""
    requests = [lone(i, i * 1e-3, 150, 1) for i in range(3)]
    requests.append(lone(3, 3e-3, 560, 2))
    result = run(requests, tiny(chunked_prefill_size=8192))
    assert result.steps["evictions"].to_list() == [0, 0, 0, 1, 0]


# ---------------------------------------------------------------------- retraction

# Three rows on 300 slots: request 0 has two tokens out when 1 and 2 have one. 139 slots are free
# then, so 46 steps of three rows run before the pool is short.
_TIGHT = [lone(0, 0.0, 100, 150), lone(1, 20.5e-6, 20, 100), lone(2, 21.5e-6, 40, 100)]
_SHORT_AT_S = (20 + 1 + 12 + 14 + 46) * 1e-6


def _tight(**changes: object) -> ServerConfig:
    return tiny(size_tokens=300, schedule_conservativeness=0.0, **changes)


def test_the_shortest_output_and_then_the_longest_prompt_is_retracted() -> None:
    bench = Bench(_TIGHT, _tight()).run(_SHORT_AT_S + 0.5e-6)
    assert [s.request.request_id for s in bench.engine.scheduler.waiting] == [2]
    assert bench.engine.scheduler.waiting[0].generated == 47
    bench.run()
    assert [state.status.value for state in bench.ended] == ["finished"] * 3


def test_a_retraction_sets_the_new_token_ratio() -> None:
    """(written + 20 a row) / (wanted + 1) over the rows that stay; no decay in that step."""
    bench = Bench(_TIGHT, _tight()).run(_SHORT_AT_S - 0.5e-6)
    ratio = bench.engine.scheduler.ratio
    assert ratio.value == 0.0
    bench.run(_SHORT_AT_S + 0.5e-6)
    expected = (48 + 47 + 2 * 20) / (150 + 100 + 1)
    assert ratio.value == expected
    bench.run(_SHORT_AT_S + 1.5e-6)
    assert ratio.value == expected


def test_a_retracted_request_is_prefilled_with_its_own_output() -> None:
    """Request 2 comes back with 47 tokens of its own, when its 40 of prompt have been evicted;
    request 1, sent back later with 90, finds its prompt cached. First tokens stay where they were.
    """
    result = run(_TIGHT, _tight())
    assert _us(result, "first_token_s") == [20, 33, 47]
    assert [tokens for kind, _, tokens, _ in _steps(result) if kind == "extend"][3:] == [87, 90]
    assert result.requests["output_tokens"].to_list() == [150, 100, 100]


def test_an_overlapped_scheduler_loses_the_token_it_has_not_seen() -> None:
    plain = Bench(_TIGHT, _tight(overlap_schedule=True))
    while not any(state.generated for state in plain.engine.scheduler.waiting):
        plain.env.step()
    state = next(state for state in plain.engine.scheduler.waiting if state.generated)
    written = 1 + plain.pools.batch.step - state.join_step
    assert state.generated == written - 1


def test_retraction_stops_when_one_step_fits() -> None:
    """Of eight equal rows as many go as are needed, and all requests end in the end."""
    requests = [lone(i, 13e-6 * i, 20, 120) for i in range(8)]
    bench = Bench(requests, tiny(size_tokens=900, schedule_conservativeness=0.0))
    scheduler = bench.engine.scheduler
    while not any(state.generated for state in scheduler.waiting):
        bench.env.step()
    back = [state for state in scheduler.waiting if state.generated]
    assert len(back) == 1
    bench.run()
    assert sorted(s.request.request_id for s in bench.ended) == list(range(8))


# ---------------------------------------------------------------------- new_token_ratio


def test_the_new_token_ratio_decays_to_its_floor() -> None:
    ratio = NewTokenRatio(1.0)
    value = first = INIT_NEW_TOKEN_RATIO
    floor = first * MIN_NEW_TOKEN_RATIO_FACTOR
    for _ in range(NEW_TOKEN_RATIO_DECAY_STEPS + 5):
        assert ratio.value == pytest.approx(value, abs=1e-12)
        ratio.decay(1)
        value = max(value - (first - floor) / NEW_TOKEN_RATIO_DECAY_STEPS, floor)
    assert ratio.value == floor


def test_the_new_token_ratio_is_capped_at_one() -> None:
    assert NewTokenRatio(2.0).value == 1.0
    assert NewTokenRatio(0.0).value == 0.0


def test_many_decays_at_once_give_the_bits_of_single_ones() -> None:
    singly, at_once = NewTokenRatio(0.9), NewTokenRatio(0.9)
    for _ in range(137):
        singly.decay(1)
    at_once.decay(137)
    assert singly.value == at_once.value


def test_an_idle_server_starts_again_with_the_first_ratio() -> None:
    bench = Bench([lone(0, 0.0, 10, 200)], tiny(exact=True))
    bench.run(100.5e-6)
    ratio = bench.engine.scheduler.ratio
    assert ratio.value == pytest.approx(0.7 - 89 * (0.7 - 0.098) / 600)
    bench.run()
    assert ratio.value == ratio.first


# ---------------------------------------------------------------------- graph buckets


@pytest.mark.parametrize(
    ("rows", "padded"), [(1, 1), (3, 4), (9, 12), (13, 16), (17, 24), (300, 300)]
)
def test_rows_are_padded_to_the_next_graph(rows: int, padded: int) -> None:
    config = tiny(size_tokens=100_000, chunked_prefill_size=8192, max_prefill_tokens=16384)
    assert config.padded_rows(rows) == padded
    result = run([lone(i, 0.0, 10, 3) for i in range(rows)], config, constant_cost())
    decode = result.steps.filter(result.steps["kind"] == "decode")
    assert decode.select("rows", "padded_rows").rows()[0] == (rows, padded)


def test_without_graphs_nothing_is_padded() -> None:
    assert tiny(graph_batch_sizes=()).padded_rows(3) == 3
