"""Records of a live server on disk: lines of JSON that survive a crash, and a header.

The scheduler's thread only puts objects into a queue. Another thread makes text of them; it wakes
up a few times a second, so that the scheduler does not have to share the interpreter with it after
every step. `granikv.traces.live_records.convert` makes run records of the folder.
"""

import json
import logging
import os
import queue
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from granikv.core.errors import ConfigError
from granikv.core.step import ExtendShape, Segment, StepPlan
from granikv.sglang_plugin.request_log import REQUEST_COLUMNS, RequestRecord
from granikv.sglang_plugin.server_facts import ServerFacts
from granikv.sglang_plugin.step_log import STEP_COLUMNS, StepRecord

SPOOL_FORMAT = "granikv-spool-1"
_POLL_S = 0.5  # a killed server loses at most the records of this time
_YIELD_S = 5e-5  # after each line: a sleep of 0 s may take the interpreter back at once
_CLOSE_S = 5.0
_MAX_WAITING = 20_000  # records of minutes, about 20 MB

logger = logging.getLogger(__name__)


class Recorder:
    """Spools records of one scheduler process into a folder, until it is closed or killed.

    Nothing here waits for the disk or raises once it is made: a record that finds the queue full,
    or comes after the disk has failed, is counted as dropped.

    Args:
        folder: for the files; made when it is missing.
        facts: of the server.
        replica: data-parallel rank, of which each has files of its own.
        max_waiting: records that may wait to be written.

    Raises:
        ConfigError: the folder holds a recording, or cannot be written to.

    Attributes:
        dropped_steps: step records that were not written.
        dropped_requests: request records that were not written.
    """

    def __init__(
        self,
        folder: Path,
        facts: ServerFacts,
        replica: int = 0,
        max_waiting: int = _MAX_WAITING,
    ) -> None:
        self.dropped_steps = 0
        self.dropped_requests = 0
        self._origin_s = time.perf_counter()
        self._origin = datetime.now(UTC)
        self._facts = facts
        self._replica = replica
        self._header = folder / ("header.json" if replica == 0 else f"header-rank{replica}.json")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._steps = (folder / f"steps-rank{replica}.jsonl").open("x")
            self._requests = (folder / f"requests-rank{replica}.jsonl").open("x")
            self._write_header(is_closed=False)
        except OSError as error:
            is_taken = isinstance(error, FileExistsError) and folder.is_dir()
            problem = "holds a recording" if is_taken else f"cannot be written to ({error})"
            raise ConfigError(f"{folder} {problem}; name another folder") from None
        self._text = _StepText()
        self._waiting: queue.Queue[StepRecord | RequestRecord] = queue.Queue(max_waiting)
        self._being_written: StepRecord | RequestRecord | None = None
        self._has_failed = False
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._run, name="granikv-recorder", daemon=True)
        self._writer.start()

    def step(self, record: StepRecord) -> None:
        """Take a step."""
        if not self._put(record):
            self.dropped_steps += 1

    def request(self, record: RequestRecord) -> None:
        """Take a request."""
        if not self._put(record):
            self.dropped_requests += 1

    def close(self) -> None:
        """Write what waits and the final header; a second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._writer.join(_CLOSE_S)
        if self._writer.is_alive():
            logger.warning("GraniKV: the recorder did not finish; its last records are missing")
            return
        self._count_unwritten()
        try:
            self._steps.close()
            self._requests.close()
            self._write_header(is_closed=True)
        except OSError as error:
            logger.warning("GraniKV: the recording could not be closed: %s", error)

    def _count_unwritten(self) -> None:
        """What the writer has left behind when it failed."""
        left = [*self._waiting.queue, self._being_written]
        self.dropped_steps += sum(isinstance(record, StepRecord) for record in left)
        self.dropped_requests += sum(isinstance(record, RequestRecord) for record in left)

    def _put(self, record: StepRecord | RequestRecord) -> bool:
        if self._has_failed or self._closing.is_set():
            return False
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            return False
        return True

    # ------------------------------------------------------------------ the writer's thread

    def _run(self) -> None:
        is_closing = False
        while not is_closing and not self._has_failed:
            is_closing = self._closing.wait(_POLL_S)
            try:
                self._write_waiting(is_closing)
                self._steps.flush()
                self._requests.flush()
            except Exception:  # a server must not end, nor a recording in silence
                self._has_failed = True
                logger.exception("GraniKV: recording into %s stops", self._header.parent)

    def _write_waiting(self, is_closing: bool) -> None:
        while True:
            try:
                record = self._waiting.get_nowait()
            except queue.Empty:
                return
            self._being_written = record
            if isinstance(record, StepRecord):
                _write_line(self._steps, self._text.row(record, self._origin_s))
            else:
                _write_line(self._requests, _request_row(record, self._origin_s))
            self._being_written = None
            if not is_closing:
                time.sleep(_YIELD_S)

    def _write_header(self, is_closed: bool) -> None:
        facts = self._facts
        header = {
            "format": SPOOL_FORMAT,
            "kind": "live",
            "model": facts.model,
            "gpu": facts.gpu,
            "size_tokens": facts.size_tokens,
            "hot_tokens": facts.hot_tokens,
            "clock_origin": self._origin.isoformat(),
            "versions": dict(facts.versions),
            "flags": dict(facts.flags),
            "replica": self._replica,
            "step_columns": STEP_COLUMNS,
            "request_columns": REQUEST_COLUMNS,
            "is_closed": is_closed,
            "dropped_steps": self.dropped_steps,
            "dropped_requests": self.dropped_requests,
        }
        whole = self._header.with_suffix(".tmp")
        whole.write_text(json.dumps(header, indent=1, default=str) + "\n")
        os.replace(whole, self._header)


class _StepText:
    """Step records as values for JSON; what is the same object as in the step before is kept."""

    def __init__(self) -> None:
        self._segments: tuple[Segment, ...] | None = None
        self._segments_text = ""
        self._plan: StepPlan | ExtendShape | None = None
        self._plan_text = "{}"

    def row(self, record: StepRecord, origin_s: float) -> list[Any]:
        """Values in the order of `STEP_COLUMNS`."""
        if record.segments_json is not self._segments:
            self._segments = record.segments_json
            self._segments_text = json.dumps([list(segment) for segment in self._segments])
        if record.plan_json is not self._plan:
            self._plan = record.plan_json
            self._plan_text = "{}" if self._plan is None else json.dumps(self._plan.to_json())
        plain = replace(
            record,
            start_s=round(record.start_s - origin_s, 7),
            gpu_us=round(record.gpu_us, 2),
            segments_json=self._segments_text,
            plan_json=self._plan_text,
        )
        return [getattr(plain, name) for name in STEP_COLUMNS]


def _request_row(record: RequestRecord, origin_s: float) -> list[Any]:
    row: list[Any] = []
    for name in REQUEST_COLUMNS:
        value = getattr(record, name)
        is_time = name.endswith("_s") and value is not None
        row.append(round(value - origin_s, 7) if is_time else value)
    return row


def _write_line(file: TextIO, row: list[Any]) -> None:
    file.write(json.dumps(row) + "\n")
