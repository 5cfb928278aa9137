"""RAGPulse: retrieval prompts as segments of exact length, which stand in five side tables.

Source: github.com/flashserve/RAGPulse, data/. Prompt order: system prompt, passages, history, web
search, user input. The segments sum to 6..12 tokens less than `input_length` (template text),
which become a private tail.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from granikv.core.errors import TraceFormatError
from granikv.traces.options import ReadOptions
from granikv.traces.readers.reading import Reading, Timed
from granikv.traces.request import Request, Run
from granikv.traces.segments import private_segment

_PARTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
_TABLE_KEYS = ("sys_prompt_id", "passage_id", "history_id", "web_search_id", "user_input_id")


def read(reading: Reading) -> Iterator[Timed]:
    """Requests of the trace, in file order.

    The public file is two weeks, one behind the other, and the clock starts again at 0 with the
    second (session ids, which begin with a date, say so). `open_trace` sorts, so both play at
    once.

    Raises:
        TraceFormatError: a side table is missing, or a row does not fit the tables.
    """
    folder = reading.path if reading.path.is_dir() else reading.path.parent
    trace = None if reading.path.is_dir() else reading.path
    lengths: dict[int, int] = {}
    missing = set(_TABLE_KEYS)
    for child in sorted(folder.iterdir()):
        kind = _kind(child)
        if kind == "hash_ids" and trace is None:
            trace = child
        elif kind in missing:
            missing.remove(kind)
            _read_table(reading, child, kind, lengths)
    if missing or trace is None:
        what = ", ".join(sorted(missing)) or "hash_ids"
        raise TraceFormatError(
            f"{folder} lacks the RAGPulse file with {what}; put the trace and its five tables "
            "in one folder."
        )
    for record in reading.json_rows(trace):
        timed = _request(reading, record, lengths)
        if timed is not None:
            yield timed


def _kind(path: Path) -> str | None:
    """`hash_ids` for the trace, the id's key for a side table, None for anything else."""
    if not path.is_file():
        return None
    probe = Reading(path, ReadOptions())
    try:
        record = next(probe.json_rows(), {})
    except TraceFormatError:
        return None
    return next((key for key in ("hash_ids", *_TABLE_KEYS) if key in record), None)


def _read_table(reading: Reading, path: Path, key: str, lengths: dict[int, int]) -> None:
    for record in reading.json_rows(path):
        lengths[reading.integer(record, key)] = reading.integer(record, "token_length", 1)


def _request(reading: Reading, record: dict[str, Any], lengths: dict[int, int]) -> Timed | None:
    prompt_tokens = reading.integer(record, "input_length")
    parts = record.get("hash_ids")
    stamp = record.get("timestamp")
    if not isinstance(parts, dict) or not isinstance(stamp, str) or not stamp.isdigit():
        raise reading.error(
            "timestamp", "want text of seconds and hash_ids by part", "repair the row"
        )
    try:
        runs = [
            Run(reading.names.segment(segment), lengths[segment])
            for part in _PARTS
            if part in parts
            for segment in reading.unsigned(parts, part)
        ]
    except KeyError as error:
        raise reading.error(
            "hash_ids", f"segment {error} is in no table", "use the tables of the same release"
        ) from None
    tail = prompt_tokens - sum(run.length for run in runs)
    if tail < 0:
        raise reading.error("input_length", f"{-tail} tokens below its segments", "repair the row")
    admitted = reading.admit(prompt_tokens, reading.integer(record, "output_length"))
    if admitted is None:
        return None
    request_id, prompt_tokens, output_tokens = admitted
    if tail or not runs:
        runs.append(Run(private_segment(request_id), max(tail, 1)))
    session = record.get("session_id")
    return int(stamp), Request(request_id, 0.0, tuple(runs), output_tokens, session=session)
