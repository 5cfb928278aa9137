"""Run records of a live server: every step once, on the GPU's clock, and no request waits."""

import json
import signal
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang.srt.mem_cache.radix_cache", reason="needs sglang 0.5.17")

import observer_support as support  # noqa: E402

from granikv.core.errors import ConfigError  # noqa: E402
from granikv.core.step import ExtendShape, Mode, Segment, StepPlan  # noqa: E402
from granikv.sglang_plugin import recorder as recorder_module  # noqa: E402
from granikv.sglang_plugin.observer import Observer  # noqa: E402
from granikv.sglang_plugin.pools import HotColdPools  # noqa: E402
from granikv.sglang_plugin.recorder import Recorder  # noqa: E402
from granikv.sglang_plugin.request_log import REQUEST_COLUMNS, RequestRecord  # noqa: E402
from granikv.sglang_plugin.server_facts import _FLAGS, ServerFacts  # noqa: E402
from granikv.sglang_plugin.step_log import STEP_COLUMNS, StepLog, StepRecord  # noqa: E402
from granikv.sglang_plugin.step_timer import CudaTimer, HostTimer  # noqa: E402

FACTS = ServerFacts("model", "cpu", 160, 40, {"granikv": "0"}, {"tp_size": 1})


# ---------------------------------------------------------------------- timing


class Gpu:
    """One stream: work and events happen in the order in which they are enqueued."""

    def __init__(self):
        self.host_s = 100.0
        self.free_s = 0.0

    def work(self, duration_s):
        self.free_s = max(self.free_s, self.host_s) + duration_s

    def event(self):
        gpu = self

        class Event:
            def record(self, _stream):
                self.at_s = max(gpu.free_s, gpu.host_s)

            def query(self):
                return self.at_s <= gpu.host_s

            def elapsed_time(self, later):
                return (later.at_s - self.at_s) * 1e3

        return Event()

    def timer(self):
        return CudaTimer(None, self.event, lambda: self.host_s)


def launch(gpu, timer, duration_s, host_s=0.001):
    span = timer.begin()
    gpu.work(duration_s)
    timer.end(span)
    gpu.host_s += host_s
    return span


def test_an_overlapped_step_starts_when_the_one_before_it_ends():
    gpu = Gpu()
    timer = gpu.timer()
    first = launch(gpu, timer, 0.010)
    second = launch(gpu, timer, 0.004)
    assert timer.read(first) is None
    gpu.host_s = 101.0
    third = launch(gpu, timer, 0.002)  # the GPU has been idle since
    gpu.host_s = 102.0
    assert timer.read(first) == pytest.approx((100.0, 10_000))
    assert timer.read(second) == pytest.approx((100.010, 4_000))
    assert timer.read(third) == pytest.approx((101.0, 2_000))


def test_events_are_used_again_and_the_clock_does_not_drift():
    """An hour without an idle moment: the start is still the sum of all durations."""
    gpu, made = Gpu(), []
    timer = CudaTimer(None, lambda: made.append(1) or gpu.event(), lambda: gpu.host_s)
    launched, start_s = [launch(gpu, timer, 7.0)], 100.0
    for _ in range(500):
        gpu.host_s = gpu.free_s - 1.0
        launched.append(launch(gpu, timer, 7.0))
        gpu.host_s = gpu.free_s - 6.0
        assert timer.read(launched.pop(0)) == pytest.approx((start_s, 7e6))
        start_s += 7.0
    assert len(made) <= 6


# ---------------------------------------------------------------------- steps


def step_log(tree, timer, step=None):
    """A log of a server whose graphs have an even number of rows."""
    records = []
    pools = HotColdPools(tree, lambda: step)
    log = StepLog(pools, timer, lambda rows, _: rows + rows % 2, records.append)
    return log, pools, records


def test_columns_are_those_of_run_records():
    from granikv.traces import live_records, records

    assert tuple(records.STEP_SCHEMA) == STEP_COLUMNS
    assert tuple(StepRecord.__dataclass_fields__) == STEP_COLUMNS
    assert tuple(live_records._REQUEST_SCHEMA) == REQUEST_COLUMNS
    assert tuple(RequestRecord.__dataclass_fields__) == REQUEST_COLUMNS
    assert set(REQUEST_COLUMNS) - {"rid"} <= set(records.REQUEST_SCHEMA)


def test_a_decode_step_says_what_ran_and_what_the_pools_did_since():
    tree = support.make_tree()
    step = support.planned((Mode.CASCADE, Mode.DENSE), rows=2, private_tokens=9)
    log, pools, records = step_log(tree, HostTimer(), step)
    assert log.run(lambda: "result", support.decode(1)) == "result"
    support.share(tree, 10)
    pools.retractions += 3
    log.processed(support.decode(1))
    log.run(lambda: None, support.decode(2))
    support.share(tree, 31, first=2)  # 30 HOT slots are left
    log.processed(support.decode(2))
    first, second = records
    assert (first.iter, first.kind, first.rows, first.private_tokens) == (1, "decode", 2, 9)
    assert first.segments_json is step.shape.segments
    assert first.plan_json is step.plan
    assert (first.hot_used, first.cold_free) == (10, 120)
    assert (first.migrated_tokens, first.retractions, first.hot_misses) == (10, 3, 0)
    assert (second.migrated_tokens, second.retractions, second.hot_misses) == (0, 0, 1)
    assert second.start_s >= first.start_s + first.gpu_us / 1e6


def test_a_step_that_nobody_planned_reads_its_rows_alone():
    log, _, records = step_log(support.make_tree(), HostTimer())
    log.run(lambda: None, support.decode(1, rows=3))
    log.processed(support.decode(1))
    assert (records[0].rows, records[0].padded_rows, records[0].private_tokens) == (3, 4, 60)
    assert (records[0].segments_json, records[0].plan_json) == ((), None)


def test_overlapped_steps_are_recorded_in_order_once_the_gpu_is_done():
    gpu = Gpu()
    log, _, records = step_log(support.make_tree(), gpu.timer(), support.planned())
    log.run(lambda: gpu.work(0.5), support.extend(1, (400, 0), (100, 7)))
    log.run(lambda: gpu.work(0.1), support.decode(2))
    log.processed(support.extend(1, (400, 0), (100, 7)))
    assert records == []
    gpu.host_s = 100.55
    log.drain()
    assert [(r.kind, r.prefill_tokens, r.rows) for r in records] == [("extend", 500, 2)]
    assert records[0].plan_json == ExtendShape(((400, 0), (100, 7)))
    log.processed(support.decode(2))
    assert len(records) == 1
    gpu.host_s = 101.0
    log.drain()
    assert records[1].start_s == pytest.approx(100.5)
    assert records[1].gpu_us == pytest.approx(1e5)


def test_steps_that_are_never_processed_are_counted():
    log, _, records = step_log(support.make_tree(), HostTimer())
    for iteration in range(300):
        log.run(lambda: None, support.decode(iteration))
    log.processed(support.decode(299))
    assert log.lost == 299
    assert [record.iter for record in records] == [299]


def test_totals_go_on_after_a_flush():
    tree = support.make_tree()
    pools = HotColdPools(tree, lambda: None)
    support.share(tree, support.HOT + 1)
    assert pools.misses() == {"too_long": 1}
    tree.reset()
    tree.token_to_kv_pool_allocator.clear()
    support.share(tree, 10)
    support.share(tree, support.HOT - 1, first=2)
    assert pools.misses() == {"too_long": 1, "no_room": 1}
    assert pools.totals() == (2, 0, 0, 10)


# ---------------------------------------------------------------------- files


SEGMENTS = (Segment(1, 10, 2),)


def step_record(iteration, segments=SEGMENTS):
    plan = StepPlan((Mode.DENSE,) * len(segments))
    return StepRecord(
        iteration, 1, time.perf_counter(), 42.123, "decode", 2, 2, 0, 7, segments, plan,
        10, 120, 0, 0, 0, 0, 0,
    )  # fmt: skip


def lines_of(folder, name):
    return [json.loads(line) for line in (folder / f"{name}-rank0.jsonl").read_text().splitlines()]


def header_of(folder):
    return json.loads((folder / "header.json").read_text())


def test_what_is_recorded_is_in_the_files(tmp_path):
    folder = tmp_path / "new" / "run"
    recorder = Recorder(folder, FACTS)
    assert header_of(folder)["is_closed"] is False
    recorder.step(step_record(1))
    recorder.step(step_record(2, ()))
    now_s = time.perf_counter()
    recorder.request(RequestRecord("7", now_s, None, now_s + 1, 12, 0, 10, 8, "aborted"))
    recorder.close()
    recorder.close()
    first, second = (
        dict(zip(STEP_COLUMNS, row, strict=True)) for row in lines_of(folder, "steps")
    )  # fmt: skip
    assert (first["iter"], first["gpu_us"]) == (1, 42.12)
    assert 0 <= first["start_s"] < 60
    assert first["segments_json"] == "[[1, 10, 2]]"
    assert json.loads(first["plan_json"]) == StepPlan((Mode.DENSE,)).to_json()
    assert second["segments_json"] == "[]"
    (row,) = lines_of(folder, "requests")
    request = dict(zip(REQUEST_COLUMNS, row, strict=True))
    assert request["finish_s"] - request["arrival_s"] == pytest.approx(1)
    assert (request["rid"], request["first_token_s"], request["status"]) == ("7", None, "aborted")
    header = header_of(folder)
    assert (header["is_closed"], header["dropped_steps"]) == (True, 0)
    assert header["size_tokens"] == 160


def test_lines_are_on_disk_before_the_recorder_is_closed(tmp_path):
    recorder = Recorder(tmp_path, FACTS)
    recorder.step(step_record(1))
    deadline_s = time.monotonic() + 20
    while not lines_of(tmp_path, "steps") and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert len(lines_of(tmp_path, "steps")) == 1
    recorder.close()


def test_a_full_queue_drops_and_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder_module, "_POLL_S", 1e6)
    recorder = Recorder(tmp_path, FACTS, max_waiting=3)
    for iteration in range(5):
        recorder.step(step_record(iteration))
    recorder.request(RequestRecord("7", 0.0, None, 1.0, 12, 0, 10, 8, "finished"))
    recorder.close()
    recorder.step(step_record(9))
    assert (recorder.dropped_steps, recorder.dropped_requests) == (3, 1)
    header = header_of(tmp_path)
    assert (header["dropped_steps"], header["dropped_requests"]) == (2, 1)
    assert [row[0] for row in lines_of(tmp_path, "steps")] == [0, 1, 2]


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(recorder_module, "_write_line", fail)
    recorder = Recorder(tmp_path, FACTS)
    recorder.step(step_record(1))
    recorder.request(RequestRecord("7", 0.0, None, 1.0, 12, 0, 10, 8, "finished"))
    recorder._writer.join(20)
    recorder.step(step_record(2))
    recorder.close()
    assert (recorder.dropped_steps, recorder.dropped_requests) == (2, 1)
    assert header_of(tmp_path)["dropped_steps"] == 2
    assert "recording into" in caplog.text


def test_a_recording_is_not_overwritten(tmp_path):
    Recorder(tmp_path, FACTS).close()
    with pytest.raises(ConfigError, match="holds a recording"):
        Recorder(tmp_path, FACTS)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        Recorder(tmp_path / "file", FACTS)


_TERMINATED = """
import os, signal, sys, time
from pathlib import Path
from granikv.sglang_plugin import recorder, watch
from granikv.sglang_plugin.request_log import RequestRecord
from granikv.sglang_plugin.server_facts import ServerFacts
recording = recorder.Recorder(Path(sys.argv[1]), ServerFacts("m", "cpu", 8, 4, {}, {}))
watch._at_exit(recording.close)
recording.request(RequestRecord("7", 0.0, None, 1.0, 12, 0, 10, 8, "finished"))
if sys.argv[2] == "SIGTERM":
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


@pytest.mark.parametrize("end", ["SIGTERM", "exit"])
def test_a_server_that_ends_closes_its_files(tmp_path, end):
    done = subprocess.run(
        [sys.executable, "-c", _TERMINATED, str(tmp_path), end], capture_output=True, check=False
    )
    assert done.returncode == (-signal.SIGTERM if end == "SIGTERM" else 0), done.stderr[-2000:]
    assert header_of(tmp_path)["is_closed"]
    assert len(lines_of(tmp_path, "requests")) == 1


# ---------------------------------------------------------------------- hooks


def recording_observer(monkeypatch, folder, scheduler):
    monkeypatch.setenv("GRANIKV_RECORD", str(folder))
    monkeypatch.setattr("granikv.sglang_plugin.watch._at_exit", lambda _: None)
    observer = Observer()
    observer.after_init(None, scheduler)
    return observer


def run(observer, scheduler, batch):
    return observer.around_run_batch(lambda *call: call, scheduler, batch, "rest")


def test_a_run_comes_back_as_run_records(tmp_path, monkeypatch):
    from granikv.traces.live_records import convert
    from granikv.traces.records import read_run

    tree = support.make_tree()
    step = support.planned(rows=2)
    scheduler = support.make_scheduler(tree, support.make_backend(step))
    observer = recording_observer(monkeypatch, tmp_path, scheduler)
    batches = [support.extend(1, (2, 10)), support.decode(2)]
    for batch in batches:
        assert run(observer, scheduler, batch) == (scheduler, batch, "rest")
    node = support.share(tree, 10)
    observer.after_retract_decode(
        ([None], 0.5, [support.request("8", None, 0, True)]), SimpleNamespace(tree_cache=tree)
    )
    for batch in batches:
        observer.after_process_batch_result(None, scheduler, batch, None)
    observer.after_release_kv_cache(None, support.request("7", node), tree)
    observer.after_release_kv_cache(None, support.request("warm-up", node, 1, True), tree)
    running = support.request("9", node)
    running.finished_reason = None  # it was retracted
    observer.after_release_kv_cache(None, running, tree, is_insert=False)
    observer.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(tmp_path)
    found = read_run(tmp_path)
    assert (found.header.status, found.header.model, found.header.gpu) == (
        "complete", "model", "cpu",
    )  # fmt: skip
    assert (found.header.size_tokens, found.header.hot_tokens) == (160, support.HOT)
    assert found.header.flags["GRANIKV_RECORD"] == str(tmp_path)
    assert found.header.flags["max_running_requests"] == 64
    steps = found.steps.collect()
    assert steps["kind"].to_list() == ["extend", "decode"]
    assert [json.loads(plan) for plan in steps["plan_json"]] == [
        {"extend": [[2, 10]]}, step.plan.to_json(),
    ]  # fmt: skip
    assert steps["retractions"].to_list() == [1, 0]
    assert steps["migrated_tokens"].to_list() == [10, 0]
    columns = ("id", "prompt_tokens", "output_tokens", "cached_tokens", "hot_tokens", "status")
    assert found.requests.select(columns).collect().rows() == [
        (8, 12, 0, 10, 0, "aborted"),
        (7, 12, 3, 10, 10, "finished"),
        (-1, 12, 1, 10, 10, "aborted"),
    ]
    times = found.requests.select("arrival_s", "first_token_s", "finish_s").collect()
    assert times["first_token_s"].is_null().to_list() == [True, False, False]
    assert ((times["arrival_s"] >= 0) & (times["finish_s"] >= times["arrival_s"])).all()


def test_only_the_first_rank_records(tmp_path, monkeypatch):
    tree = support.make_tree()
    ranks = SimpleNamespace(tp_rank=1, dp_rank=None)
    scheduler = support.make_scheduler(tree, ps=ranks)
    observer = recording_observer(monkeypatch, tmp_path / "none", scheduler)
    run(observer, scheduler, support.decode(1))
    observer.after_process_batch_result(None, scheduler, support.decode(1))
    observer.after_release_kv_cache(None, support.request("7", support.share(tree, 10)), tree)
    observer.close()
    assert not (tmp_path / "none").exists()


def test_a_server_with_another_tree_is_left_alone(tmp_path, monkeypatch):
    theirs = SimpleNamespace(tree_cache="SGLang's")  # nothing else of it may be read
    observer = recording_observer(monkeypatch, tmp_path / "none", theirs)
    batch = SimpleNamespace(tree_cache="SGLang's")
    assert run(observer, theirs, batch) == (theirs, batch, "rest")
    observer.after_process_batch_result(None, theirs, batch)
    observer.before_on_idle(theirs)
    observer.after_retract_decode(([1], 0.5, [2]), batch)
    observer.after_release_kv_cache(None, SimpleNamespace(finished_reason=1), "SGLang's")
    observer.close()
    assert not (tmp_path / "none").exists()


def test_what_is_hooked_and_read_is_there():
    """A function or field that SGLang has renamed would show only in a running server."""
    import inspect

    from sglang.srt.managers.schedule_batch import FINISH_ABORT, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.metrics_reporter import (
        SchedulerMetricsReporter,
    )
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.mem_cache.common import release_kv_cache
    from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats
    from sglang.srt.server_args import ServerArgs

    def parameters(call):
        return list(inspect.signature(call).parameters)

    assert parameters(Scheduler.run_batch)[:2] == ["self", "batch"]
    assert parameters(Scheduler.process_batch_result)[:2] == ["self", "batch"]
    assert parameters(Scheduler.on_idle) == ["self"]
    assert parameters(ScheduleBatch.retract_decode)[0] == "self"
    assert parameters(release_kv_cache)[:2] == ["req", "tree_cache"]
    assert parameters(SchedulerMetricsReporter.report_decode_stats)[0] == "self"
    read = {"forward_iter", "seq_lens_cpu", "extend_lens", "prefix_lens", "reqs", "tree_cache"}
    assert read <= set(ScheduleBatch.__dataclass_fields__)
    assert "can_run_cuda_graph" in GenerationBatchResult.__dataclass_fields__
    assert {"scheduler_recv_time", "prefill_finished_time"} <= set(
        SchedulerReqTimeStats.__dataclass_fields__
    )
    assert set(_FLAGS) <= set(ServerArgs.__dataclass_fields__)
    assert FINISH_ABORT().to_json()["type"] == "abort"
