"""Plain JSONL: what the load driver sends and keeps, one request a line.

Keys: `id`, `arrival_s`, `output_tokens`, `prompt` as a list of [segment, length], and where they
say something `session` and `after`. `granikv bench serve` writes and sends it
(`granikv.validate.workloads.from_lines`); times count from the run's start.
"""

from collections.abc import Iterator
from typing import Any

from granikv.traces.readers.reading import Reading, Timed
from granikv.traces.request import Request, Run

KEYS = frozenset({"id", "arrival_s", "output_tokens", "prompt"})


def read(reading: Reading) -> Iterator[Timed]:
    """Requests of a plain trace under their own ids, so that records of runs pair up."""
    reading.origin = 0.0
    for record in reading.json_rows():
        arrival_s = reading.number(record, "arrival_s")
        if arrival_s < 0:
            raise reading.error("arrival_s", "before the run's start", "shift all times")
        request = Request(
            reading.integer(record, "id"),
            0.0,
            _prompt(reading, record),
            reading.integer(record, "output_tokens", 1),
            _session(reading, record),
        )
        if record.get("after") is not None and reading.options.closed_loop:
            request.after = reading.integer(record, "after")
        reading.report.rows_read += 1
        reading.report.kept += 1
        yield arrival_s, request


def _session(reading: Reading, record: dict[str, Any]) -> str | None:
    session = record.get("session")
    if session is None or isinstance(session, str):
        return session
    raise reading.error("session", f"want text, got {session!r}", "write a name or leave it out")


def _prompt(reading: Reading, record: dict[str, Any]) -> tuple[Run, ...]:
    runs = record.get("prompt")
    if not isinstance(runs, list) or not runs or not all(map(_is_run, runs)):
        raise reading.error(
            "prompt", "want [[segment, length], ...] of at least a token each", "repair the row"
        )
    return tuple(Run(segment, length) for segment, length in runs)


def _is_run(run: object) -> bool:
    return (
        isinstance(run, list)
        and len(run) == 2
        and all(type(number) is int for number in run)
        and run[0] >= 0
        and run[1] >= 1
    )
