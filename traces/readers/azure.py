"""Azure LLM inference traces, CSV: times and lengths, nothing about prefixes.

Source: github.com/Azure/AzurePublicDataset, data/AzureLLMInferenceTrace_*.csv (2023) and the
one-week files of 2024. Time stamps have up to seven fractional digits; those of 2024 carry +00:00
and may have none.
"""

import re
from collections.abc import Iterator
from datetime import UTC, datetime

from granikv.traces.readers.reading import Reading, Timed
from granikv.traces.readers.table import csv_rows, tokens
from granikv.traces.request import Request, Run
from granikv.traces.segments import private_segment

_DIGITS = 7
_TICKS_PER_SECOND = 10**_DIGITS
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?")


def read(reading: Reading) -> Iterator[Timed]:
    """Requests of an Azure file, in file order."""
    reading.per_second = _TICKS_PER_SECOND
    for stamp, prompt, output in csv_rows(
        reading, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    ):
        admitted = reading.admit(
            tokens(reading, "ContextTokens", prompt), tokens(reading, "GeneratedTokens", output)
        )
        if admitted is None:
            continue
        request_id, prompt_tokens, output_tokens = admitted
        runs = (Run(private_segment(request_id), prompt_tokens),)
        yield _ticks(reading, stamp), Request(request_id, 0.0, runs, output_tokens)


def _ticks(reading: Reading, stamp: str) -> int:
    """Time stamp in units of 100 ns since 1970; text without a zone counts as UTC."""
    match = _STAMP.fullmatch(stamp)
    try:
        if match is None:
            raise ValueError
        date, fraction, zone = match.group(1, 2, 3)
        since = datetime.fromisoformat(date + (zone or "+00:00")) - _EPOCH
    except ValueError:
        raise reading.error(
            "TIMESTAMP", f"want a date and time, got {stamp!r}", "repair or remove the row"
        ) from None
    whole_s = since.days * 86_400 + since.seconds
    ticks = int((fraction or "")[:_DIGITS].ljust(_DIGITS, "0"))
    return int(whole_s * _TICKS_PER_SECOND + ticks)
