"""Mooncake and Qwen-Bailian: block ids, partial blocks, ceil and floor, sessions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_support import shared_tokens

from granikv.core.errors import TraceFormatError
from granikv.traces import ReadOptions, Run, open_trace
from granikv.traces.readers.blocks import runs_of_blocks
from granikv.traces.segments import is_private, private_segment


def mooncake(timestamp, prompt, ids, output=10, **more):
    return {
        "timestamp": timestamp,
        "input_length": prompt,
        "output_length": output,
        "hash_ids": ids,
        **more,
    }


def bailian(chat, parent, timestamp, prompt, ids, output=10):
    return {
        "chat_id": chat,
        "parent_chat_id": parent,
        "timestamp": timestamp,
        "input_length": prompt,
        "output_length": output,
        "type": "text",
        "turn": 1 if parent == -1 else 2,
        "hash_ids": ids,
    }


def test_mooncake_cut_has_its_golden_values(data):
    source = open_trace(data / "mooncake-arxiv.head20.jsonl")
    requests = list(source)
    assert source.format == "mooncake"
    assert len(requests) == 20
    assert [request.request_id for request in requests] == list(range(20))
    assert sum(request.prompt_tokens for request in requests) == 256_262
    assert sum(request.output_tokens for request in requests) == 5_675
    assert requests[-1].arrival_s == 3.052
    assert requests[0].prompt == (Run(0, 6755),)
    assert requests[1].prompt == (Run(0, 512), Run(14, 7319 - 512))
    assert source.report.summary() == ("20 rows read, 20 kept, blocks of 512 tokens (ceil)")


def test_the_last_block_is_partial(write):
    path = write([mooncake(0, 600, [0, 1]), mooncake(1, 1024, [0, 2])])
    first, second = open_trace(path)
    assert first.prompt == (Run(0, 600),)
    assert second.prompt == (Run(0, 512), Run(2, 512))
    assert shared_tokens(first.prompt, second.prompt) == 512


def test_one_block_id_at_two_lengths_shares_the_shorter(write):
    path = write([mooncake(0, 700, [5, 9]), mooncake(1, 1400, [5, 9, 10])])
    first, second = open_trace(path)
    assert shared_tokens(first.prompt, second.prompt) == 700


@given(
    left=st.lists(st.integers(0, 6), max_size=8),
    right=st.lists(st.integers(0, 6), max_size=8),
    block=st.integers(1, 5),
    missing=st.integers(0, 4),
)
def test_merged_runs_share_what_block_ids_share(left, right, block, missing):
    tokens = [max(len(ids) * block - missing % block, 0) for ids in (left, right)]
    runs = [
        runs_of_blocks(ids, block, count, number)
        for number, (ids, count) in enumerate(zip((left, right), tokens, strict=True))
    ]
    equal = 0
    while equal < min(len(left), len(right)) and left[equal] == right[equal]:
        equal += 1
    assert [sum(run.length for run in prompt) for prompt in runs] == tokens
    assert shared_tokens(*runs) == min(equal * block, *tokens)


def test_dense_ids_cost_one_run():
    assert runs_of_blocks(list(range(2000)), 64, 128_000, 0) == (Run(0, 128_000),)


@pytest.mark.parametrize(
    ("rows", "rule"),
    [
        ([mooncake(0, 40, [0, 1, 2])], "ceil"),
        ([mooncake(0, 40, [0, 1])], "floor"),
        ([mooncake(0, 32, [0, 1])], "either"),
        ([mooncake(0, 7, [])], "floor"),
    ],
)
def test_ceil_and_floor_are_both_read(write, rows, rule):
    source = open_trace(write(rows), options=ReadOptions(block_size=16))
    (request,) = source
    assert source.report.block_rule == rule
    assert request.prompt_tokens == rows[0]["input_length"]


def test_tokens_behind_the_last_id_are_private(write):
    path = write([mooncake(0, 40, [0, 1]), mooncake(0, 40, [0, 1])])
    requests = list(open_trace(path, options=ReadOptions(block_size=16)))
    assert [request.prompt[0] for request in requests] == [Run(0, 32), Run(0, 32)]
    tails = [request.prompt[1] for request in requests]
    assert tails == [Run(private_segment(0), 8), Run(private_segment(1), 8)]


@pytest.mark.parametrize(
    ("rows", "row", "rule"),
    [
        ([mooncake(0, 1276, list(range(79)))], 1, "ceil or floor"),
        ([mooncake(0, 600, [0, 1, 2])], 1, "ceil or floor"),
        ([mooncake(0, 600, [0, 1]), mooncake(1, 600, [0])], 2, "ceil"),
        ([mooncake(0, 600, [0]), mooncake(1, 600, [0, 1])], 2, "floor"),
    ],
)
def test_a_wrong_block_size_is_refused(write, rows, row, rule):
    with pytest.raises(
        TraceFormatError, match=f"row {row}, hash_ids: .* {rule} check of block size 512"
    ):
        list(open_trace(write(rows)))


def test_a_file_in_the_same_layout_with_other_blocks_needs_its_size(data):
    path = data / "agent-blocks16.head60.jsonl.gz"
    with pytest.raises(TraceFormatError, match="give the block size"):
        list(open_trace(path))
    source = open_trace(path, options=ReadOptions(block_size=16))
    kept = list(source)
    report = source.report
    assert report.rows_read == 60
    assert len(kept) == report.kept == 60 - sum(report.dropped.values())
    assert report.block_rule == "floor"


def test_unknown_keys_are_ignored_and_float_times_kept(write):
    rows = [
        mooncake(0.25, 600, [0, 1], priority=3, tags=["a"]),
        mooncake(0.75, 600, [0, 1], output_token_ids=[1]),
    ]
    assert [request.arrival_s for request in open_trace(write(rows))] == [0.0, 0.0005]


def test_rows_without_ids_are_private(write):
    rows = [{"timestamp": 0, "input_length": 600, "output_length": 1, "text_input": "x"}]
    (request,) = open_trace(write(rows))
    assert request.prompt == (Run(private_segment(0), 600),)


def test_nanoseconds_as_text_keep_their_digits(write):
    start = 1_718_000_000_123_456_789
    rows = [mooncake(str(start + step), 512, [4_294_967_295]) for step in (0, 1_000, 2_500)]
    options = ReadOptions(time_unit="ns")
    times = [request.arrival_s for request in open_trace(write(rows), options=options)]
    assert times == [0.0, 1e-6, 2.5e-6]


def test_turns_with_a_delay_wait_for_the_answer(write):
    rows = [
        mooncake(1000, 600, [0, 1], session_id="a"),
        mooncake(2000, 600, [0, 2]),
        {
            "session_id": "a",
            "delay": 1500,
            "input_length": 700,
            "output_length": 3,
            "hash_ids": [0, 3],
        },
    ]
    path = write(rows)
    first, other, turn = open_trace(path)
    assert (turn.session, turn.after, turn.think_s) == ("a", first.request_id, 1.5)
    assert (other.session, other.after) == (None, None)
    assert [request.arrival_s for request in (first, other, turn)] == [0.0, 1.0, 1.0]
    with pytest.raises(TraceFormatError, match="row 3, timestamp"):
        list(open_trace(path, options=ReadOptions(closed_loop=False)))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"input_length": "600"}, "input_length"),
        ({"output_length": None}, "output_length"),
        ({"output_length": -1}, "output_length"),
        ({"timestamp": "soon"}, "timestamp"),
        ({"timestamp": float("nan")}, "timestamp"),
        ({"hash_ids": [0, "1"]}, "hash_ids"),
        ({"hash_ids": [0, -1]}, "hash_ids"),
        ({"hash_ids": [0, True]}, "hash_ids"),
    ],
)
def test_a_bad_field_is_named_with_its_row(write, change, field):
    path = write([mooncake(0, 600, [0, 1]), mooncake(0, 600, [0, 1]) | change])
    with pytest.raises(TraceFormatError, match=rf"{path}, row 2, {field}: .*; .*\.$"):
        list(open_trace(path))


def test_a_line_that_is_not_json_is_named(write):
    good = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}\n'
    with pytest.raises(TraceFormatError, match="row 3, line: not JSON"):
        list(open_trace(write(good + "\n" + '{"timestamp": 1, "inp\n')))


def test_bailian_ids_match_by_path_only(write):
    rows = [
        bailian(1, -1, 0.0, 48, [7, 8, 9]),
        bailian(2, -1, 0.5, 48, [8, 7, 9]),
        bailian(3, -1, 1.25, 40, [7, 8, 5]),
    ]
    source = open_trace(write(rows))
    first, second, third = source
    assert source.format == "bailian"
    assert shared_tokens(first.prompt, second.prompt) == 0
    assert shared_tokens(first.prompt, third.prompt) == 32
    assert third.arrival_s == 1.25
    assert not any(is_private(run.segment) for run in first.prompt)


def test_bailian_chats_follow_their_parents(write):
    rows = [
        bailian(10, 4, 100.0, 16, [1]),
        bailian(11, 10, 130.0, 32, [1, 2]),
        bailian(12, 11, 1130.0, 48, [1, 2, 3]),
    ]
    path = write(rows)
    requests = list(open_trace(path, options=ReadOptions(max_think_s=60.0)))
    # The first row's parent lies before the cut, so it starts the conversation.
    assert [request.session for request in requests] == ["10", "10", "10"]
    assert [request.after for request in requests] == [None, 0, 1]
    assert [request.think_s for request in requests] == [0.0, 30.0, 60.0]
    opened = list(open_trace(path, options=ReadOptions(closed_loop=False)))
    assert [request.after for request in opened] == [None, None, None]
    assert [request.arrival_s for request in opened] == [0.0, 30.0, 1030.0]


def test_a_turn_whose_parent_was_dropped_starts_anew(write):
    rows = [bailian(1, -1, 0.0, 16, [1], output=0), bailian(2, 1, 5.0, 32, [1, 2])]
    source = open_trace(write(rows))
    (request,) = source
    assert (request.after, request.session) == (None, "2")
    assert source.report.dropped == {"no output tokens": 1}
