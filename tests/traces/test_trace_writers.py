"""Canonical files round-trip exactly; Mooncake files say the same to other tools."""

import gzip
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from granikv.core.errors import TraceFormatError
from granikv.traces import ReadOptions, Request, Run, open_trace
from granikv.traces.generate import generate
from granikv.traces.spec import WorkloadSpec
from granikv.traces.stats import trace_info
from granikv.traces.tables import DATA
from granikv.traces.transform import TransformOptions, apply
from granikv.traces.writers import write_mooncake, write_trace

RUN = st.builds(Run, st.integers(0, 2**63 - 1), st.integers(1, 200_000))
TIME = st.floats(0, 1e7, allow_nan=False)


@st.composite
def traces(draw):
    requests = []
    names = st.none() | st.text(max_size=5)
    for time in sorted(draw(st.lists(TIME, min_size=1, max_size=8))):
        prompt = tuple(draw(st.lists(RUN, min_size=1, max_size=5)))
        after = draw(st.none() | st.sampled_from([r.request_id for r in requests] or [None]))
        requests.append(
            Request(
                request_id=3 * len(requests) + draw(st.integers(0, 2)),
                arrival_s=time,
                prompt=prompt,
                output_tokens=draw(st.integers(1, 10_000)),
                session=draw(names),
                after=after,
                think_s=0.0 if after is None else draw(TIME),
                output_segment=draw(st.none() | st.integers(0, 2**63 - 1)),
                prefix_tokens=draw(st.integers(0, sum(run.length for run in prompt))),
            )
        )
    return requests


@given(traces(), st.sampled_from(["trace", "trace.gz"]))
@settings(max_examples=150, deadline=None)
def test_round_trip_is_exact(requests, name):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        assert write_trace(requests, path) == len(requests)
        source = open_trace(path)
        assert list(source) == requests
        assert source.format == "canonical"


@pytest.mark.parametrize("name", ["mooncake-conversation.jsonl.gz", "agents.yaml"])
def test_shipped_traces_round_trip(tmp_path, name):
    path = tmp_path / "copy.jsonl.gz"
    source = open_trace(DATA / name)
    write_trace(source, path)
    assert list(open_trace(path)) == list(source)


def test_agent_conversations_round_trip(data, tmp_path):
    for folder in ("weka", "ragpulse"):
        path = tmp_path / folder
        source = open_trace(data / folder)
        write_trace(source, path)
        assert list(open_trace(path)) == list(source)


def test_times_without_a_millisecond_twin_round_trip(tmp_path):
    times = [0.1 + 0.2, 1.0000000000000002, 41707.95675395795, 86_399.999_999_9]
    requests = [Request(i, time, (Run(1, 5),), 1) for i, time in enumerate(sorted(times))]
    path = tmp_path / "t"
    write_trace(requests, path)
    assert [request.arrival_s for request in open_trace(path)] == sorted(times)


def test_a_cut_is_read_transform_write(tmp_path):
    source = open_trace(DATA / "mooncake-conversation.jsonl.gz")
    path = tmp_path / "cut.jsonl"
    options = TransformOptions(start_s=60.0, end_s=120.0, speedup=2.0)
    written = write_trace(apply(source, options), path)
    kept = list(open_trace(path))
    assert written == len(kept) > 100
    assert kept[0].arrival_s == 0.0
    assert 25 < kept[-1].arrival_s < 30
    rows = [r for r in source if 60.0 <= r.arrival_s < 120.0]
    assert [r.prompt for r in kept] == [r.prompt for r in rows]


def test_rows_have_the_keys_that_other_tools_read(tmp_path):
    path = tmp_path / "t.gz"
    write_trace([Request(0, 1.5, (Run(7, 512), Run(9, 88)), 3)], path)
    with gzip.open(path, "rt") as lines:
        header, row = map(json.loads, lines)
    assert header == {"format": "granikv-trace", "version": 1, "timestamp_unit": "ms"}
    assert row == {
        "timestamp": 1500,
        "input_length": 600,
        "output_length": 3,
        "hash_ids": [7, 9],
        "run_lengths": [512, 88],
        "request_id": 0,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run_lengths": [512]}, "row 2, run_lengths"),
        ({"run_lengths": [512, 89]}, "row 2, run_lengths"),
        ({"run_lengths": [512, "88"]}, "row 2, run_lengths"),
        ({"run_lengths": [600, 0]}, "row 2, run_lengths"),
        ({"hash_ids": ["7", 9]}, "row 2, hash_ids"),
        ({"after": "x"}, "row 2, after"),
        ({"think_s": "x"}, "row 2, think_s"),
        ({"prefix_tokens": 1.5}, "row 2, prefix_tokens"),
        ({"output_segment": "a"}, "row 2, output_segment"),
        ({"session_id": 5}, "row 2, session_id"),
        ({"arrival_s": "x"}, "row 2, arrival_s"),
        ({"request_id": None}, "row 2, request_id"),
    ],
)
def test_bad_canonical_rows_are_named(write, change, message):
    row = {
        "timestamp": 0,
        "input_length": 600,
        "output_length": 3,
        "hash_ids": [7, 9],
        "run_lengths": [512, 88],
        "request_id": 0,
        "after": 0,
    }
    path = write([{"format": "granikv-trace", "version": 1}, row | change])
    with pytest.raises(TraceFormatError, match=message):
        list(open_trace(path))


def test_another_version_is_refused(write):
    path = write([{"format": "granikv-trace", "version": 2}])
    with pytest.raises(TraceFormatError, match="version: want 1, got 2"):
        list(open_trace(path))


def test_mooncake_export_of_a_mooncake_file_is_that_file(tmp_path):
    source = open_trace(DATA / "mooncake-conversation.jsonl.gz")
    path = tmp_path / "plain.jsonl"
    assert write_mooncake(source, path, 512) == 2_728
    # Ids are numbered anew, densely in order of appearance, as upstream does: the same numbers
    # come out.
    with gzip.open(DATA / "mooncake-conversation.jsonl.gz", "rt") as lines:
        for line, written in zip(lines, path.read_text().splitlines(), strict=True):
            original, exported = json.loads(line), json.loads(written)
            assert exported["hash_ids"] == original["hash_ids"]
            assert exported["input_length"] == original["input_length"]
            assert exported["timestamp"] == pytest.approx(original["timestamp"])


def test_mooncake_export_of_a_workload_shares_the_same_tokens(tmp_path):
    spec = WorkloadSpec.model_validate(
        {
            "requests": 60,
            "arrivals": {"kind": "poisson", "rate_per_s": 10},
            "prefixes": [{"count": 2, "tokens": 640}, {"count": 3, "tokens": 128}],
            "private_tokens": {"kind": "uniform", "low": 1, "high": 300},
            "output_tokens": 5,
        }
    )
    path = tmp_path / "plain.jsonl"
    write_mooncake(generate(spec, 0), path, 64)
    source = open_trace(path, options=ReadOptions(block_size=64))
    assert source.format == "mooncake"
    before, after = trace_info(generate(spec, 0)), trace_info(source)
    assert after.shared_tokens == before.shared_tokens
    assert after.prompt == before.prompt
    parents = {}
    for line in path.read_text().splitlines():
        ids = json.loads(line)["hash_ids"]
        for parent, block in zip([None, *ids], ids, strict=False):
            assert parents.setdefault(block, parent) == parent


def test_mooncake_export_refuses_what_blocks_cannot_say(tmp_path):
    requests = [Request(4, 0.0, (Run(1, 100), Run(2, 28)), 1)]
    with pytest.raises(TraceFormatError, match="request 4 has a run of 100 tokens"):
        write_mooncake(requests, tmp_path / "x", 64)
