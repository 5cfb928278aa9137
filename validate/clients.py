"""Clients: an `sglang.Engine` in this process, or a server by HTTP, behind one interface.

Both need SGLang 0.5.17's answers: chunks hold all output so far, `index` is the place in the batch,
and the sampling parameter `stream_interval` says after how many tokens the next chunk comes.
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from granikv.validate.live import Chunk

_IDLE_S = 10.0  # to wait for the last request to leave before the cache is emptied


class ServerError(Exception):
    """The server answered with an error."""


class EngineClient:
    """Talks to an `sglang.Engine`; its methods must run in the engine's own `loop`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def stream(
        self,
        prompts: Sequence[list[int]],
        output_tokens: int,
        interval: int,
        rids: Sequence[str],
        prefix_tokens: int = 0,
    ) -> AsyncIterator[Chunk]:
        """See `granikv.validate.live.Client`; `prefix_tokens` are declared as shared."""
        answers = await self._engine.async_generate(
            input_ids=list(prompts),
            sampling_params=sampling(output_tokens, interval, prefix_tokens),
            rid=list(rids),
            stream=True,
        )
        async for answer in answers:
            yield chunk_of(answer)

    def generate(self, prompts: Sequence[list[int]], sampling: Mapping[str, Any]) -> list[Any]:
        """Whole answers with the log-probabilities of their tokens; not in a coroutine."""
        answers: list[Any] = self._engine.generate(
            input_ids=list(prompts), sampling_params=dict(sampling), return_logprob=True
        )
        return answers

    async def flush(self) -> None:
        """See `granikv.validate.live.Client`.

        Raises:
            ServerError: requests are still running.
        """
        answer = await self._engine.tokenizer_manager.flush_cache(timeout_s=_IDLE_S)
        if not answer.success:
            raise ServerError(f"the cache was not emptied: {answer.message}")

    async def abort_all(self) -> None:
        """See `granikv.validate.live.Client`."""
        self._engine.tokenizer_manager.abort_request(abort_all=True)

    async def abort(self, rid: str) -> None:
        """End one request now."""
        self._engine.tokenizer_manager.abort_request(rid)

    async def state(self) -> dict[str, Any]:
        """See `granikv.validate.live.Client`."""
        return _ours(await self._engine.tokenizer_manager.get_internal_state())

    async def configure(self, choices: Mapping[str, str | float]) -> None:
        """Give an idle server of ours another hot fraction, admission or dispatch.

        Raises:
            ServerError: it kept what it had.
        """
        from sglang.srt.managers.io_struct import (  # type: ignore[import-not-found, unused-ignore]
            SetInternalStateReq,
        )

        from granikv.sglang_plugin.admin import to_numbers

        await self.flush()  # waits for the last step of what was asked before
        request = SetInternalStateReq(server_args=to_numbers(choices))
        if not all(await self._engine.tokenizer_manager.set_internal_state(request)):
            raise ServerError(f"the server kept its settings instead of {dict(choices)}")

    async def profile(self, folder: Path, steps: int) -> None:
        """Have each rank write the kernels of its next steps to `folder`, as a Chrome trace."""
        from sglang.srt.managers.io_struct import (  # type: ignore[import-not-found, unused-ignore]
            ProfileReq,
        )

        request = ProfileReq(
            output_dir=str(folder),
            num_steps=steps,
            activities=["GPU"],
            with_stack=False,
            record_shapes=False,
        )
        await self._engine.tokenizer_manager.start_profile(request)


class HttpClient:
    """Talks to a server at `url`; a context manager, because it holds connections."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._session: Any = None

    async def __aenter__(self) -> "HttpClient":
        """Open the connections."""
        import aiohttp  # type: ignore[import-not-found, unused-ignore]

        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=1 << 24,  # a chunk is one line, with all output so far
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close them."""
        await self._session.close()

    async def stream(
        self, prompts: Sequence[list[int]], output_tokens: int, interval: int, rids: Sequence[str]
    ) -> AsyncIterator[Chunk]:
        """See `granikv.validate.live.Client`."""
        body = {
            "input_ids": list(prompts),
            "sampling_params": sampling(output_tokens, interval),
            "rid": list(rids),
            "stream": True,
        }
        async with self._session.post(f"{self._url}/generate", json=body) as response:
            await _check(response)
            async for line in response.content:
                if (answer := answer_of_line(line)) is not None:
                    yield chunk_of(answer)

    async def flush(self) -> None:
        """See `granikv.validate.live.Client`."""
        url = f"{self._url}/flush_cache?timeout={_IDLE_S:g}"
        async with self._session.post(url) as response:
            await _check(response)

    async def abort_all(self) -> None:
        """See `granikv.validate.live.Client`."""
        body = {"abort_all": True}
        async with self._session.post(f"{self._url}/abort_request", json=body) as response:
            await _check(response)

    async def state(self) -> dict[str, Any]:
        """See `granikv.validate.live.Client`."""
        return _ours((await self.info()).get("internal_states", ()))

    async def info(self) -> dict[str, Any]:
        """The server's settings and sizes."""
        async with self._session.get(f"{self._url}/server_info") as response:
            await _check(response)
            settings: dict[str, Any] = await response.json()
            return settings


def sampling(output_tokens: int, interval: int, prefix_tokens: int = 0) -> dict[str, Any]:
    """Sampling parameters for exactly so many tokens, and a shared prefix where there is one."""
    hint = {"custom_params": {"granikv_prefix_tokens": prefix_tokens}} if prefix_tokens else {}
    return {
        **hint,
        "max_new_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream_interval": interval,
    }


def chunk_of(answer: Mapping[str, Any]) -> Chunk:
    """A streamed answer of SGLang as the driver takes it.

    Raises:
        ServerError: the answer is an error.
    """
    if "error" in answer:
        raise ServerError(str(answer["error"]))
    meta = answer["meta_info"]
    reason = meta.get("finish_reason")
    is_abort = isinstance(reason, dict) and reason.get("type") == "abort"
    return Chunk(
        index=answer.get("index", 0),
        tokens=meta.get("completion_tokens", 0),
        cached_tokens=meta.get("cached_tokens", 0),
        status=None if reason is None else "aborted" if is_abort else "finished",
    )


def answer_of_line(line: bytes) -> dict[str, Any] | None:
    """The JSON object in a line of a server-sent stream, None where it holds none."""
    text = line.strip()
    if not text.startswith(b"data:") or text == b"data: [DONE]":
        return None
    answer: dict[str, Any] = json.loads(text.removeprefix(b"data:"))
    return answer


def _ours(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the first replica's plugin says; ranks of one replica decide alike."""
    return dict(states[0].get("granikv", {})) if states else {}


async def _check(response: Any) -> None:
    if response.status != 200:
        raise ServerError(f"{response.url} answered {response.status}: {await response.text()}")
