"""Metrics and the log line: the state of the pools, in the words and labels of SGLang's own."""

import logging
import os
import subprocess
import sys
from collections import Counter as Tally
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang.srt.mem_cache.radix_cache", reason="needs sglang 0.5.17")

import observer_support as support  # noqa: E402

from granikv.core.step import Mode  # noqa: E402
from granikv.sglang_plugin import observer as observer_module  # noqa: E402
from granikv.sglang_plugin.metrics import PoolMetrics, StepCounts  # noqa: E402
from granikv.sglang_plugin.observer import Observer  # noqa: E402

LABELS = {"model_name": "model", "tp_rank": 0}


class Metric:
    """A metric of Prometheus' client, as much of it as is called."""

    def __init__(self, made, name, documentation, labelnames, multiprocess_mode=None):
        assert documentation
        self.names, self.multiprocess_mode = list(labelnames), multiprocess_mode
        self.values = Tally()
        made[name] = self

    def labels(self, **values):
        assert list(values) == self.names
        own = tuple(value for name, value in values.items() if name not in LABELS)
        return SimpleNamespace(
            set=lambda value: self.values.update({own: value - self.values[own]}),
            inc=lambda value: self.values.update({own: value}),
        )


def make_collector():
    """SGLang's collector with classes that remember, and what has been made of them."""
    made = {}

    class Gauge(Metric):
        def __init__(self, **arguments):
            super().__init__(made, **arguments)

    class Counter(Metric):
        def __init__(self, name, documentation, labelnames):
            super().__init__(made, name, documentation, labelnames)

    collector = SimpleNamespace(
        labels=LABELS,
        num_running_reqs=Gauge(
            name="theirs", documentation="1", labelnames=[], multiprocess_mode="mostrecent"
        ),
        num_retracted_reqs_total=Counter("theirs too", "1", []),
    )
    made.clear()
    return collector, made


def watched(monkeypatch, tree, backend, collector):
    monkeypatch.setattr(observer_module, "_PUBLISH_S", 0.0)
    scheduler = support.make_scheduler(tree, backend, collector)
    observer = Observer()
    observer.after_init(None, scheduler)
    return observer, scheduler


def test_metrics_follow_the_pools_and_the_steps(monkeypatch):
    tree, backend = support.make_tree(), support.make_backend(failures=0)
    collector, made = make_collector()
    observer, scheduler = watched(monkeypatch, tree, backend, collector)
    steps = [
        support.planned((), rows=3),
        support.planned((Mode.PAGED, Mode.CASCADE), rows=4),
        support.planned((Mode.DENSE, Mode.PAGED), rows=5, variant="beside"),
        support.planned((Mode.DENSE,), rows=6, variant="beside"),
    ]
    support.share(tree, 10)
    for iteration, step in enumerate(steps):
        backend.decode_backend.last_step = step
        batch = support.decode(iteration)
        observer.around_run_batch(lambda *_: None, scheduler, batch)
        observer.after_process_batch_result(None, scheduler, batch)
    observer.around_run_batch(lambda *_: None, scheduler, support.extend(9, (100, 0)))
    support.share(tree, 31, first=2)
    support.share(tree, 41, first=3)
    tree.repartitioner = SimpleNamespace(
        moves=2, moved_bytes=640, moved_tokens=10, steps=3, busy_ns=5_000_000
    )
    backend.decode_backend.check.failures = 2
    observer.before_on_idle(scheduler)
    observer.before_on_idle(scheduler)
    assert {name: dict(metric.values) for name, metric in made.items()} == {
        "granikv_hot_used_tokens": {(): 10},
        "granikv_hot_free_tokens": {(): 30},
        "granikv_hot_largest_free_run_tokens": {(): 30},
        "granikv_hot_fraction": {(): 0.25},
        "granikv_cold_free_tokens": {(): 120 - 31 - 41},
        "granikv_hot_misses_total": {("no_room",): 1, ("too_long",): 1},
        "granikv_evictions_total": {(): 0},
        "granikv_promotions_total": {(): 1},
        "granikv_promoted_tokens_total": {(): 10},
        "granikv_moves_total": {(): 2},
        "granikv_moved_bytes_total": {(): 640},
        "granikv_move_steps_total": {(): 3},
        "granikv_move_seconds_total": {(): 0.005},
        "granikv_plan_seconds_total": {(): 0.0},
        "granikv_decode_steps_total": {
            ("paged", "stream"): 1, ("cascade", "stream"): 1, ("dense", "beside"): 2,
        },
        "granikv_decode_rows_total": {
            ("paged", "stream"): 3, ("cascade", "stream"): 4, ("dense", "beside"): 11,
        },
        "granikv_check_failures_total": {(): 2},
    }  # fmt: skip
    gauges = [metric for metric in made.values() if metric.multiprocess_mode]
    assert {metric.multiprocess_mode for metric in gauges} == {"mostrecent"}
    assert len(gauges) == 5


def test_without_enable_metrics_nothing_is_made(monkeypatch):
    tree = support.make_tree()
    observer, scheduler = watched(monkeypatch, tree, support.make_backend(), None)
    batch = support.decode(1)
    assert observer.around_run_batch(lambda *_: "result", scheduler, batch) == "result"
    observer.after_process_batch_result(None, scheduler, batch)
    observer.before_on_idle(scheduler)


def report(observer, tree, count, is_stats_logging_rank=True):
    reporter = SimpleNamespace(
        forward_ct_decode=count,
        decode_log_interval=40,
        is_stats_logging_rank=is_stats_logging_rank,
        scheduler=SimpleNamespace(tree_cache=tree),
    )
    observer.after_report_decode_stats(None, reporter, True, running_batch=None)


def test_a_line_beside_every_decode_log(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    tree = support.make_tree()
    modes = (Mode.DENSE, Mode.CASCADE, Mode.CASCADE)
    backend = support.make_backend(support.planned(modes, variant="split"))
    observer, _ = watched(monkeypatch, tree, backend, None)
    support.share(tree, 10)
    support.share(tree, 41, first=2)
    report(observer, tree, 39)
    report(observer, tree, 80, is_stats_logging_rank=False)
    report(observer, "SGLang's", 80)
    assert caplog.messages == []
    report(observer, tree, 80)
    assert caplog.messages == [
        "GraniKV: HOT 10/40 (largest free run 30), COLD free 79, HOT misses 1, promoted tokens 10, "
        "last step: 1 dense + 2 cascade, variant split, planning 0 us a step"
    ]
    backend.decode_backend.last_step = None
    report(observer, tree, 120)
    assert caplog.messages[-1].endswith("last step: not planned, planning 0 us a step")
    backend.decode_backend.planned_steps, backend.decode_backend.planned_ns = 4, 200_000
    report(observer, tree, 160)
    assert caplog.messages[-1].endswith("planning 50 us a step")
    report(observer, tree, 200)
    assert caplog.messages[-1].endswith("planning 0 us a step")


# In a process of its own: where Prometheus keeps its values is settled at its import.
_REAL = """
import os
from prometheus_client import Counter, CollectorRegistry, Gauge, generate_latest, multiprocess
from types import SimpleNamespace
from granikv.core.allocator import HotColdAllocator
from granikv.sglang_plugin.metrics import PoolMetrics, StepCounts

labels = {"model_name": "m", "tp_rank": 0}
collector = SimpleNamespace(
    labels=labels,
    num_running_reqs=Gauge("sglang:a", "a", labels.keys(), multiprocess_mode="mostrecent"),
    num_retracted_reqs_total=Counter("sglang:b_total", "b", labels.keys()),
)
metrics = PoolMetrics(collector)
for misses in ({"no_room": 2}, {"no_room": 5}):
    totals = {"promoted_tokens": 7, "check_failures": 0, "moved_bytes": 4096}
    metrics.publish(HotColdAllocator(100, 25).stats(), misses, totals, StepCounts())
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_prometheus_itself_takes_them(tmp_path):
    pytest.importorskip("prometheus_client")
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _REAL], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert 'granikv_hot_free_tokens{model_name="m",tp_rank="0"} 25.0' in lines
    assert 'granikv_hot_misses_total{model_name="m",reason="no_room",tp_rank="0"} 5.0' in lines
    assert 'granikv_promoted_tokens_total{model_name="m",tp_rank="0"} 7.0' in lines
    assert 'granikv_moved_bytes_total{model_name="m",tp_rank="0"} 4096.0' in lines
    assert 'granikv_check_failures_total{model_name="m",tp_rank="0"} 0.0' in lines


def test_the_classes_are_taken_from_sglangs_collector():
    """Its attributes are looked up by name."""
    import inspect

    from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector

    source = inspect.getsource(SchedulerMetricsCollector.__init__)
    assert "self.num_running_reqs = Gauge(" in source
    assert "self.num_retracted_reqs_total = Counter(" in source
    assert "self.labels = labels" in source


def test_counts_are_totals():
    counts = StepCounts()
    collector, made = make_collector()
    metrics = PoolMetrics(collector)
    pools = support.make_tree().token_to_kv_pool_allocator.core.stats()
    for rows in (1, 2, 3):
        counts.add(support.planned(rows=rows))
        metrics.publish(pools, {}, {"evictions": rows}, counts)
    assert made["granikv_decode_rows_total"].values == {("cascade", "stream"): 6}
    assert made["granikv_evictions_total"].values == {(): 3}


def test_server_info_says_where_everything_stands(monkeypatch):
    tree = support.make_tree()
    backend = support.make_backend(support.planned())
    backend.decode_backend.check = SimpleNamespace(steps=5, failures=2, largest_error=0.25)
    backend.decode_backend.planned_steps, backend.decode_backend.planned_ns = 4, 200_000
    observer, scheduler = watched(monkeypatch, tree, backend, None)
    support.share(tree, 10)
    support.share(tree, 41, first=2)
    answer = SimpleNamespace(internal_state={"last_gen_throughput": 1.0})
    observer.after_get_internal_state(answer, scheduler, "request")
    assert answer.internal_state["granikv"] == {
        "hot_tokens": 40, "hot_used_tokens": 10, "cold_free_tokens": 79, "hot_misses": 1,
        "evictions": 0, "retractions": 0, "promotions": 1, "promoted_tokens": 10,
        "decode_steps": 4, "plan_us": 50.0,
        "checked_steps": 5, "check_failures": 2, "check_largest_error": 0.25,
    }  # fmt: skip
    theirs = SimpleNamespace(internal_state={})
    observer.after_get_internal_state(theirs, SimpleNamespace(tree_cache="SGLang's"))
    assert theirs.internal_state == {}
