"""SharedReads: which tokens the rows of a recorded decode step had in common.

A server of ours records that of HOT. What rows share in COLD, and all that they share on a stock
server, is read wherever it lies and recorded as part of a sum; it follows from the requests that
were decoding then, and their prompts.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Self

import numpy as np
import polars as pl
from numpy.typing import NDArray

from granikv.core.step import Launch, Mode, Segment, StepPlan
from granikv.traces.request import Run
from granikv.validate.compare.batch_spans import Span, batch_spans
from granikv.validate.compare.live_run import LiveRun

_ROWS_OFF, _SHARE_OFF = 2, 0.05


@dataclass(frozen=True, slots=True)
class _Readers:
    """When the requests behind one prefix began to decode and ended, sorted, in seconds."""

    length: int
    begin_s: NDArray[np.float64]
    end_s: NDArray[np.float64]

    @classmethod
    def of(cls, length: int, spans: Iterable[Span]) -> Self:
        """From the spans of the requests."""
        begin_s, end_s = np.sort(np.array([*spans]).reshape(-1, 2), axis=0).T
        return cls(length, begin_s, end_s)

    def at(self, time_s: float) -> int:
        """Requests that decode at a moment."""
        begun = int(np.searchsorted(self.begin_s, time_s, "right"))
        return begun - int(np.searchsorted(self.end_s, time_s, "right"))


@dataclass(frozen=True, slots=True)
class SharedReads:
    """Of one run; without readers every step says itself what it shared."""

    _readers: list[_Readers] = field(default_factory=list)
    _rows: _Readers | None = None
    _unknown: frozenset[int] = frozenset()

    @classmethod
    def of(cls, run: LiveRun) -> Self:
        """Prefixes of a run: first runs of prompts that two or more requests share."""
        if run.trace is None:
            return cls(_unknown=_before_promotion(run.steps))
        times = batch_spans(run.requests, run.steps)
        readers: dict[Run, list[list[Span]]] = defaultdict(list)
        for request in run.trace:
            if request.request_id in times and len(request.prompt) > 1:
                readers[request.prompt[0]].append(times[request.request_id])
        return cls(
            [
                _Readers.of(prefix.length, chain.from_iterable(spans))
                for prefix, spans in readers.items()
                if len(spans) > 1
            ],
            _Readers.of(0, chain.from_iterable(times.values())),
        )

    def knows(self, step: Mapping[str, Any]) -> bool:
        """Whether it is known what the rows of a decode step shared in COLD.

        It is not where more requests were decoding than the step has rows, by more than one in
        twenty: who was waiting to come back? (Fewer may be: rows that have ended run once more.)
        And not of a record without requests, where rows share a slab soon after.
        """
        if self._rows is None:
            return step["iter"] not in self._unknown
        waiting = self._rows.at(step["start_s"]) - int(step["rows"])
        return waiting <= max(_ROWS_OFF, _SHARE_OFF * int(step["rows"]))

    def filled(self, steps: pl.DataFrame) -> pl.DataFrame:
        """Recorded steps with the segments and private tokens that `at` finds."""
        if not self._readers:
            return steps
        found = [
            self.at(step) if step["kind"] == "decode" else ((), step["private_tokens"])
            for step in steps.iter_rows(named=True)
        ]
        plans = [
            json.dumps(plan_of(step, len(segments)).to_json())
            for step, (segments, _) in zip(steps.iter_rows(named=True), found, strict=True)
        ]
        return steps.with_columns(
            segments_json=pl.Series([json.dumps([list(s) for s in found_]) for found_, _ in found]),
            private_tokens=pl.Series([tokens for _, tokens in found], dtype=pl.Int64),
            plan_json=pl.when(pl.col("kind") == "decode")
            .then(pl.Series(plans))
            .otherwise(pl.col("plan_json")),
        )

    def at(self, step: dict[str, object]) -> tuple[tuple[Segment, ...], int]:
        """Segments of a decode step, and the tokens that are in none.

        Raises:
            ValueError: the step's segments cannot be read.
        """
        told = tuple(Segment(*part) for part in json.loads(str(step["segments_json"])))
        tokens = int(str(step["private_tokens"]))
        if not self._readers:
            return told, tokens
        found, left = list(told), int(str(step["rows"]))
        for length, readers in self._elsewhere(told, float(str(step["start_s"]))):
            # A row that has just ended decodes once more, so counts may be off by one; a row is
            # behind one prefix.
            rows = min(readers, left)
            left -= rows
            rows = min(rows, tokens // length) if length else 0
            if rows > 1:
                found.append(Segment(0, length, rows))
                tokens -= rows * length
        return tuple(found), tokens

    def _elsewhere(self, told: tuple[Segment, ...], time_s: float) -> list[tuple[int, int]]:
        """`(length, rows)` of what rows share of each prefix at a moment and no segment says; the
        length is 0 where segments say it all.

        A segment does not say whose it is: it is taken from the prefix whose readers are nearest
        in number, of those that are long enough.
        """
        left = [[readers.length, readers.at(time_s)] for readers in self._readers]
        for segment in sorted(told, key=lambda segment: -segment.length):
            fitting = [one for one in left if one[0] >= segment.length]
            if fitting:
                nearest = min(fitting, key=lambda one: abs(one[1] - segment.rows))
                nearest[0] -= segment.length
        return [(length, rows) for length, rows in left]


def _before_promotion(steps: pl.DataFrame) -> frozenset[int]:
    """Decode steps of rows that share no slab yet: they do in the next decode step, or are joined
    by others that do. A row alone, or more rows than later share, share nothing.
    """
    found, sharing_rows = set(), 0
    for step in reversed(steps.sort("start_s").rows(named=True)):
        if step["kind"] != "decode":
            continue
        if step["segments_json"] != "[]":
            sharing_rows = step["rows"]
        elif 2 <= step["rows"] <= sharing_rows:
            found.add(step["iter"])
        else:
            sharing_rows = 0
    return frozenset(found)


def plan_of(step: Mapping[str, Any], segments: int) -> StepPlan:
    """How a decode step of so many segments ran; what its server does not say, it read paged."""
    told = json.loads(str(step["plan_json"]) or "{}") or {}
    modes = tuple(map(Mode, told.get("modes", ())))[:segments]
    modes += (Mode.PAGED,) * (segments - len(modes))
    launch = Launch[told["launch"].upper()] if told.get("launch") else Launch.TWO_CALL
    return StepPlan(modes, launch, tuple(told.get("row_split", ())))
