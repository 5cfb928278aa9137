"""What is sent: lengths as asked for, the same for the same seed, shared exactly where said."""

import csv
import json
from itertools import pairwise, takewhile
from pathlib import Path

import numpy as np
import pytest

from granikv.core.errors import TraceFormatError
from granikv.traces.segments import private_segment
from granikv.validate import workloads


def common(one: list[int], other: list[int]) -> int:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in pairs)


def test_batch_has_its_prefixes_and_nothing_else_in_common():
    sent = workloads.batch([(100, 3), (40, 2)], 64, workloads.rng_of(1, "cell"))
    assert [len(prefix) for prefix in sent.prefixes] == [100, 40]
    assert sorted(len(prompt) for prompt in sent.prompts) == [104, 104, 164, 164, 164]
    for number, one in enumerate(sent.prompts):
        for other in sent.prompts[:number]:
            is_same = len(one) == len(other)
            assert common(one, other) == ((len(one) - 64) if is_same else 0)


def test_a_batch_without_a_prefix_shares_nothing():
    sent = workloads.batch([(0, 4)], 512, workloads.rng_of(1, "unshared-x4"))
    assert sent.prefixes == []
    assert [len(prompt) for prompt in sent.prompts] == [512] * 4
    assert len({prompt[0] for prompt in sent.prompts}) == 4


def test_seed_and_name_decide_every_token():
    def draw(seed: int, name: str) -> workloads.Batch:
        return workloads.batch([(10, 2)], 5, workloads.rng_of(seed, name))

    assert draw(1, "a") == draw(1, "a")
    assert draw(1, "a") != draw(1, "b")
    assert draw(1, "a") != draw(2, "a")


def test_poisson_takes_its_lengths_from_the_file_and_counts_what_it_cuts():
    made = workloads.arrivals((50,), 2000, 8.0, 600, workloads.rng_of(3, "poisson"))
    with workloads.SHAREGPT.open() as file:
        rows = list(csv.DictReader(file))
    known = {int(row["num_prefill_tokens"]) for row in rows}
    assert len({tuple(r.input_ids[:50]) for r in made.requests}) == 1
    assert {len(r.input_ids) - 50 for r in made.requests} <= known
    mean = np.mean([int(row["num_prefill_tokens"]) for row in rows])
    own = [len(r.input_ids) - 50 for r in made.requests]
    assert np.mean(own) == pytest.approx(mean, rel=0.05)
    assert max(r.output_tokens for r in made.requests) == 600
    assert made.clamped_outputs == pytest.approx(
        2000 * np.mean([int(row["num_decode_tokens"]) > 600 for row in rows]), rel=0.1
    )


def test_poisson_arrives_at_its_rate():
    made = workloads.arrivals((0,), 4000, 8.0, 1, workloads.rng_of(4, "p"))
    times = [r.arrival_s for r in made.requests]
    gaps = np.diff(times)
    assert (gaps > 0).all()
    assert np.mean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert np.std(gaps) == pytest.approx(1 / 8, rel=0.1)


def test_requests_spread_evenly_over_prefixes_in_random_order():
    made = workloads.arrivals((100, 40, 70), 300, None, 1, workloads.rng_of(5, "m"))
    assert made.rows == [100, 100, 100]
    assert {r.arrival_s for r in made.requests} == {0.0}
    order = [r.prompt[0] for r in made.requests]
    assert set(order) == {(0, 100), (1, 40), (2, 70)}
    turns = sum(one == other for one, other in pairwise(order))
    assert 60 < turns < 140  # a third of 299, not 0 as in turn


def test_runs_say_what_is_shared():
    made = workloads.arrivals((60, 30), 40, None, 1, workloads.rng_of(6, "m"))
    for number, one in enumerate(made.requests):
        assert sum(length for _, length in one.prompt) == len(one.input_ids)
        assert one.prompt[1][0] == private_segment(one.request_id)
        for other in made.requests[:number]:
            is_same = one.prompt[0] == other.prompt[0]
            assert common(one.input_ids, other.input_ids) == (one.prompt[0][1] if is_same else 0)


def test_burst_arrives_at_once():
    sent = workloads.batch([(3, 2)], 2, workloads.rng_of(0, "b"))
    requests = list(workloads.burst(sent, 7, arrival_s=2.5))
    assert [r.input_ids for r in requests] == sent.prompts
    assert {(r.arrival_s, r.output_tokens) for r in requests} == {(2.5, 7)}


def test_segments_of_a_plain_trace_are_streams_with_a_name():
    rows = [
        {"id": 7, "arrival_s": 0.0, "prompt": [[5, 30], [9, 4]], "output_tokens": 3},
        {"id": 8, "arrival_s": 1.5, "prompt": [[5, 50]], "output_tokens": 1, "session": "s"},
    ]
    first, second = workloads.from_lines((json.dumps(row) for row in rows), seed=2)
    assert (first.request_id, first.session, first.output_tokens) == (7, None, 3)
    assert (second.arrival_s, second.session) == (1.5, "s")
    assert common(first.input_ids, second.input_ids) == 30
    assert (len(first.input_ids), len(second.input_ids)) == (34, 50)
    assert (first.prompt, second.prompt) == (((5, 30), (9, 4)), ((5, 50),))


@pytest.mark.parametrize("line", ["{", '{"id": 1}', "[]", '{"id": 1, "prompt": 3}'])
def test_a_bad_line_is_named(line: str, tmp_path: Path):
    with pytest.raises(TraceFormatError, match="trace, line 2"):
        list(workloads.from_lines(["", line], seed=0))
