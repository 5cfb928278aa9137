"""steady: the numbers that follow from requests' records: steps, rates, waits, and their doubts."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from granikv.validate.live import RequestRecord

_PERCENTS = (50, 90, 99)


class CellError(Exception):
    """A cell that gave no number, and why."""


@dataclass(frozen=True, slots=True)
class Window:
    """The steady part of a run past saturation.

    Attributes:
        begin_s: when request number `skip` finished.
        end_s: when `finished` more had.
        records: requests that finished in it, the last at its end.
        least_waiting: fewest requests, over the window, that had arrived and had no token yet;
            0 means that the server was not past saturation.
    """

    begin_s: float
    end_s: float
    records: tuple[RequestRecord, ...]
    least_waiting: int

    @property
    def output_tokens(self) -> int:
        """What its requests wrote, all of it."""
        return sum(record.output_tokens for record in self.records)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / (self.end_s - self.begin_s)


def check(records: Sequence[RequestRecord]) -> None:
    """Raise where a request of a batch did not finish.

    Raises:
        CellError: with the first request's reason.
    """
    bad = [record for record in records if record.status != "finished"]
    if bad:
        reason = bad[0].error or bad[0].status
        raise CellError(f"{len(bad)} of {len(records)} requests did not finish: {reason}")


def steady_step_s(records: Sequence[RequestRecord]) -> float:
    """Seconds of a decode step: the median over rows, each from its own reports.

    A row's reports but the first and the last bound its steps.

    Raises:
        CellError: a row has no two reports between its first and its last.
    """
    inner = [record.marks[1:-1] for record in records]
    if any(len(marks) < 2 for marks in inner):
        raise CellError("a row has fewer than 4 reports; its server does not stream as asked")
    return median((m[-1][0] - m[0][0]) / (m[-1][1] - m[0][1]) for m in inner)


def decoded_together(records: Sequence[RequestRecord]) -> bool:
    """Whether every row was there while the steps of `steady_step_s` ran: else they are shorter."""
    last_start_s = max(record.marks[0][0] for record in records)
    first_end_s = min(record.marks[-1][0] for record in records)
    return last_start_s <= min(record.marks[1][0] for record in records) and first_end_s >= max(
        record.marks[-2][0] for record in records
    )


def start_spread_s(records: Sequence[RequestRecord]) -> float:
    """Seconds between the first tokens of the first and the last row."""
    starts = [record.marks[0][0] for record in records]
    return max(starts) - min(starts)


def steady_window(records: Sequence[RequestRecord], skip: int, count: int) -> Window:
    """The window from the finish of request `skip` to that of request `skip + count`, by finish.

    Its rate counts whole requests: those that finish in it, with all their tokens. In a full server
    that began empty, requests come and go in rounds of the largest batch, so `count` should be a
    multiple of that.

    Raises:
        CellError: fewer have finished.
    """
    finished = sorted(
        (record for record in records if record.status == "finished"),
        key=lambda record: record.finish_s or 0.0,
    )
    if len(finished) < skip + count:
        reasons = {r.error for r in records if r.error}
        raise CellError(
            f"{len(finished)} requests finished, the window needs {skip + count}"
            + (f": {min(reasons)}" if reasons else "")
        )
    ends_s = [record.finish_s or 0.0 for record in finished]
    begin_s = ends_s[skip - 1] if skip else min(record.arrival_s for record in records)
    end_s = ends_s[skip + count - 1]
    inside = tuple(finished[skip : skip + count])
    return Window(begin_s, end_s, inside, least_waiting(records, begin_s, end_s))


def least_waiting(records: Sequence[RequestRecord], begin_s: float, end_s: float) -> int:
    """Fewest requests in [begin_s, end_s] that had been sent and had no token yet."""
    changes = sorted(
        [(r.sent_s, 1) for r in records if r.sent_s is not None]
        + [(r.first_token_s, -1) for r in records if r.first_token_s is not None]
    )
    waiting, least = 0, None
    for time_s, change in changes:
        if time_s > end_s:
            break
        if time_s > begin_s:  # what was there since the change before
            least = waiting if least is None else min(least, waiting)
        waiting += change
    return waiting if least is None else min(least, waiting)


def cached_share(records: Sequence[RequestRecord]) -> float:
    """Share of prompt tokens that were in the cache, of requests that have started."""
    started = [record for record in records if record.first_token_s is not None]
    prompts = sum(record.prompt_tokens for record in started)
    return sum(record.cached_tokens for record in started) / prompts if prompts else 0.0


def whole_run(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Rates and waits of all requests; throughput ends with the last token of a finished one.

    Raises:
        CellError: no request finished.
    """
    finished = [record for record in records if record.status == "finished"]
    if not finished:
        reasons = {record.error for record in records if record.error}
        raise CellError("no request finished" + (f": {min(reasons)}" if reasons else ""))
    output_tokens = sum(record.output_tokens for record in finished)
    last_s = max(record.finish_s or 0.0 for record in finished)
    return {
        "tokens_per_s": output_tokens / (last_s - min(record.arrival_s for record in records)),
        **waits_ms(finished),
    }


def waits_ms(finished: Sequence[RequestRecord]) -> dict[str, float]:
    """Percentiles of TTFT and TPOT, as `granikv.sim.metrics` has them: linear interpolation.

    TTFT is first token - arrival, TPOT is (last - first token) / (tokens - 1) of one request; a
    request of one token has no TPOT.
    """
    spans = [
        (record.arrival_s, record.first_token_s, record.finish_s, record.output_tokens)
        for record in finished
        if record.first_token_s is not None and record.finish_s is not None
    ]
    samples_s = {
        "ttft": [first - arrival for arrival, first, _, _ in spans],
        "tpot": [(last - first) / (n - 1) for _, first, last, n in spans if n > 1],
    }
    return {
        f"{name}_p{percent}_ms": float(np.percentile(values, percent)) * 1e3
        for name, values in samples_s.items()
        for percent in _PERCENTS
        if values
    }


def sent_values(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """What is worth knowing of every driven cell: how much was sent, what failed, what was late."""
    return {
        "sent": len(records),
        "failed": sum(record.status in ("failed", "aborted") for record in records),
        "mean_output_tokens": sum(record.asked_tokens for record in records) / len(records),
        "largest_send_lag_s": send_lag_s(records),
        "cached_share": cached_share(records),
    }


def send_lag_s(records: Sequence[RequestRecord]) -> float:
    """How late the driver was at worst; more than a few milliseconds is the driver's limit."""
    return max((record.sent_s or 0.0) - record.arrival_s for record in records)
