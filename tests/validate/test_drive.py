"""What is written down about a request: times, cached tokens, how it ended."""

from typing import Any

import pytest
from serve_support import FakeEngine, run_virtually

from granikv.validate.clients import EngineClient, ServerError, answer_of_line, chunk_of
from granikv.validate.drive import Drive, answer_batch, drive, drive_closed
from granikv.validate.live import RequestRecord
from granikv.validate.workloads import LiveRequest


def request(number: int, arrival_s: float, prompt: list[int], output: int = 11) -> LiveRequest:
    return LiveRequest(number, None, arrival_s, prompt, output)


def driven(engine: Any, requests: Any, **options: Any) -> list[RequestRecord]:
    async def work(loop: Any) -> Drive:
        return await drive(EngineClient(engine()), requests, clock=loop.time, **options)

    return run_virtually(work).records


def test_times_of_an_idle_server_are_closed_forms():
    one, two = driven(
        lambda: FakeEngine(prefill_s=0.5, step_s=0.01),
        [request(3, 1.0, [1, 2, 3]), request(4, 9.0, [1, 2, 4, 5], output=1)],
    )
    assert (one.id, one.prompt_tokens, one.output_tokens) == (3, 3, 11)
    assert (one.arrival_s, one.sent_s) == (1.0, pytest.approx(1.0))
    assert one.first_token_s == pytest.approx(1.5)
    assert one.finish_s == pytest.approx(1.6)
    assert two.first_token_s == two.finish_s == pytest.approx(9.5)
    assert (one.cached_tokens, two.cached_tokens) == (0, 2)
    assert one.status == two.status == "finished"
    assert one.hot_tokens is None


def test_arrivals_do_not_wait_for_answers_but_a_full_server_does():
    records = driven(
        lambda: FakeEngine(slots=1, prefill_s=1.0, step_s=0.1),
        [request(n, 0.25 * n, [n]) for n in range(4)],
    )
    assert [r.sent_s for r in records] == pytest.approx([0.0, 0.25, 0.5, 0.75])
    assert [r.finish_s for r in records] == pytest.approx([2.0, 4.0, 6.0, 8.0])


def test_a_failed_request_is_a_record():
    bad, good = driven(
        lambda: FakeEngine(poison=666), [request(0, 0.0, [666]), request(1, 0.0, [1])]
    )
    assert (bad.status, bad.finish_s, bad.error) == (
        "failed",
        None,
        "ValueError: a poisoned prompt",
    )
    assert good.status == "finished"


def test_enough_ends_the_others():
    records = driven(
        lambda: FakeEngine(slots=2, prefill_s=1.0, step_s=0.1),
        [request(n, 0.1 * n, [n]) for n in range(30)],
        enough=4,
    )
    # Two at a time, 2 s each: the fourth is done at 4.1 s, when all had been sent.
    assert [r.status for r in records] == ["finished"] * 4 + ["unfinished"] * 26


def test_enough_also_ends_the_sending():
    records = driven(FakeEngine, [request(n, 10.0 * n, [n]) for n in range(5)], enough=2)
    assert [r.status for r in records] == ["finished", "finished"]


def closed(engine: FakeEngine, requests: Any, users: int) -> list[RequestRecord]:
    async def work(loop: Any) -> Drive:
        return await drive_closed(EngineClient(engine), requests, users, clock=loop.time)

    return run_virtually(work).records


def in_flight(records: list[RequestRecord], time_s: float) -> int:
    return sum((r.sent_s or 0.0) <= time_s < (r.finish_s or 0.0) for r in records)


def test_a_closed_loop_keeps_its_users_busy():
    requests = [request(n, 0.0, [n], output=5 + 7 * n % 11) for n in range(20)]
    records = closed(FakeEngine(prefill_s=0.5, step_s=0.01), requests, 3)
    assert [r.id for r in records] == list(range(20))
    assert [r.arrival_s for r in records] == [r.sent_s for r in records]
    ends = sorted(r.finish_s for r in records)
    for one, other in zip([0.0, *ends[:17]], ends[:18], strict=True):  # the last three go home
        assert in_flight(records, (one + other) / 2) == 3
    assert in_flight(records, (ends[18] + ends[19]) / 2) == 1


def test_a_user_sends_when_the_last_answer_has_ended():
    requests = [request(n, 0.0, [n], output=11) for n in range(6)]
    records = closed(FakeEngine(prefill_s=0.5, step_s=0.01), requests, 2)
    assert [r.sent_s for r in records] == pytest.approx([0.0, 0.0, 0.6, 0.6, 1.2, 1.2])
    by_id = {r.id: r for r in records}
    for record in records[2:]:
        before = by_id[record.after]
        assert (before.session, before.finish_s) == (record.session, record.sent_s)
    assert {r.session for r in records} == {"user-0", "user-1"}
    assert [r.after for r in records[:2]] == [None, None]


def test_a_user_goes_on_after_a_failure():
    requests = [request(0, 0.0, [666]), request(1, 0.0, [1])]
    bad, good = closed(FakeEngine(poison=666), requests, 1)
    assert (bad.status, good.status, good.after) == ("failed", "finished", 0)


def test_a_batch_is_one_message():
    engines: list[FakeEngine] = []

    async def work(loop: Any) -> list[RequestRecord]:
        engines.append(FakeEngine(prefill_s=0.5, step_s=0.01))
        prompts = [[1, 2], [3, 4, 5]]
        return await answer_batch(EngineClient(engines[0]), prompts, 8, interval=3, clock=loop.time)

    records = run_virtually(work)
    assert engines[0].sent == [2]
    for record in records:
        assert [tokens for _, tokens in record.marks] == [1, 4, 7, 8]
        assert [t for t, _ in record.marks] == pytest.approx([0.5, 0.53, 0.56, 0.57])


def test_a_row_is_what_run_records_need():
    (record,) = driven(FakeEngine, [request(0, 0.0, [1])])
    row = record.row()
    assert "marks" not in row
    assert {"id", "session", "arrival_s", "sent_s", "first_token_s", "finish_s"} <= set(row)
    assert {"prompt_tokens", "output_tokens", "cached_tokens", "hot_tokens", "status"} <= set(row)


def test_answers_of_sglang_become_chunks():
    meta = {"completion_tokens": 5, "cached_tokens": 2, "finish_reason": None}
    running = chunk_of({"index": 3, "meta_info": meta, "output_ids": [1]})
    assert (running.index, running.tokens, running.cached_tokens) == (3, 5, 2)
    assert running.status is None
    ended = meta | {"finish_reason": {"type": "length", "length": 5}}
    assert chunk_of({"meta_info": ended}).status == "finished"
    aborted = meta | {"finish_reason": {"type": "abort"}}
    assert chunk_of({"meta_info": aborted}).status == "aborted"
    with pytest.raises(ServerError, match="too long"):
        chunk_of({"error": {"message": "too long"}})


def test_lines_of_a_stream():
    assert answer_of_line(b'data: {"index": 1}\n') == {"index": 1}
    assert answer_of_line(b"data: [DONE]\n") is None
    assert answer_of_line(b"\n") is None


def test_a_cache_that_is_in_use_is_an_error():
    class Busy(FakeEngine):
        async def flush_cache(self, timeout_s: float) -> Any:
            return type("Answer", (), {"success": False, "message": "busy"})

    async def work(_: Any) -> None:
        await EngineClient(Busy()).flush()

    with pytest.raises(ServerError, match="busy"):
        run_virtually(work)
