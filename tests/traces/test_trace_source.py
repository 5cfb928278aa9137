"""open_trace: detection by content, reading twice, order, options, reports."""

import gzip
import json
import tracemalloc

import pytest

from granikv.core.errors import ConfigError, TraceFormatError
from granikv.traces import ReadOptions, open_trace
from granikv.traces.detect import FORMATS
from granikv.traces.tables import DATA
from granikv.traces.writers import write_trace


def row(timestamp, prompt=100, **more):
    return {
        "timestamp": timestamp,
        "input_length": prompt,
        "output_length": 1,
        "hash_ids": [0],
        **more,
    }


SAMPLES = {
    "mooncake": json.dumps(row(0)),
    "bailian": json.dumps(row(0, prompt=16, chat_id=1, parent_chat_id=-1, type="text", turn=1)),
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4808,10",
    "burstgpt": (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,x,4,1,5,API log\n"
    ),
    "vidur": "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,10,2\n",
    "weka": json.dumps(
        {
            "id": "c",
            "block_size": 64,
            "hash_id_scope": "local",
            "requests": [{"t": 0.0, "type": "n", "in": 64, "out": 1, "hash_ids": [1]}],
        }
    ),
    "sharegpt": (
        '[{"id": "a", "conversations": '
        '[{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}]'
    ),
    "bench_serving": json.dumps(
        {"completed": 1, "total_input_tokens": 4, "input_lens": [4], "output_lens": [1]}
    ),
    "workload": (
        "requests: 1\narrivals: {kind: constant, rate_per_s: 1}\n"
        "private_tokens: 5\noutput_tokens: 2\n"
    ),
    "canonical": (
        '{"format": "granikv-trace", "version": 1}\n'
        '{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [1], '
        '"run_lengths": [3], "request_id": 0}\n'
    ),
    "plain": '{"id": 4, "arrival_s": 2.5, "prompt": [[0, 3], [7, 2]], "output_tokens": 2}\n',
}
ASSUMED = {
    "sharegpt": ReadOptions(requests_per_s=1.0, chars_per_token=4.0),
    "bench_serving": ReadOptions(requests_per_s=1.0),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", SAMPLES)
def test_formats_are_told_apart_by_content(write, name, packed):
    path = write(SAMPLES[name], "mooncake.csv" + ".gz" * packed)
    source = open_trace(path, options=ASSUMED.get(name))
    assert source.format == name
    (request,) = source
    assert request.output_tokens >= 1
    assert list(open_trace(path, format=name, options=ASSUMED.get(name))) == [request]


def test_every_format_is_tested():
    # RAGPulse comes as a folder and has its own tests.
    assert {*SAMPLES, "ragpulse"} == set(FORMATS)


@pytest.mark.parametrize(
    "text", ["", "hello\n", "{}\n", "[1, 2]", "a,b\n1,2\n", '{"timestamp": 0}\n']
)
def test_unknown_content_is_refused(write, text):
    with pytest.raises(TraceFormatError, match="is no trace that GraniKV knows; name its format"):
        open_trace(write(text))


def test_binary_and_broken_gzip_are_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(range(128, 256)))
    (tmp_path / "b.gz").write_bytes(b"not gzip")
    for name in ("a.bin", "b.gz"):
        with pytest.raises(TraceFormatError, match="no trace"):
            open_trace(tmp_path / name)


def test_paths_that_cannot_be_read(tmp_path, data):
    with pytest.raises(TraceFormatError, match="does not exist"):
        open_trace(tmp_path / "nothing")
    with pytest.raises(TraceFormatError, match="does not exist"):
        open_trace(tmp_path / "nothing", format="mooncake")
    with pytest.raises(ConfigError, match="no trace format 'mooncakes'"):
        open_trace(data / "ragpulse", format="mooncakes")
    with pytest.raises(ConfigError, match="is a folder"):
        open_trace(data / "ragpulse", format="mooncake")
    with pytest.raises(TraceFormatError, match="folder of"):
        open_trace(data)


def test_a_source_can_be_read_again_and_again():
    source = open_trace(DATA / "mooncake-conversation.jsonl.gz")
    first = list(source)
    report = source.report
    assert first == list(source)
    assert source.report is not report
    assert source.report == report
    assert report.rows_read == report.kept == len(first) == 2_728


def test_two_iterations_at_once_do_not_disturb_each_other(write):
    source = open_trace(write([row(time) for time in range(3)]))
    pairs = list(zip(source, source, strict=True))
    assert [(left.request_id, right.request_id) for left, right in pairs] == [
        (0, 0),
        (1, 1),
        (2, 2),
    ]


def test_reading_is_lazy(write):
    path = write([row(0), row(1), {"broken": True}])
    rows = iter(open_trace(path))
    assert [next(rows).request_id, next(rows).request_id] == [0, 1]
    with pytest.raises(TraceFormatError, match="row 3"):
        next(rows)


def test_memory_does_not_grow_with_the_file(tmp_path):
    def peak_bytes(rows):
        path = tmp_path / f"{rows}.csv"
        line = "{},GPT-4,100,10,110,API log\n"
        path.write_text(
            SAMPLES["burstgpt"].split("\n")[0] + "\n" + "".join(line.format(i) for i in range(rows))
        )
        source = open_trace(path)
        tracemalloc.start()
        assert sum(1 for _ in source) == rows
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak_bytes(20_000) < 1.5 * peak_bytes(2_000)


def test_times_count_from_the_first_request(write):
    path = write([row(5_000), row(5_000), row(6_500)])
    assert [request.arrival_s for request in open_trace(path)] == [0.0, 0.0, 1.5]


def test_an_unsorted_file_is_refused_or_sorted(write):
    path = write([row(10, 100), row(30, 200), row(20, 300), row(20, 400), row(5, 500)])
    with pytest.raises(TraceFormatError, match=r"row 3, time: earlier .*; read it with sort"):
        list(open_trace(path))
    source = open_trace(path, options=ReadOptions(sort=True))
    requests = list(source)
    assert [request.prompt_tokens for request in requests] == [500, 100, 300, 400, 200]
    assert [request.arrival_s for request in requests] == [0.0, 0.005, 0.015, 0.015, 0.025]
    assert [request.request_id for request in requests] == [0, 1, 2, 3, 4]
    assert source.report.out_of_order == 2
    assert "2 out of order, sorted" in source.report.summary()


def test_sorting_keeps_turns_linked(write):
    def chat(name, parent, time):
        return row(time, prompt=16, chat_id=name, parent_chat_id=parent)

    path = write([chat(1, -1, 5.0), chat(2, 1, 8.0), chat(3, -1, 1.0)])
    requests = list(open_trace(path, options=ReadOptions(sort=True)))
    assert [(r.request_id, r.after, r.session) for r in requests] == [
        (0, None, "3"),
        (1, None, "1"),
        (2, 1, "1"),
    ]


def test_an_unlikely_rate_is_reported(write):
    times = [row(index) for index in range(10)]
    fast = open_trace(write(times), options=ReadOptions(time_unit="us"))
    list(fast)
    assert fast.report.warnings == ["1e+06 requests per second on average: check the time unit."]
    usual = open_trace(write([row(index * 500) for index in range(10)]))
    list(usual)
    assert usual.report.warnings == []


def test_empty_prompts_are_dropped_or_clamped(write):
    path = write([row(0), row(1, prompt=0, hash_ids=[])])
    source = open_trace(path)
    assert len(list(source)) == 1
    assert source.report.dropped == {"no prompt tokens": 1}
    kept = open_trace(path, options=ReadOptions(drop_failed=False))
    assert [request.prompt_tokens for request in kept] == [100, 1]
    assert kept.report.clamped == {"no prompt tokens": 1}


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 0},
        {"requests_per_s": 0.0},
        {"chars_per_token": -1.0},
        {"max_think_s": -1.0},
        {"start_spread_s": float("nan")},
        {"seed": -1},
    ],
)
def test_options_out_of_range(options):
    with pytest.raises(ValueError, match="must"):
        ReadOptions(**options)


def test_workload_files_are_traces(write):
    path = DATA / "agents.yaml"
    source = open_trace(path)
    requests = list(source)
    assert len(requests) == source.report.kept == 1_500
    assert requests == list(source)
    assert requests != list(open_trace(path, options=ReadOptions(seed=1)))
    assert {request.prefix_tokens for request in requests} == {24_576, 20_480, 16_384, 12_288}
    assert 20 < 1_500 / requests[-1].arrival_s < 28


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SAMPLES["workload"].replace("s: 1}", "s: 0}"), "arrivals.constant.rate_per_s"),
        (SAMPLES["workload"] + "privat: 1\n", "unknown key privat, did you mean private_tokens"),
        ("arrivals: [\n", "is not YAML"),
    ],
)
def test_bad_workload_files_say_where(write, text, message):
    with pytest.raises(ConfigError, match=message):
        list(open_trace(write(text), format="workload"))


def test_open_loop_of_stored_turns(write, tmp_path):
    talk = SAMPLES["workload"].replace("requests: 1", "requests: 4") + (
        "conversation: {turns: 2, user_tokens: 3, think_s: 5, think: constant}\n"
    )
    path = write(talk)
    closed = list(open_trace(path))
    assert [request.after for request in closed] == [None, 0, None, 2]
    assert [request.think_s for request in closed] == [0.0, 5.0, 0.0, 5.0]
    stored = tmp_path / "stored"
    write_trace(closed, stored)
    for source in (path, stored):
        capped = list(open_trace(source, options=ReadOptions(max_think_s=2.0)))
        assert [request.think_s for request in capped] == [0.0, 2.0, 0.0, 2.0]
        opened = list(open_trace(source, options=ReadOptions(closed_loop=False)))
        assert all(request.after is None and request.think_s == 0.0 for request in opened)


def test_plain_rows_keep_their_ids_and_times(write):
    rows = [
        json.loads(SAMPLES["plain"]),
        {**json.loads(SAMPLES["plain"]), "id": 9, "session": "u", "after": 4},
    ]
    first, second = open_trace(write(rows))
    assert (first.request_id, first.arrival_s, first.output_tokens) == (4, 2.5, 2)
    assert first.prompt == ((0, 3), (7, 2))
    assert (first.session, first.after, second.session, second.after) == (None, None, "u", 4)
    opened = list(open_trace(write(rows), options=ReadOptions(closed_loop=False)))
    assert [request.after for request in opened] == [None, None]


def test_a_truncated_gzip_is_an_error(tmp_path):
    whole = gzip.compress("".join(json.dumps(row(i)) + "\n" for i in range(5_000)).encode())
    path = tmp_path / "cut.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceFormatError, match="cannot be read to its end"):
        list(open_trace(path, format="mooncake"))


def places(value, path=()):
    """Every place inside a JSON value."""
    yield path
    if isinstance(value, dict | list):
        children = value.items() if isinstance(value, dict) else enumerate(value)
        for key, child in children:
            yield from places(child, (*path, key))


def with_value(document, path, value):
    if not path:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[path[0]] = with_value(copy[path[0]], path[1:], value)
    return copy


ODD = [None, True, -1, 0, 1.5, 10**30, float("nan"), float("inf"), "", "x", [], [None], [[]], {}]


def turn(t, **more):
    return {"t": t, "type": "n", "in": 64, "out": 1, "hash_ids": [1], "api_time": 1.0, **more}


RICH = {
    "mooncake": [
        row(0, session_id="a"),
        {"session_id": "a", "delay": 5, "input_length": 9, "output_length": 1, "hash_ids": [2]},
    ],
    "bailian": [
        row(0, prompt=16, chat_id=1, parent_chat_id=-1),
        row(1.5, prompt=16, chat_id=2, parent_chat_id=1),
    ],
    "weka": [
        {
            "id": "c",
            "block_size": 64,
            "hash_id_scope": "local",
            "requests": [
                turn(0.0),
                {"t": 3.0, "type": "subagent", "agent_id": "h", "requests": [turn(0.0)]},
                turn(9.0, think_time=2.0),
            ],
        }
    ],
    "sharegpt": [json.loads(SAMPLES["sharegpt"])],
    "bench_serving": [json.loads(SAMPLES["bench_serving"])],
    "canonical": [
        json.loads(SAMPLES["canonical"].splitlines()[0]),
        json.loads(SAMPLES["canonical"].splitlines()[1])
        | {
            "arrival_s": 0.5,
            "session_id": "a",
            "after": 0,
            "think_s": 1.5,
            "output_segment": 7,
            "prefix_tokens": 2,
        },
    ],
    "plain": [json.loads(SAMPLES["plain"]) | {"session": "a", "after": 3}],
}


@pytest.mark.parametrize("name", RICH)
def test_a_wrong_value_anywhere_is_read_or_refused(write, name):
    refused = 0
    for place in places(RICH[name]):
        for value in ODD:
            changed = with_value(RICH[name], place, value)
            path = write(changed if isinstance(changed, list) else [changed])
            try:
                requests = list(open_trace(path, format=name, options=ASSUMED.get(name)))
            except TraceFormatError:
                refused += 1
                continue
            for request in requests:
                counts = (request.prompt_tokens, request.output_tokens)
                assert all(type(count) is int and count > 0 for count in counts)
                assert request.arrival_s >= 0
                assert request.think_s >= 0
    assert refused > 40
