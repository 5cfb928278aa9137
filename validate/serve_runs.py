"""serve_runs: requests and recorded steps of a live run become run records. Needs polars.

A server that ran with `GRANIKV_RECORD` leaves in that folder:

- `header.json`: `clock_origin`, the ISO 8601 date of 0 s; `hot_tokens`; `step_columns` and
  `request_columns`, the names of the values in the lines of the other two;
- `steps-rank0.jsonl`: a step a line, the columns of `granikv.traces.records.STEP_SCHEMA` as a list
  in the order of `step_columns`, or as an object; `start_s` is in seconds after the date;
- `requests-rank0.jsonl`: a request a line, likewise, with `rid` and `hot_tokens`.

A last line without its end is what a killed server leaves, and no row.

Beside the records lies `trace.jsonl`, what was sent, as a plain trace that the simulator replays.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from granikv.core.errors import TraceFormatError
from granikv.traces.records import REQUEST_SCHEMA, STEP_SCHEMA, RunHeader, RunWriter
from granikv.traces.request import Request, Run
from granikv.traces.writers import write_plain
from granikv.validate.serve_results import settings_in

_STEPS_FILE = "steps-rank0.jsonl"
_REQUESTS_FILE = "requests-rank0.jsonl"
_HEADER_FILE = "header.json"
_TRACE_FILE = "trace.jsonl"
_REQUEST_COLUMNS = [name for name in REQUEST_SCHEMA if name != "replica"]


def convert(results: Sequence[Mapping[str, Any]], path: Path) -> list[Path]:
    """Write run records for each result in the file `path` that has requests and no folder yet.

    Raises:
        TraceFormatError: a file of requests or steps cannot be read.
    """
    folders = []
    for row in results:
        name = row.get("requests_file")
        if row["status"] != "complete" or name is None:
            continue
        source = path.parent / name
        folder = path.with_suffix(".runs") / source.stem
        if (folder / _HEADER_FILE).exists():
            continue
        record = None if row["record"] is None else path.parent / row["record"]
        _convert(row, source, record, folder)
        folders.append(folder)
    return folders


def _convert(row: Mapping[str, Any], source: Path, record: Path | None, folder: Path) -> None:
    requests = list(_lines(source))
    recorded = _read_header(record) if record else {}
    if record and recorded:
        add_hot_tokens(requests, _lines(record / _REQUESTS_FILE, recorded.get("request_columns")))
    known = sum(request["hot_tokens"] is not None for request in requests)
    header = RunHeader(
        kind="live",
        model=row["model"],
        gpu=row["gpu"] or "",
        size_tokens=row["size_tokens"] or 0,
        hot_tokens=row.get("server", {}).get("hot_tokens", recorded.get("hot_tokens", 0)),
        seed=row["seed"],
        clock_origin=row["clock_origin"],
        trace=row["cell"],
        versions={name: str(value) for name, value in row["versions"].items()},
        flags={
            "variant": row["variant"],
            "engine": row["flags"],
            "variables": row["variables"],
            "settings": json.loads(settings_in(row)),
            "scheduler": row.get("scheduler", {}),
            "hot_tokens_known": known,  # of so many requests; the others' column says 0
        },
    )
    with RunWriter(folder, header) as writer:
        for request in requests:
            request["hot_tokens"] = request["hot_tokens"] or 0
            writer.request(*(request[name] for name in _REQUEST_COLUMNS))
        if record and recorded:
            end_s = max((r["finish_s"] or 0.0 for r in requests), default=0.0)
            shift_s = seconds_between(row["clock_origin"], recorded["clock_origin"])
            lines = _lines(record / _STEPS_FILE, recorded.get("step_columns"))
            merge_steps(writer, lines, shift_s, end_s)
        if all(request.get("prompt") for request in requests):
            write_plain(map(_asked, requests), folder / _TRACE_FILE)


def _asked(request: Mapping[str, Any]) -> Request:
    """A request as it was asked for, whatever became of it."""
    prompt = tuple(Run(*part) for part in request["prompt"])
    asked = (request["id"], request["arrival_s"], prompt, request["asked_tokens"])
    return Request(*asked, session=request["session"], after=request["after"])


def add_hot_tokens(
    requests: Iterable[dict[str, Any]], recorded: Iterable[Mapping[str, Any]]
) -> None:
    """Take from the server's own records what a client cannot know, by `rid`."""
    hot_tokens = {line["rid"]: line["hot_tokens"] for line in recorded}
    for request in requests:
        request["hot_tokens"] = hot_tokens.get(request["rid"], request["hot_tokens"])


def merge_steps(
    writer: RunWriter, lines: Iterable[Mapping[str, Any]], shift_s: float, end_s: float
) -> int:
    """Add a recorder's steps that began in [0, end_s] of the run's clock; returns how many.

    `shift_s` is what 0 s of the recorder is on the run's clock.

    Raises:
        TraceFormatError: a line lacks a column.
    """
    count = 0
    for number, line in enumerate(lines, 1):
        if missing := [name for name in STEP_SCHEMA if name not in line]:
            raise TraceFormatError(
                f"Recorded step {number} lacks {', '.join(missing)}; record the run again."
            )
        start_s = line["start_s"] + shift_s
        if 0 <= start_s <= end_s:
            shifted = {**line, "start_s": start_s}
            writer.step(*[shifted[name] for name in STEP_SCHEMA])
            count += 1
    return count


def seconds_between(first: str, second: str) -> float:
    """Seconds from one ISO 8601 date to another."""
    return (datetime.fromisoformat(second) - datetime.fromisoformat(first)).total_seconds()


def _read_header(folder: Path) -> dict[str, Any]:
    try:
        header: dict[str, Any] = json.loads((folder / _HEADER_FILE).read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise TraceFormatError(f"{folder / _HEADER_FILE} is no JSON ({error}).") from None
    return header


def _lines(path: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Objects of JSON lines; `columns` names the values where a line is a list."""
    try:
        lines = path.read_text().split("\n")[:-1]
    except OSError as error:
        raise TraceFormatError(f"{path} cannot be read ({error}); copy it there.") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            yield dict(zip(columns or (), row, strict=True)) if isinstance(row, list) else row
        except ValueError as error:
            raise TraceFormatError(f"{path}, line {number} cannot be read ({error}).") from None
