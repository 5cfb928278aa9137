"""measure: what one cell of the run list says about a live server.

A steady cell sends its prefixes, then all its prompts twice, so that everything is cached and a
server that copies shared prefixes had its chance. Each repeat sends them once more for a long
answer, and times decode steps between two reports of the same row. Neither report is the first or
the last of the answer: at both ends SGLang also files 256 prompts in its prefix tree.

A driven cell starts from an empty cache, so that what was sent is all that a replay needs.
"""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from granikv.validate import workloads
from granikv.validate.drive import Drive, answer_batch, drive, drive_closed
from granikv.validate.driven_cells import ClosedCell, DrivenCell, PoissonCell, TraceCell
from granikv.validate.live import Client, RequestRecord
from granikv.validate.serve_cells import Cell, SteadyCell
from granikv.validate.steady import (
    cached_share,
    check,
    decoded_together,
    sent_values,
    start_spread_s,
    steady_step_s,
    steady_window,
    waits_ms,
    whole_run,
)

_WARM_TOKENS = 2048
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
    if isinstance(cell, SteadyCell):
        await client.flush()
        async for done in _steady(client, cell, seed, repeats, clock):
            yield done
        return
    for repeat in repeats:
        await _warm(client, clock)
        yield repeat, await _driven(client, cell, seed, repeat, clock)


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


async def _warm(client: Client, clock: Clock) -> None:
    """Have a server prefill and decode once, whatever it compiles then, and forget it again."""
    prompt = workloads.tokens(workloads.rng_of(0, "warm"), _WARM_TOKENS)
    check(await answer_batch(client, [prompt], _TAIL_TOKENS, clock=clock))
    await client.flush()


async def _driven(
    client: Client, cell: DrivenCell, seed: int, repeat: int, clock: Clock
) -> Measured:
    if isinstance(cell, TraceCell):
        return await _trace(client, cell, seed, clock)
    if isinstance(cell, ClosedCell):
        return await _closed(client, cell, seed + repeat, clock)
    return await _poisson(client, cell, seed + repeat, clock)


async def _poisson(client: Client, cell: PoissonCell, seed: int, clock: Clock) -> Measured:
    rng = workloads.rng_of(seed, cell.name)
    sent = workloads.arrivals(
        cell.prefixes, cell.requests, cell.rate_per_s, cell.largest_output, rng
    )
    enough = None if cell.window is None else sum(cell.window)
    done = await drive(client, sent.requests, name=cell.name, enough=enough, clock=clock)
    values = whole_run(done.records) if cell.window is None else _window(done, *cell.window)
    behind = {"rate_per_s": cell.rate_per_s, **_behind(sent, cell.prefixes, done)}
    return Measured(values | behind, done)


def _window(done: Drive, skip: int, count: int) -> dict[str, Any]:
    window = steady_window(done.records, skip, count)
    return {
        "tokens_per_s": window.tokens_per_s,
        **waits_ms(window.records),
        "window_s": window.end_s - window.begin_s,
        "window_requests": len(window.records),
        "window_output_tokens": window.output_tokens,
        "least_waiting": window.least_waiting,
        "is_steady": window.least_waiting > 0,
    }


async def _closed(client: Client, cell: ClosedCell, seed: int, clock: Clock) -> Measured:
    rng = workloads.rng_of(seed, cell.name)
    prefixes = (cell.prefix_tokens,)
    sent = workloads.arrivals(prefixes, cell.requests, None, cell.largest_output, rng)
    done = await drive_closed(client, sent.requests, cell.users, name=cell.name, clock=clock)
    behind = {"users": cell.users, **_behind(sent, prefixes, done)}
    return Measured(whole_run(done.records) | behind, done)


async def _trace(client: Client, cell: TraceCell, seed: int, clock: Clock) -> Measured:
    with cell.path.open() as file:
        requests = list(workloads.from_lines(file, seed, str(cell.path)))
    requests.sort(key=lambda request: request.arrival_s)
    done = await drive(client, requests, name=cell.name, clock=clock)
    return Measured(whole_run(done.records) | sent_values(done.records), done)


def _behind(sent: workloads.Arrivals, prefixes: Sequence[int], done: Drive) -> dict[str, Any]:
    """Columns about requests that were drawn behind prefixes."""
    own_tokens = sum(record.prompt[-1][1] for record in done.records)
    return {
        **sent_values(done.records),
        "mean_own_tokens": own_tokens / len(done.records),
        "clamped_outputs": sent.clamped_outputs,
        "shared": [list(pair) for pair in zip(prefixes, sent.rows, strict=True)],
    }


def _answer_s(records: Sequence[RequestRecord]) -> float:
    return max(record.finish_s or 0.0 for record in records)
