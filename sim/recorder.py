"""What a run leaves behind: a sink takes finished rows, `StepRecorder` merges equal decode steps
into one row.
"""

import json
from typing import Any, Protocol

from granikv.core.step import ExtendShape, Segment, StepPlan, StepShape

# hot_used and cold_free after the steps, then hot_misses, evictions, retractions and
# migrated_tokens since the last.
Counters = tuple[int, int, int, int, int, int]


class RecordSink(Protocol):
    """Where rows go: `traces.records.RunWriter` on disk, `MemorySink` in memory. Order of columns
    as there.
    """

    def request(self, *row: Any) -> None:
        """One ended request."""

    def step(self, *row: Any) -> None:
        """One extend step, or consecutive decode steps of one unchanged batch."""


class StepRecorder:
    """Merges consecutive decode steps whose batch and plan are equal, so that stepping and jumping
    leave equal rows.
    """

    def __init__(self, sink: RecordSink, replica: int = 0) -> None:
        self._sink = sink
        self._replica = replica
        self._iteration = 0
        self._row: list[Any] | None = None
        self._segments: tuple[Segment, ...] = ()
        self._plan: StepPlan | None = None
        self._end_ns = 0
        self._json: dict[object, str] = {}

    def decode(
        self,
        start_ns: int,
        end_ns: int,
        steps: int,
        shape: StepShape,
        plan: StepPlan,
        counters: Counters,
    ) -> None:
        """Add `steps` decode steps of one batch; `shape` is the first one's."""
        last = self._row
        rows, segments = shape.rows, shape.segments
        if (
            last is not None
            and self._plan is not None
            and self._end_ns == start_ns
            and last[5] == rows
            and last[6] == shape.padded_rows
            and (self._segments is segments or self._segments == segments)
            and (self._plan is plan or self._plan == plan)
        ):
            last[1] += steps
            last[3] += end_ns - start_ns
            last[11:13] = counters[:2]
            for column, count in enumerate(counters[2:], 13):
                last[column] += count
        else:
            self.flush()
            self._row = [
                0,
                steps,
                start_ns,
                end_ns - start_ns,
                "decode",
                rows,
                shape.padded_rows,
                0,
                shape.private_tokens,
                self._to_json(segments),
                self._to_json(plan),
                *counters,
            ]
            self._segments, self._plan = segments, plan
        self._end_ns = end_ns

    def extend(self, start_ns: int, end_ns: int, shape: ExtendShape, counters: Counters) -> None:
        """Add one prefill step."""
        self.flush()
        rows = len(shape.requests)
        self._row = [
            0, 1, start_ns, end_ns - start_ns, "extend", rows, rows, shape.new_tokens, 0,
            "[]", json.dumps(shape.to_json()), *counters,
        ]  # fmt: skip
        self._plan = None
        self._end_ns = end_ns

    def flush(self) -> None:
        """Hand the pending row to the sink."""
        row = self._row
        if row is None:
            return
        row[0] = self._iteration
        row[2] = row[2] / 1e9
        row[3] = row[3] / 1e3
        self._iteration += row[1]
        self._row = None
        self._sink.step(*row, self._replica)

    def _to_json(self, value: tuple[Segment, ...] | StepPlan) -> str:
        text = self._json.get(value)
        if text is None:
            if len(self._json) > 4096:
                self._json.clear()
            body = value.to_json() if isinstance(value, StepPlan) else [list(s) for s in value]
            text = self._json[value] = json.dumps(body)
        return text
