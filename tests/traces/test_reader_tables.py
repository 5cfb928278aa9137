"""CSV formats: Azure, BurstGPT, Vidur; and the outputs of bench_serving and ShareGPT."""

import json

import pytest

from granikv.core.errors import ConfigError, TraceFormatError
from granikv.traces import ReadOptions, Run, open_trace
from granikv.traces.readers import sharegpt
from granikv.traces.segments import private_segment
from granikv.traces.tables import DATA

V1 = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
V2 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
)


def azure(*stamps):
    rows = "\r\n".join(f"{stamp},10,2" for stamp in stamps)
    return f"TIMESTAMP,ContextTokens,GeneratedTokens\r\n{rows}"


def test_azure_2023_cut_has_its_golden_values(data):
    source = open_trace(data / "azure-2023-code.head40.csv")
    requests = list(source)
    assert source.format == "azure"
    assert len(requests) == 40
    assert requests[0].prompt == (Run(private_segment(0), 4808),)
    assert [request.arrival_s for request in requests[:3]] == [0.0, 0.052, 0.098189]
    assert requests[0].output_tokens == 10


def test_azure_2024_stamps_have_a_zone_and_sometimes_no_fraction(write):
    path = write(
        azure(
            "2024-05-10 00:00:00.0099+00:00",
            "2024-05-10 00:00:01+00:00",
            "2024-05-10 02:00:01.5000001+02:00",
        )
    )
    times = [request.arrival_s for request in open_trace(path)]
    assert times == pytest.approx([0.0, 0.9901, 1.4901001], abs=1e-12)


def test_azure_fractions_are_not_cut(write):
    path = write(azure(*(f"2023-11-16 18:00:00.00{step}00" for step in ("100", "200", "900"))))
    assert [request.arrival_s for request in open_trace(path)] == [0.0, 0.001, 0.008]


@pytest.mark.parametrize("stamp", ["yesterday", "2023-13-16 18:00:00", "2023-11-16"])
def test_azure_bad_stamp(write, stamp):
    with pytest.raises(TraceFormatError, match="row 3, TIMESTAMP"):
        list(open_trace(write(azure("2023-11-16 18:00:00", stamp))))


def test_burstgpt_columns_go_by_name(data):
    old = list(open_trace(data / "burstgpt-v1.head3.csv"))
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in old] == [
        (0.0, 472, 18),
        (40.0, 1087, 230),
        (113.0, 417, 276),
    ]
    new = list(open_trace(data / "burstgpt-v2.head4.csv"))
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in new] == [
        (0.0, 906, 446),
        (51.0, 36, 29),
        (82.0, 1779, 123),
        (144.0, 935, 178),
    ]
    assert new[0].session == "1722ac82-0a46-4bf0-aa08-89794e7a2b3f"


def test_burstgpt_failed_rows_and_blank_sessions(write):
    rows = (
        "5,,3,GPT-4,100,0,100,API log\n"
        "6.5,,3,GPT-4,100,7,107,API log\n"
        "7.5,,3,ChatGPT,50,9,59,API log\n"
    )
    path = write(V2 + rows)
    source = open_trace(path)
    requests = list(source)
    assert source.format == "burstgpt"
    assert [request.session for request in requests] == [None, None]
    assert [request.arrival_s for request in requests] == [0.0, 1.0]
    assert source.report.dropped == {"no output tokens": 1}
    kept = open_trace(path, options=ReadOptions(drop_failed=False))
    assert [request.output_tokens for request in kept] == [1, 7, 9]
    assert kept.report.clamped == {"no output tokens": 1}
    assert "1 clamped (no output tokens)" in kept.report.summary()


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ("x,GPT-4,1,1,2,API log", "Timestamp"),
        ("nan,GPT-4,1,1,2,API log", "Timestamp"),
        ("5,GPT-4,1.5,1,2,API log", "Request tokens"),
        ("5,GPT-4,1,-1,2,API log", "Response tokens"),
        ("5,GPT-4", "row"),
    ],
)
def test_burstgpt_bad_fields(write, row, field):
    with pytest.raises(TraceFormatError, match=f"row 2, {field}: "):
        list(open_trace(write(V1 + row + "\n")))


def test_a_missing_column_is_named(write):
    path = write("Timestamp,Model,Request tokens\n1,GPT-4,2\n")
    with pytest.raises(TraceFormatError, match="no column Response tokens"):
        list(open_trace(path, format="burstgpt"))


def test_shipped_lengths_are_a_trace_too():
    source = open_trace(DATA / "sharegpt-llama-3.1-8b.lengths.csv")
    requests = list(source)
    assert source.format == "vidur"
    assert len(requests) == 300
    assert sum(request.prompt_tokens for request in requests) == 257_239
    assert sum(request.output_tokens for request in requests) == 195_753
    assert requests[1].arrival_s == pytest.approx(0.347938951 - 0.046926808)


def test_lengths_without_times_need_a_rate(write):
    path = write("num_prefill_tokens,num_decode_tokens,pd_ratio\n10,2,5\n20,4,5\n30,5,6\n")
    with pytest.raises(TraceFormatError, match="give requests_per_s"):
        list(open_trace(path))
    at_once = open_trace(path, options=ReadOptions(requests_per_s=float("inf")))
    assert [request.arrival_s for request in at_once] == [0.0, 0.0, 0.0]
    spread = open_trace(path, options=ReadOptions(requests_per_s=2.0, seed=3))
    times = [request.arrival_s for request in spread]
    assert times == sorted(times)
    assert times[0] > 0
    assert times == [request.arrival_s for request in spread]


def bench(**more):
    return {
        "tag": None,
        "backend": "sglang",
        "request_rate": float("inf"),
        "completed": 2,
        "total_input_tokens": 30,
        "total_output_tokens": 3,
        **more,
    }


def test_bench_serving_output(write):
    detailed = bench(input_lens=[10, 20, 30], output_lens=[1, 2, 0], errors=["", "", "reset"])
    path = write([detailed])
    source = open_trace(path, options=ReadOptions(requests_per_s=float("inf")))
    requests = list(source)
    assert source.format == "bench_serving"
    assert [(r.prompt_tokens, r.output_tokens) for r in requests] == [(10, 1), (20, 2)]
    assert source.report.dropped == {"no output tokens": 1}
    with pytest.raises(TraceFormatError, match="requests_per_s"):
        list(open_trace(path))


def test_bench_serving_file_of_several_runs(write):
    path = write([bench(input_lens=[1], output_lens=[1]), bench(input_lens=[2], output_lens=[2])])
    options = {"requests_per_s": float("inf")}
    with pytest.raises(TraceFormatError, match="choose one with bench_run"):
        list(open_trace(path, options=ReadOptions(**options)))
    (second,) = open_trace(path, options=ReadOptions(**options, bench_run=1))
    assert second.prompt_tokens == 2
    with pytest.raises(TraceFormatError, match="no benchmark run 2"):
        list(open_trace(path, options=ReadOptions(**options, bench_run=2)))


def test_bench_serving_without_details(write):
    options = ReadOptions(requests_per_s=1.0)
    with pytest.raises(TraceFormatError, match="--output-details"):
        list(open_trace(write([bench()]), options=options))


CHATS = [
    {
        "id": "a_0",
        "conversations": [
            {"from": "gpt", "value": "an answer to nothing"},
            {"from": "human", "value": "x" * 40},
            {"from": "gpt", "value": "y" * 18},
            {"from": "human", "value": "z" * 8},
            {"from": "gpt", "value": "w" * 4},
            {"from": "human", "value": "never answered"},
        ],
    },
    {"id": "b", "conversations": []},
    {
        "id": "c",
        "conversations": [{"from": "human", "value": "é" * 5}, {"from": "gpt", "value": "q"}],
    },
]


@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_sharegpt_turns_repeat_what_came_before(write, monkeypatch, chunk):
    monkeypatch.setattr(sharegpt, "_CHUNK_CHARS", chunk)
    path = write(json.dumps(CHATS, indent=2))
    options = ReadOptions(requests_per_s=float("inf"), chars_per_token=4.0)
    source = open_trace(path, options=options)
    first, second, third = source
    assert source.format == "sharegpt"
    assert [first.prompt_tokens, first.output_tokens] == [10, 5]
    assert second.prompt[:1] == first.prompt
    assert second.prompt[1] == Run(first.output_segment, 5)
    assert second.prompt[2].length == 2
    assert (second.after, second.session) == (first.request_id, "a_0")
    assert (third.prompt_tokens, third.after) == (2, None)


def test_sharegpt_needs_its_assumptions(write):
    path = write(json.dumps(CHATS))
    with pytest.raises(TraceFormatError, match="chars_per_token"):
        list(open_trace(path))
    options = ReadOptions(requests_per_s=1.0, chars_per_token=4.0)
    with pytest.raises(TraceFormatError, match="ends inside its array"):
        list(open_trace(write(json.dumps(CHATS)[:-20], "cut"), options=options))


def test_options_of_other_formats_are_refused(data):
    for options in (
        ReadOptions(block_size=16),
        ReadOptions(time_unit="ms"),
        ReadOptions(requests_per_s=1.0),
        ReadOptions(chars_per_token=4.0),
        ReadOptions(bench_run=0),
    ):
        with pytest.raises(ConfigError, match="does not apply to"):
            open_trace(data / "azure-2023-code.head40.csv", options=options)
