"""One record for each request that has run on the live server; see docs/serving.md for others."""

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What a server knows of one request, on the clock of `time.perf_counter`.

    Attributes:
        rid: the client's name for it, or one that SGLang made up.
        arrival_s: when the scheduler got it, behind SGLang's HTTP server and tokenizer.
        first_token_s: when its first token was on the host; None when there was none.
        finish_s: when its last token was.
        hot_tokens: tokens on its path that were HOT when it ended.
        status: finished or aborted, as the simulator says it.
    """

    rid: str
    arrival_s: float
    first_token_s: float | None
    finish_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    hot_tokens: int
    status: str


REQUEST_COLUMNS = tuple(field.name for field in fields(RequestRecord))


def record_of(req: Any, hot_tokens: int, is_aborted: bool, now_s: float) -> RequestRecord:
    """The record of a request that has just ended.

    Args:
        req: SGLang's.
        hot_tokens: on its path.
        is_aborted: whether it ended early.
        now_s: on the clock of `time.perf_counter`.
    """
    times = req.time_stats
    return RequestRecord(
        rid=str(req.rid),
        arrival_s=times.scheduler_recv_time,
        first_token_s=times.prefill_finished_time or None,  # SGLang's 0.0 is "not yet"
        finish_s=now_s,
        prompt_tokens=len(req.origin_input_ids),
        output_tokens=len(req.output_ids),
        cached_tokens=req.cached_tokens,
        hot_tokens=hot_tokens,
        status="aborted" if is_aborted else "finished",
    )
