"""Numbers from records, on servers whose rates are known in closed form."""

from typing import Any

import pytest
from serve_support import FakeEngine, run_virtually

from granikv.validate.clients import EngineClient
from granikv.validate.driven_cells import ClosedCell, PoissonCell, TraceCell
from granikv.validate.live import RequestRecord
from granikv.validate.measure import Measured, measure
from granikv.validate.serve_cells import Cell, SteadyCell
from granikv.validate.steady import (
    CellError,
    decoded_together,
    least_waiting,
    start_spread_s,
    steady_step_s,
    steady_window,
    waits_ms,
    whole_run,
)


def record(sent_s: float, first_s: float, finish_s: float, output: int = 10) -> RequestRecord:
    made = RequestRecord(0, None, sent_s, 8, "r", sent_s, first_s, finish_s, output)
    made.status = "finished"
    made.marks = [(first_s, 1), (finish_s, output)]
    return made


def rounds(slots: int, count: int, service_s: float) -> list[RequestRecord]:
    """A server that always works on `slots` requests, in step; all are sent at 0 s."""
    return [
        record(0.0, (n // slots) * service_s + 0.1, (n // slots + 1) * service_s)
        for n in range(count)
    ]


@pytest.mark.parametrize("skip", [1, 3, 4, 6, 8])
def test_whole_rounds_give_the_true_rate_wherever_the_window_begins(skip: int):
    window = steady_window(rounds(4, 24, 2.0), skip, 8)
    assert window.tokens_per_s == pytest.approx(4 * 10 / 2.0)
    assert len(window.records) == 8
    assert window.output_tokens == 80


def test_the_window_counts_only_what_finishes_in_it():
    # One after the other, of 1, 2, 3, ... tokens and as many seconds: always one token a second.
    ends = [n * (n + 1) / 2 for n in range(1, 9)]
    records = [record(0.0, end - n + 0.5, end, n) for n, end in enumerate(ends, 1)]
    window = steady_window(records, 2, 4)
    assert (window.begin_s, window.end_s) == (3.0, 21.0)
    assert window.output_tokens == 3 + 4 + 5 + 6
    assert window.tokens_per_s == pytest.approx(1.0)


def test_too_few_finished_is_said_with_the_reason():
    records = rounds(2, 6, 1.0)
    records[0].status, records[0].error = "failed", "ValueError: too long"
    with pytest.raises(CellError, match=r"5 requests finished, the window needs 6.*too long"):
        steady_window(records, 2, 4)


def test_waiting_is_counted_between_changes():
    records = [record(0.0, 1.0, 9.0), record(0.5, 4.0, 9.0), record(3.0, 5.0, 9.0)]
    assert least_waiting(records, 0.6, 0.9) == 2
    assert least_waiting(records, 0.6, 3.5) == 1
    assert least_waiting(records, 4.5, 6.0) == 0
    assert least_waiting(records, 6.0, 8.0) == 0


def marked(*marks: tuple[float, int]) -> RequestRecord:
    made = record(0.0, marks[0][0], marks[-1][0], marks[-1][1])
    made.marks = list(marks)
    return made


def test_a_step_is_measured_between_inner_reports_only():
    # Both ends are slow: 5 s to the first inner report, 7 s after the last.
    rows = [marked((1.0, 1), (6.0, 11), (7.0, 21), (8.0, 31), (15.0, 32)) for _ in range(3)]
    assert steady_step_s(rows) == pytest.approx(0.1)
    assert decoded_together(rows)
    assert start_spread_s(rows) == 0.0


def test_rows_that_miss_each_other_are_seen():
    early = marked((1.0, 1), (2.0, 11), (3.0, 21), (4.0, 22))
    late = marked((2.5, 1), (3.5, 11), (4.5, 21), (5.0, 22))
    assert not decoded_together([early, late])
    assert start_spread_s([early, late]) == 1.5


def test_a_server_that_does_not_stream_is_refused():
    with pytest.raises(CellError, match="does not stream"):
        steady_step_s([marked((1.0, 1), (2.0, 40))])


def test_throughput_of_a_whole_run():
    values = whole_run([record(2.0, 3.0, 4.0, 30), record(3.0, 3.5, 7.0, 70)])
    assert values["tokens_per_s"] == pytest.approx(100 / 5)
    assert values["ttft_p50_ms"] == pytest.approx(750)
    failed = record(0.0, 1.0, 2.0)
    failed.status, failed.error = "failed", "ValueError: too long"
    with pytest.raises(CellError, match="no request finished: ValueError: too long"):
        whole_run([failed])


def test_percentiles_of_waits():
    # TTFT 0.1, 0.2, ... 1.0 s; TPOT 0.01, ... 0.10 s, and one request of one token without any.
    records = [record(5.0, 5.0 + n / 10, 5.0 + n / 10 + 4 * n / 100, 5) for n in range(1, 11)]
    waits = waits_ms([*records, record(1.0, 1.55, 1.55, 1)])
    # Sorted TTFT: ten of tenths with 0.55 s in the middle; places 0.5, 0.9 and 0.99 of 10 gaps.
    assert waits["ttft_p50_ms"] == pytest.approx(550)
    assert waits["ttft_p90_ms"] == pytest.approx(900)
    assert waits["ttft_p99_ms"] == pytest.approx(990)
    assert waits["tpot_p50_ms"] == pytest.approx(55)
    assert waits["tpot_p90_ms"] == pytest.approx(91)
    assert waits["tpot_p99_ms"] == pytest.approx(99.1)
    assert "tpot_p50_ms" not in waits_ms([record(1.0, 2.0, 2.0, 1)])


def measured(cell: Cell, repeats: list[int], **engine: Any) -> tuple[list[Any], FakeEngine]:
    made: list[FakeEngine] = []

    async def work(loop: Any) -> list[tuple[int, Measured]]:
        made.append(FakeEngine(**engine))
        client = EngineClient(made[0])
        return [done async for done in measure(client, cell, 0, repeats, loop.time)]

    return run_virtually(work), made[0]


def test_a_steady_cell_finds_the_step_and_sends_prompts_twice_before():
    cell = SteadyCell("30x8", ((30, 8),), own_tokens=6)
    done, engine = measured(cell, [0, 2], prefill_s=0.7, step_s=0.004)
    assert [repeat for repeat, _ in done] == [0, 2]
    for _, one in done:
        assert one.values["step_ms"] == pytest.approx(4.0)
        assert one.values["difference_step_ms"] == pytest.approx(4.0)
        assert one.values["tokens_per_s"] == pytest.approx(8 / 0.004)
        assert one.values["is_steady"]
        assert one.values["cached_share"] == pytest.approx(35 / 36)
        assert one.drive is None
    assert engine.sent == [1, 8, 8, 8, 8]  # prefix, first, short answer, two repeats
    assert engine.flushes == 1


def test_rows_beyond_the_server_are_not_steady():
    cell = SteadyCell("0x8", ((0, 8),), own_tokens=6)
    ((_, one),), _ = measured(cell, [0], slots=4)
    assert not one.values["is_steady"]


def test_a_poisson_cell_finds_the_rate_of_a_full_server():
    cell = PoissonCell("p", (40,), 400.0, 864, (16, 512), largest_output=20)
    ((repeat, one),), _ = measured(cell, [0], slots=64, prefill_s=0.1, step_s=0.05)
    assert repeat == 0
    # Each of 64 slots writes 20 tokens in 0.1 + 19 * 0.05 s; 512 finish in eight rounds of it.
    assert one.values["tokens_per_s"] == pytest.approx(64 * 20 / 1.05, rel=0.02)
    assert one.values["is_steady"]
    assert one.values["window_requests"] == 512
    assert one.values["failed"] == 0
    assert one.values["tpot_p50_ms"] == pytest.approx(50)
    assert one.values["tpot_p99_ms"] == pytest.approx(50)
    assert one.drive is not None
    assert len(one.drive.records) == one.values["sent"]


def test_a_window_below_saturation_is_not_steady():
    cell = PoissonCell("p", (4,), 2.0, 64, (1, 8), largest_output=2)
    ((_, one),), _ = measured(cell, [0], prefill_s=0.01, step_s=0.01)
    assert not one.values["is_steady"]
    assert one.values["least_waiting"] == 0


def test_a_poisson_cell_below_saturation_measures_all_its_requests():
    cell = PoissonCell("p", (40, 60), 2.0, 12, largest_output=3)
    done, engine = measured(cell, [0, 1], prefill_s=0.2, step_s=0.05)
    assert [repeat for repeat, _ in done] == [0, 1]
    for _, one in done:
        assert one.drive is not None
        records = one.drive.records
        assert {r.status for r in records} == {"finished"}
        span_s = records[-1].arrival_s + 0.3 - records[0].arrival_s
        assert one.values["tokens_per_s"] == pytest.approx(12 * 3 / span_s)
        assert one.values["ttft_p99_ms"] == pytest.approx(200)
        assert one.values["tpot_p50_ms"] == pytest.approx(50)
        assert (one.values["sent"], one.values["mean_output_tokens"]) == (12, 3)
        assert one.values["shared"] == [[40, 6], [60, 6]]
        assert records[0].cached_tokens == 0  # nothing of the warm-up is left
    assert engine.flushes == 2
    times = [[r.arrival_s for r in one.drive.records] for _, one in done]
    assert times[0] != times[1]


def test_a_closed_cell_is_bound_by_its_users():
    cell = ClosedCell("c", 40, 4, 32, largest_output=11)
    ((_, one),), _ = measured(cell, [0], prefill_s=0.5, step_s=0.05)
    assert one.values["tokens_per_s"] == pytest.approx(4 * 11 / 1.0)
    assert (one.values["users"], one.values["sent"]) == (4, 32)
    assert one.values["ttft_p50_ms"] == pytest.approx(500)
    assert one.values["largest_send_lag_s"] == 0


def test_a_trace_is_sent_as_it_is(tmp_path: Any):
    path = tmp_path / "some.jsonl"
    path.write_text(
        '{"id": 1, "arrival_s": 4, "prompt": [[1, 9]], "output_tokens": 11}\n'
        '{"id": 0, "arrival_s": 0, "prompt": [[1, 5], [2, 3]], "output_tokens": 1}\n'
    )
    cell = TraceCell(path)
    assert cell.name == "trace-some"
    ((_, one),), _ = measured(cell, [0], prefill_s=0.5, step_s=0.05)
    assert one.values["tokens_per_s"] == pytest.approx(12 / 5.0)
    assert one.drive is not None
    assert [r.cached_tokens for r in one.drive.records] == [0, 5]
