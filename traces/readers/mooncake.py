"""Mooncake JSONL: one id per block of 512 tokens, time stamps in milliseconds.

Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces. The optional keys `session_id` and
`delay` (milliseconds after the answer before, instead of `timestamp`) are those of AIPerf.
"""

from collections.abc import Iterator
from typing import Any

from granikv.traces.readers.blocks import BlockRule, runs_of_blocks
from granikv.traces.readers.reading import Reading, Timed
from granikv.traces.request import Request, Run
from granikv.traces.segments import private_segment

_BLOCK_SIZE = 512


def read(reading: Reading) -> Iterator[Timed]:
    """Requests of a Mooncake file, in file order."""
    reading.use_time_unit("ms")
    rule = BlockRule(reading, reading.options.block_size or _BLOCK_SIZE)
    last_of_session: dict[str, int] = {}
    time: float = 0
    for record in reading.json_rows():
        prompt_tokens = reading.integer(record, "input_length")
        output_tokens = reading.integer(record, "output_length")
        segments = reading.block_ids(record) if "hash_ids" in record else None
        if segments is not None:
            rule.check(len(segments), prompt_tokens)
        if "timestamp" in record:
            time = _time_stamp(reading, record)
        admitted = reading.admit(prompt_tokens, output_tokens)
        if admitted is None:
            continue
        request_id, prompt_tokens, output_tokens = admitted
        if segments is None:
            prompt: tuple[Run, ...] = (Run(private_segment(request_id), prompt_tokens),)
        else:
            prompt = runs_of_blocks(segments, rule.block_size, prompt_tokens, request_id)
        request = Request(request_id, 0.0, prompt, output_tokens)
        if "session_id" in record:
            _join_session(reading, record, request, last_of_session)
        elif "timestamp" not in record:
            raise reading.error(
                "timestamp", "missing", "give a time stamp, or session_id and delay"
            )
        yield time, request


def _time_stamp(reading: Reading, record: dict[str, Any]) -> float:
    stamp = record["timestamp"]
    if isinstance(stamp, str) and stamp.isdigit():
        return int(stamp)  # nanoseconds since 1970 come as text: more digits than a float has
    return reading.number(record, "timestamp")


def _join_session(
    reading: Reading, record: dict[str, Any], request: Request, last_of_session: dict[str, int]
) -> None:
    """Link a later turn to the one before; only a row with `delay` waits for the answer."""
    session = str(record["session_id"])
    request.session = session
    previous = last_of_session.get(session)
    last_of_session[session] = request.request_id
    waits = "delay" in record and previous is not None
    if not waits and "timestamp" not in record:
        raise reading.error(
            "timestamp", "missing in the first turn of a session", "give a time stamp"
        )
    if waits and reading.options.closed_loop:
        request.after = previous
        request.think_s = reading.options.think_s(
            reading.number(record, "delay") / reading.per_second
        )
    elif "timestamp" not in record:
        raise reading.error("timestamp", "a turn with a delay only", "read the file as closed loop")
