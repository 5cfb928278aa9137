"""Prometheus metrics of HOT and COLD, beside SGLang's own and with the same labels.

They are made of the classes of SGLang's collector, which have to be imported at a certain moment
(its processes share files) and which a deployment may have replaced.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from granikv.core.allocator import PoolStats
from granikv.core.step import Mode
from granikv.sglang_plugin.step_plan import PlannedStep

_GAUGES = {
    "hot_used_tokens": "HOT slots in slabs.",
    "hot_free_tokens": "HOT slots that are free.",
    "hot_largest_free_run_tokens": "Longest slab that fits now.",
    "hot_fraction": "Share of all KV slots that is HOT.",
    "cold_free_tokens": "COLD slots that are free; what eviction could free is not counted.",
}
_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "hot_misses": ("Attempts to get a slab that found none.", ("reason",)),
    "evictions": ("Nodes of the prefix tree dropped for their room.", ()),
    "promotions": ("Nodes of the prefix tree copied into slabs.", ()),
    "promoted_tokens": ("Tokens copied from COLD into slabs.", ()),
    "moves": ("Times that the boundary between HOT and COLD has moved.", ()),
    "moved_bytes": ("KV copied by moves of the boundary and by compaction of HOT.", ()),
    "move_steps": ("Steps that waited for a piece of a move.", ()),
    "move_seconds": ("Host time of moves, between steps.", ()),
    "plan_seconds": ("Host time of planning decode steps.", ()),
    "decode_steps": ("Decode steps by their highest mode and by kernels.", ("mode", "variant")),
    "decode_rows": ("Rows of these steps.", ("mode", "variant")),
    "check_failures": ("Layers of checked steps that differed from the reference.", ()),
}


class StepCounts:
    """Decode steps and their rows so far, by mode and variant; cheap enough for every step.

    Attributes:
        steps: by (mode, variant).
        rows: likewise.
    """

    def __init__(self) -> None:
        self.steps: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.rows: defaultdict[tuple[str, str], int] = defaultdict(int)

    def add(self, step: PlannedStep) -> None:
        """One more step."""
        key = mode_of(step), step.variant
        self.steps[key] += 1
        self.rows[key] += step.shape.rows


def mode_of(step: PlannedStep) -> str:
    """The highest mode of a step's segments, as summaries of run records count it."""
    return max(step.plan.modes, default=Mode.PAGED).name.lower()


class PoolMetrics:
    """The metrics `granikv_*` of one scheduler.

    Args:
        collector: SGLang's `SchedulerMetricsCollector`.
    """

    def __init__(self, collector: Any) -> None:
        make_gauge, make_counter = type(collector.num_running_reqs), _counter_class(collector)
        self._labels: Mapping[str, Any] = collector.labels
        self._gauges = {
            name: make_gauge(
                name=f"granikv_{name}",
                documentation=text,
                labelnames=list(self._labels),
                multiprocess_mode="mostrecent",
            )
            for name, text in _GAUGES.items()
        }
        self._counters = {
            name: make_counter(
                name=f"granikv_{name}_total",
                documentation=text,
                labelnames=[*self._labels, *more],
            )
            for name, (text, more) in _COUNTERS.items()
        }
        self._published: defaultdict[tuple[str, ...], float] = defaultdict(float)

    def publish(
        self,
        pools: PoolStats,
        misses: Mapping[str, int],
        totals: Mapping[str, float],
        counts: StepCounts,
    ) -> None:
        """Set everything to where it stands.

        Args:
            pools: now.
            misses: since the start, by reason.
            totals: since the start, of every counter that has no labels of its own.
            counts: since the start.
        """
        values = {
            "hot_used_tokens": pools.hot_used,
            "hot_free_tokens": pools.hot_free,
            "hot_largest_free_run_tokens": pools.largest_free_run,
            "hot_fraction": pools.hot_tokens / pools.size_tokens,
            "cold_free_tokens": pools.cold_free,
        }
        for name, value in values.items():
            self._gauges[name].labels(**self._labels).set(value)
        self._count("hot_misses", (((reason,), count) for reason, count in misses.items()))
        self._count("decode_steps", counts.steps.items())
        self._count("decode_rows", counts.rows.items())
        for name, total in totals.items():
            self._count(name, [((), total)])

    def _count(self, name: str, totals: Iterable[tuple[tuple[str, ...], float]]) -> None:
        for values, total in totals:
            key = name, *values
            labels = dict(zip(_COUNTERS[name][1], values, strict=True))
            since = total - self._published[key]
            # Also by 0, so that a metric is there before anything has happened.
            self._counters[name].labels(**self._labels, **labels).inc(since)
            self._published[key] = total


def _counter_class(collector: Any) -> Any:
    return type(collector.num_retracted_reqs_total)
