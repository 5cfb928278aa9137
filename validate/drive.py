"""drive: sends requests to a live server at their times and writes down what came back.

A server is an object with the methods of `Client`; `granikv.validate.clients` has one for an
`sglang.Engine` in this process and one for HTTP. Needs nothing beside the standard library and
numpy, because a GPU host may have no more.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, Protocol
from uuid import uuid4

from granikv.validate.workloads import LiveRequest

Status = Literal["finished", "aborted", "failed", "unfinished"]
ONLY_ENDS = 1 << 20  # as interval: the first token is reported, and the last
_END_S = 30.0  # for a server to answer after it was told to abort


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a server reports of one prompt of a batch.

    Attributes:
        index: the prompt's place in its batch.
        tokens: output tokens so far.
        cached_tokens: prompt tokens that were in the cache.
        status: how it ended, None while it goes on.
        hot_tokens: prompt tokens read from HOT, None where the server does not say.
    """

    index: int
    tokens: int
    cached_tokens: int
    status: Status | None = None
    hot_tokens: int | None = None


class Client(Protocol):
    """A server, as the driver sees it."""

    def stream(
        self, prompts: Sequence[list[int]], output_tokens: int, interval: int, rids: Sequence[str]
    ) -> AsyncIterator[Chunk]:
        """Send prompts in one message; report their tokens 1, 1 + interval, ..., and the last.

        `rids` are the names that the server keeps the requests under; none may be running.
        """

    async def flush(self) -> None:
        """Empty the prefix cache of an idle server."""

    async def abort_all(self) -> None:
        """End every request now."""

    async def state(self) -> dict[str, Any]:
        """What a server of ours says about itself; empty for another one."""


@dataclass(slots=True)
class RequestRecord:
    """One request's row of run records, times in seconds on the drive's clock; None: not reached.

    Attributes:
        rid: the server's name of the request, which its own records have too.
        marks: (time, output tokens so far) of each report of the server.
        error: what a failed request raised.
    """

    id: int
    session: str | None
    arrival_s: float
    prompt_tokens: int
    rid: str
    sent_s: float | None = None
    first_token_s: float | None = None
    finish_s: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    hot_tokens: int | None = None
    status: Status = "unfinished"
    error: str | None = None
    marks: list[tuple[float, int]] = field(default_factory=list)

    def note(self, chunk: Chunk, now_s: float) -> None:
        """Take what the server reports; a status ends the record."""
        if self.first_token_s is None and chunk.tokens:
            self.first_token_s = now_s
        self.marks.append((now_s, chunk.tokens))
        self.output_tokens = chunk.tokens
        self.cached_tokens = chunk.cached_tokens
        self.hot_tokens = chunk.hot_tokens
        if chunk.status is not None:
            self.status = chunk.status
            self.finish_s = now_s

    def row(self) -> dict[str, Any]:
        """As a JSON object, without the marks."""
        return {name: value for name, value in asdict(self).items() if name != "marks"}


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
        record = RequestRecord(
            request.request_id,
            request.session,
            request.arrival_s,
            len(request.input_ids),
            f"{name}.{stamp}.{request.request_id}",
        )
        records.append(record)
        running.add(asyncio.create_task(answer(request, record)))
        await asyncio.sleep(0)  # the task sends before the next request is looked at
    await _end(client, running, is_enough)
    for record in cut:
        if record.status != "finished":
            record.status, record.error = "unfinished", None
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
