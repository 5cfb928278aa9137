"""Generators: exact counts and lengths, no accidental sharing, independent streams, laws."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from trace_support import shared_tokens

from granikv.core.errors import ConfigError
from granikv.traces.generate import generate
from granikv.traces.segments import is_private
from granikv.traces.spec import WorkloadSpec, burst_grid_point
from granikv.traces.tables import load_table

POISSON = {"kind": "poisson", "rate_per_s": 10.0}


def spec(**fields):
    base = {"requests": 100, "arrivals": POISSON, "private_tokens": 50, "output_tokens": 20}
    return WorkloadSpec.model_validate(base | fields)


def trace(seed=0, **fields):
    return list(generate(spec(**fields), seed))


def level(count, tokens, **more):
    return {"count": count, "tokens": tokens, **more}


@pytest.mark.parametrize(("prefix", "rows"), [(512, 8), (16_384, 256), (1_001, 7)])
def test_a_grid_point_is_one_burst_behind_one_prefix(prefix, rows):
    requests = list(generate(burst_grid_point(prefix, rows, private_tokens=31, output_tokens=9), 0))
    assert len(requests) == rows
    assert {r.arrival_s for r in requests} == {0.0}
    assert {(r.prompt_tokens, r.output_tokens, r.prefix_tokens) for r in requests} == {
        (prefix + 31, 9, prefix)
    }
    assert shared_tokens(requests[0].prompt, requests[-1].prompt) == prefix


@given(
    count=st.integers(1, 40),
    prefixes=st.integers(1, 7),
    tokens=st.integers(1, 1_001),
    private=st.integers(1, 129),
    popularity=st.sampled_from(["even", "uniform"]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_counts_and_lengths_are_exact(count, prefixes, tokens, private, popularity, seed):
    requests = trace(
        seed,
        requests=count,
        prefixes=[level(prefixes, tokens, popularity={"kind": popularity})],
        private_tokens=private,
    )
    assert len(requests) == count
    assert [request.request_id for request in requests] == list(range(count))
    assert all(request.prompt_tokens == tokens + private for request in requests)
    assert all(request.prefix_tokens == tokens for request in requests)
    times = [request.arrival_s for request in requests]
    assert times == sorted(times)
    for left, right in itertools.combinations(requests, 2):
        same = left.prompt[0] == right.prompt[0]
        assert shared_tokens(left.prompt, right.prompt) == (tokens if same else 0)
    if popularity == "even":
        shares = Counter(request.prompt[0].segment for request in requests).values()
        assert max(shares) - min(shares) <= 1
        assert len(shares) == min(count, prefixes)


def test_the_same_seed_gives_the_same_trace():
    fields = {
        "prefixes": [
            level(5, {"kind": "uniform", "low": 100, "high": 200}, popularity={"kind": "uniform"})
        ],
        "private_tokens": {"kind": "lognormal", "median": 50, "sigma": 1.0, "largest": 500},
    }
    assert trace(7, **fields) == trace(7, **fields)
    assert trace(7, **fields) != trace(8, **fields)


def test_changing_one_setting_leaves_the_other_draws_alone():
    base = {
        "prefixes": [level(5, 100, popularity={"kind": "uniform"})],
        "private_tokens": {"kind": "uniform", "low": 1, "high": 100},
        "output_tokens": {"kind": "uniform", "low": 1, "high": 100},
    }

    def columns(**change):
        requests = trace(3, **(base | change))
        return {
            "arrivals": [r.arrival_s for r in requests],
            "choice": [r.prompt[0].segment for r in requests],
            "private": [r.prompt[-1].length for r in requests],
            "output": [r.output_tokens for r in requests],
        }

    before = columns()
    for changed, change in {
        "arrivals": {"arrivals": {"kind": "gamma", "rate_per_s": 10.0, "burstiness": 0.3}},
        "choice": {"prefixes": [level(5, 100, popularity={"kind": "zipf", "exponent": 2.0})]},
        "private": {"private_tokens": 5},
        "output": {"output_tokens": {"kind": "uniform", "low": 1, "high": 50}},
    }.items():
        after = columns(**change)
        assert [name for name in before if before[name] != after[name]] == [changed]
    # Equal laws on two streams are not the same numbers.
    assert before["private"] != before["output"]


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        (POISSON, 1.0),
        ({"kind": "gamma", "rate_per_s": 10.0, "burstiness": 0.25}, 2.0),
        ({"kind": "gamma", "rate_per_s": 10.0, "burstiness": 4.0}, 0.5),
    ],
)
def test_gaps_have_the_asked_mean_and_spread(arrivals, cv):
    times = np.array([r.arrival_s for r in trace(1, requests=40_000, arrivals=arrivals)])
    gaps = np.diff(times)
    # Five standard errors of the mean.
    assert abs(gaps.mean() - 0.1) < 5 * 0.1 * cv / np.sqrt(len(gaps))
    assert abs(gaps.std() / gaps.mean() - cv) < 0.1 * cv
    assert times[0] > 0


def test_constant_and_burst_arrivals():
    regular = trace(arrivals={"kind": "constant", "rate_per_s": 3.0}, requests=5_000)
    assert [r.arrival_s for r in regular] == [index / 3.0 for index in range(5_000)]
    bursts = trace(arrivals={"kind": "burst", "size": 3, "period_s": 2.5}, requests=7)
    assert [r.arrival_s for r in bursts] == [0.0, 0.0, 0.0, 2.5, 2.5, 2.5, 5.0]


def test_zipf_popularity_and_weights():
    zipf = trace(
        requests=30_000, prefixes=[level(4, 10, popularity={"kind": "zipf", "exponent": 1.0})]
    )
    counts = [count for _, count in sorted(Counter(r.prompt[0].segment for r in zipf).items())]
    expected = np.array([1, 1 / 2, 1 / 3, 1 / 4]) / (25 / 12) * 30_000
    assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected))
    weighted = trace(
        requests=30_000,
        prefixes=[level(3, 10, popularity={"kind": "weights", "weights": [8, 1, 1]})],
    )
    share = Counter(r.prompt[0].segment for r in weighted).most_common(1)[0][1] / 30_000
    assert abs(share - 0.8) < 5 * np.sqrt(0.8 * 0.2 / 30_000)


def test_prefix_lengths_equal_given_zipf_and_drawn():
    def lengths(tokens):
        requests = trace(prefixes=[level(4, tokens)])
        return [request.prompt[0].length for request in requests[:4]]

    assert lengths(7) == [7, 7, 7, 7]
    assert lengths([40, 30, 20, 10]) == [40, 30, 20, 10]
    assert lengths({"kind": "zipf", "largest": 1_200, "exponent": 1.0}) == [1_200, 600, 400, 300]
    drawn = lengths({"kind": "uniform", "low": 100, "high": 10_000})
    assert len(set(drawn)) == 4
    assert all(100 <= length <= 10_000 for length in drawn)


def test_nested_prefixes_share_by_level():
    requests = trace(
        requests=24,
        prefixes=[level(1, 1_000), level(2, 200), level(2, 30)],
    )
    assert {len(request.prompt) for request in requests} == {4}
    assert {request.prefix_tokens for request in requests} == {1_230}
    common = {
        shared_tokens(left.prompt, right.prompt)
        for left, right in itertools.combinations(requests, 2)
    }
    assert common == {1_000, 1_200, 1_230}
    leaves = Counter(request.prompt[2].segment for request in requests)
    assert sorted(leaves.values()) == [6, 6, 6, 6]
    uniform = {"kind": "uniform"}
    mixed = trace(
        requests=60,
        prefixes=[
            level(1, 1_000),
            level(2, 200, popularity=uniform),
            level(3, 30, popularity=uniform),
        ],
    )
    common = {
        shared_tokens(left.prompt, right.prompt) for left, right in itertools.combinations(mixed, 2)
    }
    assert common == {1_000, 1_200, 1_230}
    assert len({request.prompt[2].segment for request in mixed}) == 6


def test_a_drifting_set_is_replaced_while_the_level_above_stays():
    requests = trace(
        requests=400,
        arrivals={"kind": "constant", "rate_per_s": 10.0},
        prefixes=[level(1, 512), level(2, 512, period_s=10.0)],
    )
    sets = {}
    for request in requests:
        sets.setdefault(int(request.arrival_s // 10), set()).add(request.prompt[1].segment)
    assert [len(segments) for segments in sets.values()] == [2, 2, 2, 2]
    assert len(set.union(*sets.values())) == 8
    assert len({request.prompt[0].segment for request in requests}) == 1


def test_a_level_below_a_drifting_one_drifts_with_it():
    requests = trace(
        requests=20,
        arrivals={"kind": "constant", "rate_per_s": 1.0},
        prefixes=[level(1, 5, period_s=10.0), level(1, 6)],
    )
    assert len({request.prompt[1].segment for request in requests}) == 2


@pytest.mark.parametrize("wanted", [1, 9, 10, 11])
def test_conversations_repeat_their_history(wanted):
    requests = trace(
        requests=wanted,
        prefixes=[level(2, 1_000)],
        conversation={"turns": 3, "user_tokens": 11, "think_s": 4.0, "think": "constant"},
    )
    assert len(requests) == wanted
    for index, request in enumerate(requests):
        turn = index % 3
        assert request.session == f"s{index // 3}"
        assert request.prefix_tokens == 1_000
        assert request.prompt_tokens == 1_000 + 50 + turn * (20 + 11)
        if not turn:
            assert (request.after, request.think_s) == (None, 0.0)
            continue
        before = requests[index - 1]
        assert (request.after, request.think_s) == (before.request_id, 4.0)
        assert request.arrival_s == before.arrival_s
        assert request.prompt[: len(before.prompt)] == before.prompt
        answer = request.prompt[len(before.prompt)]
        assert (answer.segment, answer.length) == (before.output_segment, before.output_tokens)
    for left, right in itertools.combinations(requests, 2):
        if left.session != right.session:
            assert shared_tokens(left.prompt, right.prompt) in (0, 1_000)


def test_think_times_are_exponential():
    requests = trace(requests=20_000, conversation={"turns": 2, "user_tokens": 1, "think_s": 4.0})
    pauses = np.array([r.think_s for r in requests if r.after is not None])
    assert abs(pauses.mean() - 4.0) < 5 * 4.0 / np.sqrt(len(pauses))
    assert abs(pauses.std() / pauses.mean() - 1.0) < 0.1


def test_length_laws():
    drawn = trace(
        requests=20_000,
        private_tokens={"kind": "lognormal", "median": 600, "sigma": 0.5, "largest": 2_000},
        output_tokens={"kind": "uniform", "low": 3, "high": 5},
    )
    private = np.array([r.prompt_tokens for r in drawn])
    assert abs(np.median(private) - 600) < 20
    assert private.max() == 2_000
    assert abs(np.log(private[private < 2_000]).std() - 0.5) < 0.05
    assert set(Counter(r.output_tokens for r in drawn)) == {3, 4, 5}


def test_a_table_gives_whole_rows():
    table = load_table("sharegpt-llama-3.1-8b")
    pairs = set(zip(table.prompt.tolist(), table.output.tolist(), strict=True))
    column = {"kind": "table", "table": "sharegpt-llama-3.1-8b"}
    drawn = trace(
        requests=5_000,
        private_tokens=column | {"column": "prompt"},
        output_tokens=column | {"column": "output"},
    )
    found = {(r.prompt_tokens, r.output_tokens) for r in drawn}
    assert found <= pairs
    assert len(found) > 250


def test_a_table_can_be_the_users_own(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n7,3\n")
    column = {"kind": "table", "table": str(path)}
    (request,) = trace(requests=1, private_tokens=column | {"column": "prompt"})
    assert request.prompt_tokens == 7
    path.write_text("num_prefill_tokens,num_decode_tokens\n0,3\n")
    with pytest.raises(ConfigError, match="below 1"):
        load_table(str(path))
    with pytest.raises(ConfigError, match="neither a shipped table"):
        load_table("no-such-table")


def test_generation_is_lazy():
    endless = generate(spec(requests=10**12, prefixes=[level(2, 5)]), 0)
    assert [next(endless).request_id for _ in range(3)] == [0, 1, 2]


def test_single_requests_end_in_a_private_run():
    requests = trace(prefixes=[level(3, 10)])
    private = [request.prompt[-1].segment for request in requests]
    assert all(is_private(segment) for segment in private)
    assert len(set(private)) == len(requests)


@pytest.mark.parametrize(
    "fields",
    [
        {"requests": 0},
        {"arrivals": {"kind": "poisson", "rate_per_s": 0.0}},
        {"arrivals": {"kind": "sometimes"}},
        {"prefixes": [level(2, [5])]},
        {"prefixes": [level(2, 5, popularity={"kind": "weights", "weights": [1.0]})]},
        {"prefixes": [level(3_000, 5), level(3_000, 5)]},
        {"private_tokens": 0},
        {"private_tokens": {"kind": "uniform", "low": 5, "high": 4}},
        {"typo": 1},
    ],
)
def test_bad_specs_are_refused(fields):
    with pytest.raises(ValidationError):
        spec(**fields)
