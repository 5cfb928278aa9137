"""batch_spans: when each request of a live run was in the decode batch, from its records.

A request that was sent back for want of COLD waits in the queue until its turn comes again. Records
say how many a step sent back, not whom: SGLang 0.5.17 takes the rows with the fewest output tokens,
of equal ones those with the longest prompt, of those the last (`ScheduleBatch.retract_decode`).
When they came back follows from the tokens that they had still to write: a row decodes once for
each, up to its end. Who decoded in every step up to its end was not sent back.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

Span = tuple[float, float]


@dataclass(slots=True)
class _Row:
    """A request; `began` is the decode step at which it joined last, with `written` tokens."""

    request_id: int
    prompt_tokens: int
    output_tokens: int
    began: int
    last: int
    written: int = 1

    def written_at(self, step: int) -> int:
        """Output tokens before a step in which it decodes."""
        return self.written + step - self.began

    def back_at(self, step: int) -> int:
        """When it decodes again if it leaves ahead of a step: in time to write the rest."""
        return self.last + 1 - (self.output_tokens - self.written_at(step))

    def send_back(self, step: int) -> None:
        """It leaves ahead of a step."""
        self.written, self.began = self.written_at(step), self.back_at(step)


def batch_spans(requests: pl.DataFrame, steps: pl.DataFrame) -> dict[int, list[Span]]:
    """Spans in seconds of each request that has a first token, one more for each time it was sent
    back; the last one is endless for a request that did not finish.

    Args:
        requests: of run records.
        steps: likewise; empty, or those of a server that does not count retractions, for one span
            each.
    """
    started = requests.filter(pl.col("first_token_s").is_not_null())
    ends_s = started["finish_s"].fill_null(np.inf).to_list()
    begins_s = started["first_token_s"].to_list()
    found = {
        number: [(begin_s, end_s)]
        for number, begin_s, end_s in zip(started["id"], begins_s, ends_s, strict=True)
    }
    starts_s, sent_back = _single(steps.filter(pl.col("kind") == "decode").sort("start_s"))
    if not sent_back.any():
        return found
    first, last = (np.searchsorted(starts_s, some, "left") for some in (begins_s, ends_s))
    columns = started.select("id", "prompt_tokens", "output_tokens").rows()
    rows = [
        _Row(*row, int(begin), int(end) - 1)
        for row, begin, end in zip(columns, first, last, strict=True)
    ]
    for step in np.flatnonzero(sent_back).tolist():
        for row in _victims(rows, step, int(sent_back[step])):
            row.send_back(step)
            begin_s, end_s = found[row.request_id].pop()
            back_s = float(starts_s[min(row.began, len(starts_s) - 1)])
            found[row.request_id] += [(begin_s, float(starts_s[step])), (back_s, end_s)]
    return found


def _single(decodes: pl.DataFrame) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Start in seconds, and rows sent back, of each step: a record may stand for several."""
    counts = decodes["steps"].to_numpy()
    lengths_s = decodes["gpu_us"].to_numpy() / counts * 1e-6
    nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts_s = np.repeat(decodes["start_s"].to_numpy(), counts) + nth * np.repeat(lengths_s, counts)
    return starts_s, np.where(nth, 0, np.repeat(decodes["retractions"].to_numpy(), counts))


def _victims(rows: list[_Row], step: int, count: int) -> list[_Row]:
    """The rows that a step sends back."""
    gone = [
        row for row in reversed(rows) if row.began <= step <= row.last and row.back_at(step) > step
    ]
    gone.sort(key=lambda row: (row.written_at(step), -row.prompt_tokens, -row.began))
    return gone[:count]
