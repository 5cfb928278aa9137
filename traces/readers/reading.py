"""Reading: the state of one pass over a trace file, shared by all format readers."""

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from granikv.core.errors import TraceFormatError
from granikv.traces.options import PER_SECOND, ReadOptions, ReadReport, TimeUnit
from granikv.traces.request import Request
from granikv.traces.segments import BlockNames

# A request with its time in the file's own unit: integers stay exact until the first one is
# subtracted.
Timed = tuple[float, Request]


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """A text file to read, unpacked when its name ends in .gz.

    Raises:
        TraceFormatError: it cannot be opened, unpacked or decoded, now or further on.
    """
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8-sig", newline="") as file:
                yield file
        else:
            with path.open("r", encoding="utf-8-sig", newline="") as file:
                yield file
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise TraceFormatError(
            f"{path} cannot be read to its end ({error}); get the whole file again."
        ) from None


class Reading:
    """One pass over one trace: where it is, what it may do, what it has counted.

    Attributes:
        path: the file or folder being read.
        file: the file of the current row, for messages.
        row: number of the current row, from 1, for messages.
        per_second: units of the file's time stamps in one second.
        origin: time stamp that becomes 0 s; None takes the first request's.
    """

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self.path = path
        self.file = path
        self.options = options
        self.report = ReadReport()
        self.row = 0
        self.per_second = 1
        self.origin: float | None = None
        self.names = BlockNames()

    def error(self, field: str, problem: str, advice: str) -> TraceFormatError:
        """The error for a field of the current row."""
        return TraceFormatError(f"{self.file}, row {self.row}, {field}: {problem}; {advice}.")

    def use_time_unit(self, unit: TimeUnit) -> None:
        """Set the time unit: the caller's, or this one."""
        self.per_second = PER_SECOND[self.options.time_unit or unit]

    def json_rows(self, path: Path | None = None) -> Iterator[dict[str, Any]]:
        """Objects of a JSONL file, one at a time; empty lines are skipped."""
        self.file = path or self.path
        with open_text(self.file) as lines:
            for self.row, line in enumerate(lines, 1):
                if line.isspace():
                    continue
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise self.error(
                        "line", f"not JSON ({error})", "repair or remove the row"
                    ) from None
                if not isinstance(record, dict):
                    raise self.error("line", "not a JSON object", "repair or remove the row")
                yield record

    def integer(self, record: dict[str, Any], key: str, minimum: int = 0) -> int:
        """An integer field of a JSON row.

        Raises:
            TraceFormatError: it is missing, not an integer or below `minimum`.
        """
        value = record.get(key)
        if type(value) is not int or value < minimum:
            raise self.error(
                key,
                f"want an integer of at least {minimum}, got {value!r}",
                "repair or remove the row",
            )
        return value

    def number(self, record: dict[str, Any], key: str) -> float:
        """A finite number of a JSON row, integers as they are.

        Raises:
            TraceFormatError: it is missing or not a finite number.
        """
        value = record.get(key)
        if type(value) in (int, float) and abs(value) < float("inf"):  # type: ignore[arg-type]
            return value  # type: ignore[return-value]
        raise self.error(key, f"want a number, got {value!r}", "repair or remove the row")

    def unsigned(self, record: dict[str, Any], key: str) -> list[int]:
        """A list of integers that are 0 or more.

        Raises:
            TraceFormatError: it is missing or anything else.
        """
        value = record.get(key)
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise self.error(key, "want a list of integers", "repair or remove the row")
        if value and min(value) < 0:
            raise self.error(key, f"negative number {min(value)}", "write unsigned integers")
        return value

    def block_ids(self, record: dict[str, Any]) -> list[int]:
        """The block ids (`hash_ids`) of a JSON row as segments."""
        return self.names.segments(self.unsigned(record, "hash_ids"))

    def admit(self, prompt_tokens: int, output_tokens: int) -> tuple[int, int, int] | None:
        """Count a row: its request id, prompt and output tokens, or None when it is dropped."""
        report = self.report
        report.rows_read += 1
        if prompt_tokens < 1:
            if self.options.drop_failed:
                report.dropped["no prompt tokens"] += 1
                return None
            report.clamped["no prompt tokens"] += 1
            prompt_tokens = 1
        if output_tokens < 1:
            if self.options.drop_failed:
                report.dropped["no output tokens"] += 1
                return None
            report.clamped["no output tokens"] += 1
            output_tokens = 1
        request_id = report.kept
        report.kept += 1
        return request_id, prompt_tokens, output_tokens
