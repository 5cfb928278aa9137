"""Length tables in Vidur's CSV layout, with or without arrival times.

Source: github.com/microsoft/vidur, data/processed_traces.
"""

from collections.abc import Iterator

from granikv.traces.readers.arrivals import made_arrivals
from granikv.traces.readers.reading import Reading, Timed
from granikv.traces.readers.table import csv_rows, seconds, tokens
from granikv.traces.request import Request, Run
from granikv.traces.segments import private_segment


def read(reading: Reading) -> Iterator[Timed]:
    """Requests of a length table, in file order."""
    made: Iterator[float] | None = None
    for prompt, output, stamp in csv_rows(
        reading, ("num_prefill_tokens", "num_decode_tokens"), ("arrived_at",)
    ):
        admitted = reading.admit(
            tokens(reading, "num_prefill_tokens", prompt),
            tokens(reading, "num_decode_tokens", output),
        )
        if admitted is None:
            continue
        if made is None and not stamp:
            made = made_arrivals(reading)
        time = seconds(reading, "arrived_at", stamp) if made is None else next(made)
        request_id, prompt_tokens, output_tokens = admitted
        runs = (Run(private_segment(request_id), prompt_tokens),)
        if made is None:
            reading.use_time_unit("s")
        yield time, Request(request_id, 0.0, runs, output_tokens)
