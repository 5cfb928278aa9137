"""Weka conversations and RAGPulse: folders, local ids, sub-agents, side tables."""

import json
import shutil

import pytest

from granikv.core.errors import TraceFormatError
from granikv.traces import ReadOptions, Run, open_trace
from granikv.traces.segments import Origin, is_private, origin

OPEN = ReadOptions(closed_loop=False)


def turn(t, prompt, ids, out=5, **more):
    return {"t": t, "type": "n", "in": prompt, "out": out, "hash_ids": ids, **more}


def conversation(*requests, name="c", scope="local", **more):
    return {
        "id": name,
        "models": ["m"],
        "block_size": 64,
        "hash_id_scope": scope,
        "requests": list(requests),
        **more,
    }


def folder_of(tmp_path, *conversations):
    folder = tmp_path / "conversations"
    folder.mkdir()
    for number, body in enumerate(conversations):
        (folder / f"{number:03d}.json").write_text(json.dumps(body))
    return folder


def test_weka_folder_has_its_golden_values(data):
    source = open_trace(data / "weka")
    requests = list(source)
    assert source.format == "weka"
    assert source.report.summary() == ("21 rows read, 21 kept, blocks of 64 tokens (floor)")
    # 2 + 1 turns of the cut conversation's main thread, 11 of its sub-agent, then two whole ones.
    by_session = {}
    for request in requests:
        by_session.setdefault(request.session, []).append(request)
    assert {name: len(turns) for name, turns in by_session.items()} == {
        "trace_0020": 3,
        "trace_0020/agent_001": 11,
        "trace_0242": 3,
        "trace_0288": 4,
    }
    assert sum(r.prompt_tokens for r in by_session["trace_0242"]) == 52_760
    assert sum(r.output_tokens for r in by_session["trace_0242"]) == 5_027
    assert sum(r.prompt_tokens for r in by_session["trace_0288"]) == 96_045
    assert [r.think_s for r in by_session["trace_0242"]][:2] == [0.0, 47.0]


def test_weka_sub_agents_wait_and_are_waited_for(data):
    requests = list(open_trace(data / "weka" / "trace_0020.cut.json.gz"))
    main = [r for r in requests if r.session == "trace_0020"]
    helper = [r for r in requests if r.session == "trace_0020/agent_001"]
    # The main thread answered at 62 + 41.03 s, the sub-agent started at 225.501 s.
    assert helper[0].after == main[1].request_id
    assert helper[0].think_s == pytest.approx(225.501 - 62.0 - 41.03)
    assert [r.after for r in helper[1:]] == [r.request_id for r in helper[:-1]]
    # The next turn of the main thread was recorded beside the sub-agent, so it does not wait for
    # it.
    assert (main[2].after, main[2].think_s) == (main[1].request_id, 138.0)
    opened = {
        r.session: r for r in open_trace(data / "weka" / "trace_0020.cut.json.gz", options=OPEN)
    }
    assert opened["trace_0020/agent_001"].arrival_s == pytest.approx(225.501 + 90.0)


def test_weka_main_thread_waits_for_a_finished_sub_agent(tmp_path):
    helper = {
        "t": 10.0,
        "type": "subagent",
        "agent_id": "h",
        "requests": [turn(0.0, 64, [9], api_time=2.0), turn(5.0, 128, [9, 10], api_time=3.0)],
    }
    folder = folder_of(
        tmp_path,
        conversation(
            turn(0.0, 64, [1], api_time=1.0), helper, turn(20.0, 128, [1, 2], think_time=7.0)
        ),
    )
    requests = list(open_trace(folder))
    assert [r.after for r in requests] == [None, 0, 1, 2]
    assert [r.think_s for r in requests] == [0.0, 9.0, 3.0, 2.0]


def test_weka_closed_loop_keeps_conversations_together(data):
    options = ReadOptions(start_spread_s=100.0, seed=5)
    requests = list(open_trace(data / "weka", options=options))
    starts = {}
    for request in requests:
        name = request.session.partition("/")[0]
        starts.setdefault(name, request.arrival_s)
        assert request.arrival_s == starts[name]
        assert request.after is None or request.after < request.request_id
    assert list(starts.values()) == sorted(starts.values())
    assert len(set(starts.values())) == 3
    assert all(0 <= start < 100 for start in starts.values())
    assert [r.request_id for r in requests] == list(range(len(requests)))


def test_weka_open_loop_plays_recorded_times(data):
    requests = list(open_trace(data / "weka", options=OPEN))
    times = [request.arrival_s for request in requests]
    assert times == sorted(times)
    assert all(request.after is None and request.think_s == 0.0 for request in requests)
    assert [r.arrival_s for r in requests if r.session == "trace_0242"] == [0.0, 90.0, 185.0]
    assert [r.request_id for r in requests] == list(range(len(requests)))
    spread = ReadOptions(closed_loop=False, start_spread_s=1000.0, seed=1)
    moved = list(open_trace(data / "weka", options=spread))
    moved_times = [r.arrival_s for r in moved if r.session == "trace_0242"]
    assert [t - moved_times[0] for t in moved_times] == pytest.approx([0.0, 90.0, 185.0])
    assert moved_times[0] > 0


def test_weka_think_time_falls_back_on_the_gap_and_has_a_cap(tmp_path):
    folder = folder_of(
        tmp_path,
        conversation(
            turn(0.0, 64, [1], api_time=4.0),
            turn(10.0, 64, [1]),
            turn(11.0, 64, [1], api_time=100.0),
            turn(12.0, 64, [1]),
            turn(50_000.0, 64, [1], think_time=43_700.0),
        ),
    )
    assert [r.think_s for r in open_trace(folder)] == [0.0, 6.0, 1.0, 0.0, 43_700.0]
    capped = open_trace(folder, options=ReadOptions(max_think_s=60.0))
    assert [r.think_s for r in capped] == [0.0, 6.0, 1.0, 0.0, 60.0]


def test_weka_local_ids_do_not_meet(tmp_path):
    folder = folder_of(
        tmp_path,
        conversation(turn(0.0, 130, [1, 2]), turn(1.0, 192, [1, 2, 3]), name="a"),
        conversation(turn(0.0, 130, [1, 2]), name="b"),
    )
    first, second, other = open_trace(folder)
    assert first.prompt[0].segment == second.prompt[0].segment
    assert first.prompt[0].segment != other.prompt[0].segment
    assert origin(first.prompt[0].segment) is Origin.LOCAL
    assert first.prompt[0].length == 128
    assert is_private(first.prompt[1].segment)
    assert first.output_segment is None


def test_weka_global_ids_do_meet(tmp_path):
    folder = folder_of(
        tmp_path,
        conversation(turn(0.0, 64, [1]), scope="global"),
        conversation(turn(0.0, 64, [1]), scope="global"),
    )
    assert [request.prompt for request in open_trace(folder)] == [(Run(1, 64),), (Run(1, 64),)]


def test_weka_rows_without_output_are_dropped_and_not_waited_for(tmp_path):
    folder = folder_of(
        tmp_path, conversation(turn(0.0, 64, [1]), turn(1.0, 64, [1], out=0), turn(2.0, 64, [1]))
    )
    source = open_trace(folder)
    requests = list(source)
    assert [r.after for r in requests] == [None, 0]
    assert (source.report.rows_read, source.report.dropped) == (3, {"no output tokens": 1})
    assert len(list(open_trace(folder, options=ReadOptions(drop_failed=False)))) == 3


def test_weka_pretty_printed_file_and_stray_notes(tmp_path):
    folder = tmp_path / "mixed"
    folder.mkdir()
    body = conversation(turn(0.0, 64, [1]))
    (folder / "one.txt").write_text(json.dumps(body, indent=2))
    (folder / "SOURCE.md").write_text("# where it is from\n")
    source = open_trace(folder)
    assert len(list(source)) == 1
    assert source.format == "weka"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (turn(0.0, 200, [1]), "row 2, hash_ids: 1 ids for 200 prompt tokens"),
        ({"t": 0.0, "type": "n", "out": 1, "hash_ids": []}, "row 2, in: want an integer"),
        (turn("0", 64, [1]), "row 2, t: want a number"),
        (turn(0.0, 64, [1 << 32]), "row 2, hash_ids: a local id of more than 32 bits"),
        ("text", "row 2, requests: not a JSON object"),
        ({"t": 0.0, "type": "subagent"}, "requests: a sub-agent without requests"),
    ],
)
def test_weka_bad_rows_are_named(tmp_path, entry, message):
    folder = folder_of(tmp_path, conversation(turn(0.0, 64, [1]), entry))
    with pytest.raises(TraceFormatError, match=message) as error:
        list(open_trace(folder))
    assert "000.json" in str(error.value)


def test_ragpulse_cut_has_its_golden_values(data):
    source = open_trace(data / "ragpulse")
    requests = list(source)
    assert source.format == "ragpulse"
    assert source.report.summary() == "50 rows read, 50 kept, 1 out of order, sorted"
    times = [request.arrival_s for request in requests]
    assert times == sorted(times)
    assert [request.request_id for request in requests] == list(range(50))
    # Exact segment lengths: system prompt 512 + 512 + rest, and 6 to 12 tokens of template at the
    # end.
    assert {request.prompt[0].length for request in requests} == {512}
    tails = [request.prompt[-1] for request in requests]
    assert all(is_private(tail.segment) and 6 <= tail.length <= 12 for tail in tails)
    assert len({tail.segment for tail in tails}) == 50
    rows = [
        json.loads(line)
        for line in (data / "ragpulse" / "0_trace.jsonl").read_text().split("\n")
        if line
    ]
    assert sum(r.prompt_tokens for r in requests) == sum(row["input_length"] for row in rows)
    assert sum(r.output_tokens for r in requests) == sum(row["output_length"] for row in rows)
    assert requests[0].arrival_s == 0.0


def test_ragpulse_trace_file_finds_its_tables(data):
    assert list(open_trace(data / "ragpulse" / "0_trace.jsonl")) == list(
        open_trace(data / "ragpulse")
    )


def test_ragpulse_needs_all_tables(data, tmp_path):
    folder = tmp_path / "some"
    shutil.copytree(data / "ragpulse", folder)
    (folder / "3_history.jsonl").unlink()
    with pytest.raises(TraceFormatError, match="lacks the RAGPulse file with history_id"):
        list(open_trace(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_length": 100}, "input_length: .* tokens below its segments"),
        ({"timestamp": 82}, "timestamp"),
        ({"hash_ids": {"sys_prompt": [1_000_000]}}, "segment 1000000 is in no table"),
    ],
)
def test_ragpulse_bad_rows_are_named(data, tmp_path, change, message):
    folder = tmp_path / "bad"
    shutil.copytree(data / "ragpulse", folder)
    trace = folder / "0_trace.jsonl"
    rows = trace.read_text().split("\n")
    rows[1] = json.dumps(json.loads(rows[1]) | change)
    trace.write_text("\n".join(rows))
    with pytest.raises(TraceFormatError, match=f"row 2, .*{message}"):
        list(open_trace(folder))
