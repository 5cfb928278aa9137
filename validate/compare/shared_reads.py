"""SharedReads: which tokens the rows of a recorded decode step had in common.

A server of ours records that. A stock server reads a row's tokens wherever they lie and records
their sum; what is shared follows from the requests that were decoding then, and their prompts.
"""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import polars as pl
from numpy.typing import NDArray

from granikv.core.step import Mode, Segment, StepPlan
from granikv.traces.request import Run
from granikv.validate.compare.live_run import LiveRun


@dataclass(frozen=True, slots=True)
class _Readers:
    """When the requests behind one prefix began to decode and ended, sorted, in seconds."""

    length: int
    begin_s: NDArray[np.float64]
    end_s: NDArray[np.float64]

    def at(self, time_s: float) -> int:
        """Requests that decode at a moment."""
        begun = int(np.searchsorted(self.begin_s, time_s, "right"))
        return begun - int(np.searchsorted(self.end_s, time_s, "right"))


@dataclass(frozen=True, slots=True)
class SharedReads:
    """Of one run; without readers every step says itself what it shared."""

    _readers: list[_Readers] = field(default_factory=list)

    @classmethod
    def of(cls, run: LiveRun) -> Self:
        """Prefixes of a stock server's run: first runs of prompts that two or more share."""
        if not run.is_stock or run.trace is None:
            return cls()
        times = {
            row["id"]: (row["first_token_s"], row["finish_s"])
            for row in run.requests.iter_rows(named=True)
            if row["first_token_s"] is not None
        }
        readers: dict[Run, list[tuple[float, float]]] = defaultdict(list)
        for request in run.trace:
            if request.request_id in times and len(request.prompt) > 1:
                begin_s, end_s = times[request.request_id]
                readers[request.prompt[0]].append((begin_s, np.inf if end_s is None else end_s))
        return cls(
            [
                _Readers(prefix.length, *np.sort(np.array(spans), axis=0).T)
                for prefix, spans in readers.items()
                if len(spans) > 1
            ]
        )

    def filled(self, steps: pl.DataFrame) -> pl.DataFrame:
        """Recorded steps with the segments and private tokens that `at` finds."""
        if not self._readers:
            return steps
        found = [
            self.at(step) if step["kind"] == "decode" else ((), step["private_tokens"])
            for step in steps.iter_rows(named=True)
        ]
        plans = [
            json.dumps(StepPlan((Mode.PAGED,) * len(segments)).to_json()) for segments, _ in found
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
        if told or not self._readers:
            return told, tokens
        time_s = float(str(step["start_s"]))
        left, found = int(str(step["rows"])), []
        for readers in self._readers:
            # A row that has just ended decodes once more, so counts may be off by one.
            rows = min(readers.at(time_s), left, tokens // readers.length)
            left -= rows
            if rows > 1:
                found.append(Segment(0, readers.length, rows))
                tokens -= rows * readers.length
        return tuple(found), tokens
