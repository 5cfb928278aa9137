"""BurstGPT, CSV: times, lengths and (from version 2) sessions.

Source: github.com/HPMLL/BurstGPT. Version 2 puts two columns behind the first, so columns go by
name. A response of 0 tokens is a failed request. Nothing says what a session's turns share, so no
prefix is assumed.
"""

from collections.abc import Iterator

from granikv.traces.readers.reading import Reading, Timed
from granikv.traces.readers.table import csv_rows, seconds, tokens
from granikv.traces.request import Request, Run
from granikv.traces.segments import private_segment

_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read(reading: Reading) -> Iterator[Timed]:
    """Requests of a BurstGPT file, in file order; rows without session id have no session."""
    for stamp, prompt, output, session in csv_rows(reading, _COLUMNS, ("Session ID",)):
        time = seconds(reading, "Timestamp", stamp)
        admitted = reading.admit(
            tokens(reading, "Request tokens", prompt), tokens(reading, "Response tokens", output)
        )
        if admitted is None:
            continue
        request_id, prompt_tokens, output_tokens = admitted
        runs = (Run(private_segment(request_id), prompt_tokens),)
        yield time, Request(request_id, 0.0, runs, output_tokens, session=session or None)
