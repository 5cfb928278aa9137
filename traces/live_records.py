"""Run records from the lines that a live server has spooled, also from one that was killed."""

import json
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import polars as pl
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from granikv.core.errors import ConfigError, TraceFormatError
from granikv.traces.records import REQUEST_SCHEMA, STEP_SCHEMA, RunHeader, RunWriter

_HEADER = "header.json"
_WORK = "converting"
_UNKNOWN = {"id", "session", "sent_s", "replica"}  # to the server that writes a line
_REQUEST_SCHEMA = pl.Schema(
    {"rid": pl.String()}
    | {name: dtype for name, dtype in REQUEST_SCHEMA.items() if name not in _UNKNOWN}
)
_NULLABLE = "first_token_s"
_INT64_DIGITS = 18


class _SpoolHeader(BaseModel):
    """What the recorder of a scheduler process writes when it starts, and again when it ends."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["granikv-spool-1"]
    kind: Literal["live"]
    model: str
    gpu: str
    size_tokens: int
    hot_tokens: int
    clock_origin: datetime
    versions: dict[str, str]
    flags: dict[str, JsonValue]
    replica: int
    step_columns: tuple[str, ...]
    request_columns: tuple[str, ...]
    is_closed: bool
    dropped_steps: int
    dropped_requests: int


def convert(folder: Path) -> None:
    """Make the recording in a folder run records there; its lines stay beside them.

    The lines are the scheduler's: `sent_s` and `session` are null, `arrival_s` is when the
    scheduler got the request. `id` is the request's rid where that is a number; requests that were
    named otherwise, SGLang's own warm-up for one, get -1, -2, ...

    The run is partial when a server was killed before it closed its files. What is missing is
    warned about and counted in the header's flags: `dropped_steps` and `dropped_requests` by the
    server, `unreadable_lines` here (the last line of a killed server may be cut).

    Raises:
        ConfigError: the folder is converted already.
        TraceFormatError: it holds no recording, or one of another version.
    """
    headers = _read_headers(folder)
    first = headers[0]
    work = folder / _WORK
    shutil.rmtree(work, ignore_errors=True)  # of a conversion that was interrupted
    header = RunHeader(
        kind=first.kind,
        model=first.model,
        gpu=first.gpu,
        size_tokens=first.size_tokens,
        hot_tokens=first.hot_tokens,
        clock_origin=first.clock_origin.isoformat(),
        versions=first.versions,
        flags=first.flags,
    )
    missing: Counter[str] = Counter()
    with RunWriter(work, header) as writer:
        unnamed = 0
        for spool in headers:
            missing["dropped_steps"] += spool.dropped_steps
            missing["dropped_requests"] += spool.dropped_requests
            later_s = (spool.clock_origin - first.clock_origin).total_seconds()
            unnamed = _copy_requests(folder, spool, later_s, writer, missing, unnamed)
            _copy_steps(folder, spool, later_s, writer, missing)
        found = {name: count for name, count in missing.items() if count}
        writer.header = header.model_copy(update={"flags": header.flags | found})
        writer.close("complete" if all(spool.is_closed for spool in headers) else "partial")
    # The header last: a folder that has the new one is whole.
    for name in ("requests.parquet", "steps.parquet", _HEADER):
        os.replace(work / name, folder / name)
    work.rmdir()
    if found:
        counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in found.items())
        warnings.warn(f"{folder}: the recording has gaps: {counts}", stacklevel=2)


def _read_headers(folder: Path) -> list[_SpoolHeader]:
    """Of each replica, number 0 first."""
    paths = [folder / _HEADER, *sorted(folder.glob("header-rank*.json"))]
    headers = [_read_header(path) for path in paths]
    for path, header in zip(paths, headers, strict=True):
        expected = tuple(STEP_SCHEMA), tuple(_REQUEST_SCHEMA)
        if (header.step_columns, header.request_columns) != expected:
            raise TraceFormatError(
                f"{path}: the columns are those of another version; record again."
            )
    return headers


def _read_header(path: Path) -> _SpoolHeader:
    try:
        text = path.read_text()
    except OSError:
        raise TraceFormatError(
            f"{path.parent} holds no recording ({path.name} is missing); check the path."
        ) from None
    try:
        return _SpoolHeader.model_validate_json(text)
    except ValidationError as error:
        if '"granikv-run-' in text:
            raise ConfigError(f"{path.parent} holds run records already.") from None
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise TraceFormatError(
            f"{path}, {field}: {first['msg']}; it is of another version, record again."
        ) from None


def _copy_requests(
    folder: Path,
    spool: _SpoolHeader,
    later_s: float,
    writer: RunWriter,
    missing: Counter[str],
    unnamed: int,
) -> int:
    """Returns how many requests have no number so far."""
    path = folder / f"requests-rank{spool.replica}.jsonl"
    for rid, arrival_s, first_s, finish_s, prompt, output, cached, hot, status in _rows(
        path, _REQUEST_SCHEMA, missing
    ):
        if rid.isascii() and rid.isdigit() and len(rid) <= _INT64_DIGITS:
            number = int(rid)
        else:
            unnamed += 1
            number = -unnamed
        writer.request(
            number,
            None,
            arrival_s + later_s,
            None,
            None if first_s is None else first_s + later_s,
            finish_s + later_s,
            prompt,
            output,
            cached,
            hot,
            status,
            spool.replica,
        )
    return unnamed


def _copy_steps(
    folder: Path, spool: _SpoolHeader, later_s: float, writer: RunWriter, missing: Counter[str]
) -> None:
    path = folder / f"steps-rank{spool.replica}.jsonl"
    for iteration, steps, start_s, *rest in _rows(path, STEP_SCHEMA, missing):
        writer.step(iteration, steps, start_s + later_s, *rest)


def _rows(path: Path, schema: pl.Schema, missing: Counter[str]) -> Iterator[list[Any]]:
    columns = list(schema.items())
    try:
        with path.open(errors="replace") as lines:
            for line in lines:
                row = _values(line)
                if len(row) == len(columns) and all(map(_fits, row, columns)):
                    yield row
                else:
                    missing["unreadable_lines"] += 1
    except OSError as error:
        raise TraceFormatError(f"{path} cannot be read ({error}); record again.") from None


def _values(line: str) -> list[Any]:
    """Of one line; none of one that is cut or is no list."""
    try:
        row = json.loads(line)
    except ValueError:
        return []
    return row if isinstance(row, list) else []


def _fits(value: Any, column: tuple[str, pl.DataType]) -> bool:
    name, dtype = column
    if value is None:
        return name == _NULLABLE
    if dtype == pl.String:
        return isinstance(value, str)
    kinds = int if dtype == pl.Int64 else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool)
