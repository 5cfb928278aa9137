"""measure: what one cell of the run list says about a live server.

A steady cell sends its prefixes, then all its prompts twice, so that everything is cached and a
server that copies shared prefixes had its chance. Each repeat sends them once more for a long
answer, and times decode steps between two reports of the same row. Neither report is the first or
the last of the answer: at both ends SGLang also files 256 prompts in its prefix tree.
"""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from granikv.validate import workloads
from granikv.validate.drive import Client, Drive, RequestRecord, answer_batch, drive
from granikv.validate.serve_cells import Cell, PoissonCell, SteadyCell, TraceCell
from granikv.validate.steady import (
    cached_share,
    check,
    decoded_together,
    send_lag_s,
    start_spread_s,
    steady_step_s,
    steady_window,
    trace_values,
)

_TAIL_TOKENS = 4  # after the last bound, so that its report is not merged with the answer's end
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Measured:
    """One repeat of a cell: its numbers, and the records behind them where they are worth keeping.

    Attributes:
        values: columns of the result.
        drive: the requests of a workload with arrival times, None for a steady batch.
    """

    values: dict[str, Any]
    drive: Drive | None = None


async def measure(
    client: Client, cell: Cell, seed: int, repeats: Sequence[int], clock: Clock = time.perf_counter
) -> AsyncGenerator[tuple[int, Measured], None]:
    """Measure the repeats of a cell, each as soon as it is done, from an empty prefix cache.

    Raises:
        CellError: requests failed, or too few finished.
    """
    await client.flush()
    if isinstance(cell, SteadyCell):
        async for done in _steady(client, cell, seed, repeats, clock):
            yield done
        return
    for number, repeat in enumerate(repeats):
        if number:
            await client.flush()
        if isinstance(cell, PoissonCell):
            yield repeat, await _poisson(client, cell, seed, repeat, clock)
        else:
            yield repeat, await _trace(client, cell, seed, clock)


async def _steady(
    client: Client, cell: SteadyCell, seed: int, repeats: Sequence[int], clock: Clock
) -> AsyncGenerator[tuple[int, Measured], None]:
    sent = workloads.batch(cell.shared, cell.own_tokens, workloads.rng_of(seed, cell.name))
    interval = cell.steps // 2
    short = interval + 1 + _TAIL_TOKENS

    async def answer(prompts: list[list[int]], output_tokens: int) -> list[RequestRecord]:
        records = await answer_batch(client, prompts, output_tokens, interval=interval, clock=clock)
        check(records)
        return records

    if sent.prefixes:
        await answer(sent.prefixes, 1)
    await answer(sent.prompts, 1)
    short_s = _answer_s(await answer(sent.prompts, short))
    for repeat in repeats:
        records = await answer(sent.prompts, short + cell.steps)
        step_s = steady_step_s(records)
        yield (
            repeat,
            Measured(
                {
                    "tokens_per_s": cell.rows / step_s,
                    "step_ms": step_s * 1e3,
                    "difference_step_ms": (_answer_s(records) - short_s) / cell.steps * 1e3,
                    "start_spread_ms": start_spread_s(records) * 1e3,
                    "is_steady": decoded_together(records),
                    "answer_s": _answer_s(records),
                    "rows": cell.rows,
                    "shared": [list(pair) for pair in cell.shared],
                    "own_tokens": cell.own_tokens,
                    "steps": cell.steps,
                    "cached_share": cached_share(records),
                }
            ),
        )


async def _poisson(
    client: Client, cell: PoissonCell, seed: int, repeat: int, clock: Clock
) -> Measured:
    rng = workloads.rng_of(seed + repeat, cell.name)
    sent = workloads.poisson(
        cell.prefix_tokens, cell.requests, cell.rate_per_s, cell.largest_output, rng
    )
    check(await answer_batch(client, [sent.prefix], 1, clock=clock))
    enough = cell.skip + cell.count
    done = await drive(client, sent.requests, name=cell.name, enough=enough, clock=clock)
    window = steady_window(done.records, cell.skip, cell.count)
    own = [record.prompt_tokens - cell.prefix_tokens for record in done.records]
    return Measured(
        {
            "tokens_per_s": window.tokens_per_s,
            "window_s": window.end_s - window.begin_s,
            "window_requests": window.finished,
            "window_output_tokens": window.output_tokens,
            "least_waiting": window.least_waiting,
            "is_steady": window.least_waiting > 0,
            "rate_per_s": cell.rate_per_s,
            "sent": len(done.records),
            "failed": sum(record.status in ("failed", "aborted") for record in done.records),
            "mean_own_tokens": sum(own) / len(own),
            "clamped_outputs": sent.clamped_outputs,
            "largest_send_lag_s": send_lag_s(done.records),
            "shared": [[cell.prefix_tokens, len(done.records)]],
            "cached_share": cached_share(done.records),
        },
        done,
    )


async def _trace(client: Client, cell: TraceCell, seed: int, clock: Clock) -> Measured:
    with cell.path.open() as file:
        requests = list(workloads.from_lines(file, seed, str(cell.path)))
    requests.sort(key=lambda request: request.arrival_s)
    done = await drive(client, requests, name=cell.name, clock=clock)
    return Measured(trace_values(done.records), done)


def _answer_s(records: Sequence[RequestRecord]) -> float:
    return max(record.finish_s or 0.0 for record in records)
