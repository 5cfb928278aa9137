"""Workloads whose mix changes: when phases play, who shares prefixes, and files that cannot be."""

from itertools import pairwise

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_support import shared_tokens

from granikv.core.errors import ConfigError
from granikv.traces.phases import generate_phases
from granikv.traces.readers.workload import load_workload, requests_of
from granikv.traces.spec import PhasedSpec, WorkloadSpec

PREFIXES = [{"count": 1, "tokens": 500}]


def phase(seconds=10.0, **fields):
    """Ten requests of 550 tokens, one a second, behind a prefix of 500."""
    arrivals = {"kind": "constant", "rate_per_s": 1.0}
    base = {"arrivals": arrivals, "prefixes": PREFIXES, "private_tokens": 50, "output_tokens": 5}
    return {**base, "seconds": seconds, **fields}


def trace(*parts, seed=0, **fields):
    spec = PhasedSpec.model_validate({"phases": list(parts), **fields})
    return list(generate_phases(spec, seed))


def arrivals(requests):
    return [request.arrival_s for request in requests]


def test_phases_follow_one_another():
    requests = trace(phase(3.0), phase(2.0, private_tokens=70))
    assert arrivals(requests) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [request.prompt_tokens for request in requests] == [550] * 3 + [570] * 2
    assert [request.request_id for request in requests] == [0, 1, 2, 3, 4]


def test_phases_may_overlap_and_leave_gaps():
    requests = trace(phase(2.0, start_s=0.5), phase(2.0, start_s=0.0), phase(1.0, start_s=9.0))
    assert arrivals(requests) == [0.0, 0.5, 1.0, 1.5, 9.0]


def test_a_phase_without_a_start_begins_where_the_one_written_before_it_ends():
    assert arrivals(trace(phase(1.0, start_s=5.0), phase(1.0))) == [5.0, 6.0]


def test_a_repetition_begins_at_the_end_of_the_latest_phase():
    requests = trace(phase(4.0), phase(1.0, start_s=1.5), repeat=2)
    once = [0.0, 1.0, 1.5, 2.0, 3.0]
    assert arrivals(requests) == [*once, *(4.0 + at_s for at_s in once)]


def test_phases_share_no_prefix_and_repetitions_neither():
    requests = trace(phase(2.0), phase(2.0), repeat=2)
    sets = [requests[i : i + 2] for i in range(0, 8, 2)]
    for first, second in sets:
        assert shared_tokens(first.prompt, second.prompt) == 500
    for one, other in pairwise(sets):
        assert shared_tokens(one[0].prompt, other[0].prompt) == 0


def test_a_tenant_comes_back_with_its_prefixes():
    requests = trace(phase(1.0, tenant="a"), phase(1.0, tenant="b"), phase(1.0, tenant="a"))
    first, other, again = (request.prompt for request in requests)
    assert shared_tokens(first, again) == 500
    assert shared_tokens(first, other) == 0


def test_drawn_lengths_of_a_tenant_s_prefixes_stay():
    drawn = [{"count": 1, "tokens": {"kind": "uniform", "low": 100, "high": 9000}}]
    parts = [phase(1.0, tenant="a", prefixes=drawn) for _ in range(4)]
    assert len({request.prompt_tokens for request in trace(*parts)}) == 1


def test_turns_wait_for_the_turn_before_them_in_their_own_phase():
    talk = {"turns": 3, "user_tokens": 10, "think_s": 1.0}
    requests = trace(phase(2.0, conversation=talk), phase(2.0, start_s=0.25, conversation=talk))
    later = [request for request in requests if request.after is not None]
    assert len(later) == 8
    for request in later:
        before = requests[request.after]
        assert before.session == request.session
        assert shared_tokens(before.prompt, request.prompt) == before.prompt_tokens


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 5.0), st.floats(0.0, 9.0)), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(0, 2**32),
)
def test_traces_are_in_order_numbered_through_and_the_same_again(parts, repeat, seed):
    poisson = {"kind": "poisson", "rate_per_s": 8.0}
    phases = [phase(seconds, start_s=at_s, arrivals=poisson) for seconds, at_s in parts]
    requests = trace(*phases, seed=seed, repeat=repeat)
    times = arrivals(requests)
    assert times == sorted(times)
    assert [request.request_id for request in requests] == list(range(len(requests)))
    private = [request.prompt[-1].segment for request in requests]
    assert len(set(private)) == len(private)
    assert requests == trace(*phases, seed=seed, repeat=repeat)


# ---------------------------------------------------------------------- files


def written(tmp_path, document):
    path = tmp_path / "load.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def test_a_file_with_phases_is_played(tmp_path):
    spec = load_workload(written(tmp_path, {"phases": [phase(3.0)], "repeat": 2}))
    assert isinstance(spec, PhasedSpec)
    assert arrivals(requests_of(spec, 0)) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_file_without_phases_is_one_mix(tmp_path):
    mix = phase() | {"requests": 4}
    del mix["seconds"]
    spec = load_workload(written(tmp_path, mix))
    assert isinstance(spec, WorkloadSpec)
    assert len(list(requests_of(spec, 0))) == 4


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({"phases": []}, "phases: List should have at least 1 item"),
        ({"phases": [phase(0.0)]}, r"phases\.0\.seconds: Input should be greater than 0"),
        ({"phases": [phase(start_s=-1.0)]}, r"phases\.0\.start_s: Input should be greater than"),
        ({"phases": [phase()], "repeat": 0}, "repeat: Input should be greater than or equal to 1"),
        ({"phases": [phase()], "repeats": 2}, "unknown key repeats, did you mean repeat"),
        ({"phases": [phase(tenent="a")]}, "unknown key phases.0.tenent, did you mean tenant"),
        ({"phases": [phase()], "repeat": 1025}, "phases times repeat must be at most 1024"),
        (
            {"phases": [phase(tenant="a"), phase(tenant="a", prefixes=[])]},
            "phases of tenant 'a' must state the same prefixes",
        ),
        (
            {"phases": [phase(2000.0, prefixes=[{"count": 1, "tokens": 9, "period_s": 1.0}])]},
            "a phase must have at most 1024 periods of a prefix level",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(tmp_path, document, sentence):
    with pytest.raises(ConfigError, match=sentence) as refused:
        load_workload(written(tmp_path, document))
    assert "\n" not in str(refused.value)
    assert str(refused.value).endswith("; see docs/traces.md for the fields.")
