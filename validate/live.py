"""live: what a server looks like to the driver, and what is written down about a request."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

Status = Literal["finished", "aborted", "failed", "unfinished"]


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


class Configurable(Client, Protocol):
    """A server of ours, whose choices change without a restart."""

    async def configure(self, choices: Mapping[str, str | float]) -> None:
        """Give an idle server another hot fraction, admission or dispatch; empties its cache."""


@dataclass(slots=True)
class RequestRecord:
    """One request's row of run records, times in seconds on the drive's clock; None: not reached.

    Attributes:
        rid: the server's name of the request, which its own records have too.
        asked_tokens: output tokens that were asked for; `output_tokens` are those that came.
        prompt: the prompt as runs of (segment, length), empty where nobody needs to replay it.
        after: id of the request whose end this one waited for, in a closed loop.
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
    asked_tokens: int = 0
    prompt: tuple[tuple[int, int], ...] = ()
    after: int | None = None
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
