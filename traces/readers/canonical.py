"""GraniKV's own JSONL: Mooncake's keys, run lengths, sessions, behind one header line."""

from collections.abc import Iterator
from typing import Any

from granikv.traces.readers.reading import Reading, Timed
from granikv.traces.request import Request, Run

FORMAT = "granikv-trace"
VERSION = 1


def read(reading: Reading) -> Iterator[Timed]:
    """Requests of a canonical file: exactly those that were written."""
    reading.origin = 0.0
    rows = reading.json_rows()
    header = next(rows, None)
    if header is None or header.get("format") != FORMAT:
        raise reading.error("format", f"no {FORMAT} header line", "write the file with granikv")
    if header.get("version") != VERSION:
        raise reading.error(
            "version", f"want {VERSION}, got {header.get('version')!r}", "convert the trace again"
        )
    for record in rows:
        prompt = _prompt(reading, record)
        output_tokens = reading.integer(record, "output_length", 1)
        reading.report.rows_read += 1
        reading.report.kept += 1
        request = Request(
            request_id=reading.integer(record, "request_id"),
            arrival_s=0.0,
            prompt=prompt,
            output_tokens=output_tokens,
            session=_session(reading, record),
        )
        if "output_segment" in record:
            request.output_segment = reading.integer(record, "output_segment")
        if "prefix_tokens" in record:
            request.prefix_tokens = reading.integer(record, "prefix_tokens")
        if "after" in record and reading.options.closed_loop:
            request.after = reading.integer(record, "after")
            if "think_s" in record:
                request.think_s = reading.options.think_s(reading.number(record, "think_s"))
        yield _arrival_s(reading, record), request


def _arrival_s(reading: Reading, record: dict[str, Any]) -> float:
    if "arrival_s" in record:
        arrival_s = reading.number(record, "arrival_s")
    else:
        arrival_s = reading.number(record, "timestamp") / 1_000
    if arrival_s < 0:
        raise reading.error("timestamp", "before the trace's start", "convert the trace again")
    return arrival_s


def _session(reading: Reading, record: dict[str, Any]) -> str | None:
    session = record.get("session_id")
    if session is None or isinstance(session, str):
        return session
    raise reading.error("session_id", f"want text, got {session!r}", "convert the trace again")


def _prompt(reading: Reading, record: dict[str, Any]) -> tuple[Run, ...]:
    segments = reading.unsigned(record, "hash_ids")
    lengths = reading.unsigned(record, "run_lengths")
    fits = len(segments) == len(lengths) and sum(lengths) == reading.integer(
        record, "input_length", 1
    )
    if not fits or min(lengths) < 1:
        raise reading.error(
            "run_lengths",
            "want one positive length for each id, input_length in all",
            "convert the trace again",
        )
    return tuple(map(Run, segments, lengths))
