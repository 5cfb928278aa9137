"""drive: sends requests to a live server at their times and writes down what came back.

A server is an object with the methods of `granikv.validate.live.Client`; `granikv.validate.clients`
has one for an `sglang.Engine` in this process and one for HTTP. Needs nothing beside the standard
library and numpy, because a GPU host may have no more.

A server reports a request's first token when it has it, whatever the interval: SGLang answers after
tokens 1, 1 + interval, ... With `ONLY_ENDS` a request costs two reports.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from granikv.validate.live import Client, RequestRecord
from granikv.validate.workloads import LiveRequest

ONLY_ENDS = 1 << 20  # as interval: the first token is reported, and the last
_END_S = 30.0  # for a server to answer after it was told to abort


@dataclass(frozen=True, slots=True)
class Drive:
    """The records of one workload, in order of arrival; `clock_origin` is the date of 0 s."""

    records: list[RequestRecord]
    clock_origin: str


async def drive(
    client: Client,
    requests: Iterable[LiveRequest],
    *,
    name: str = "drive",
    interval: int = ONLY_ENDS,
    enough: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Drive:
    """Send each request at its arrival time, whatever became of those before it.

    A request that fails is a record, not an error. When `enough` have finished, the others are
    aborted and stay `unfinished`. `name` begins the server's names of the requests.
    """
    begin_s, stamp = clock(), uuid4().hex[:8]
    origin = datetime.now(UTC).isoformat()
    records: list[RequestRecord] = []
    running: set[asyncio.Task[None]] = set()
    cut: list[RequestRecord] = []
    is_enough = asyncio.Event()
    finished = 0

    def now_s() -> float:
        return clock() - begin_s

    async def answer(request: LiveRequest, record: RequestRecord) -> None:
        nonlocal finished
        await _answer(client, [request.input_ids], [record], request.output_tokens, interval, now_s)
        finished += record.status == "finished"
        if enough is not None and finished >= enough and not is_enough.is_set():
            cut.extend(record for record in records if record.status == "unfinished")
            is_enough.set()

    for request in requests:
        if await _is_set_within(is_enough, request.arrival_s - now_s()):
            break
        record = _record(request, name, stamp)
        records.append(record)
        running.add(asyncio.create_task(answer(request, record)))
        await asyncio.sleep(0)  # the task sends before the next request is looked at
    await _end(client, running, is_enough)
    for record in cut:
        if record.status != "finished":
            record.status, record.error = "unfinished", None
    return Drive(records, origin)


async def drive_closed(
    client: Client,
    requests: Iterable[LiveRequest],
    users: int,
    *,
    name: str = "closed",
    interval: int = ONLY_ENDS,
    clock: Callable[[], float] = time.perf_counter,
) -> Drive:
    """Have each of `users` send its next request when its last one has ended, until none is left.

    A request arrives when it is sent. Records are in that order; `session` names the user, and
    `after` the request that it sent before.
    """
    begin_s, stamp = clock(), uuid4().hex[:8]
    origin = datetime.now(UTC).isoformat()
    records: list[RequestRecord] = []
    waiting = iter(requests)

    def now_s() -> float:
        return clock() - begin_s

    async def use(session: str) -> None:
        after: int | None = None
        for request in waiting:
            record = _record(request, name, stamp)
            record.session, record.after = session, after
            records.append(record)
            prompts = [request.input_ids]
            await _answer(client, prompts, [record], request.output_tokens, interval, now_s)
            record.arrival_s = record.sent_s or 0.0
            after = record.id

    await asyncio.gather(*(use(f"user-{number}") for number in range(users)))
    return Drive(records, origin)


async def answer_batch(
    client: Client,
    prompts: Sequence[list[int]],
    output_tokens: int,
    *,
    interval: int = ONLY_ENDS,
    clock: Callable[[], float] = time.perf_counter,
) -> list[RequestRecord]:
    """Send prompts in one message and wait for all answers."""
    begin_s, stamp = clock(), uuid4().hex[:8]
    records = [
        RequestRecord(number, None, 0.0, len(prompt), f"batch.{stamp}.{number}")
        for number, prompt in enumerate(prompts)
    ]
    await _answer(client, prompts, records, output_tokens, interval, lambda: clock() - begin_s)
    return records


def _record(request: LiveRequest, name: str, stamp: str) -> RequestRecord:
    return RequestRecord(
        request.request_id,
        request.session,
        request.arrival_s,
        len(request.input_ids),
        f"{name}.{stamp}.{request.request_id}",
        asked_tokens=request.output_tokens,
        prompt=request.prompt,
    )


async def _answer(
    client: Client,
    prompts: Sequence[list[int]],
    records: list[RequestRecord],
    output_tokens: int,
    interval: int,
    now_s: Callable[[], float],
) -> None:
    sent_s = now_s()
    for record in records:
        record.sent_s = sent_s
    try:
        rids = [record.rid for record in records]
        async for chunk in client.stream(prompts, output_tokens, interval, rids):
            records[chunk.index].note(chunk, now_s())
    except Exception as error:  # a server raises what it likes
        for record in records:
            if record.finish_s is None:
                record.status, record.error = "failed", f"{type(error).__name__}: {error}"


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for a moment, or for the event if that comes first."""
    if seconds > 0 and not event.is_set():
        try:
            await asyncio.wait_for(event.wait(), seconds)
        except TimeoutError:
            return False
    return event.is_set()


async def _end(client: Client, running: set[asyncio.Task[None]], is_enough: asyncio.Event) -> None:
    """Wait for all, or abort what is left once there are enough."""
    if not running:
        return
    stop: asyncio.Task[Any] = asyncio.create_task(is_enough.wait())
    everything: asyncio.Task[Any] = asyncio.create_task(_all(running))
    await asyncio.wait({stop, everything}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if everything.done():
        return
    await client.abort_all()
    await asyncio.wait({everything}, timeout=_END_S)
    for task in running:
        task.cancel()
    await asyncio.gather(everything, return_exceptions=True)


async def _all(running: Iterable[Awaitable[None]]) -> None:
    await asyncio.gather(*running)
