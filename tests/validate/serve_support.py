"""A server in virtual time: what the driver sees of SGLang, with closed forms for its speed."""

import asyncio
import os
from itertools import takewhile
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready:
            waiting = [timer._when for timer in self._scheduled if not timer._cancelled]
            self.now = max(self.now, min(waiting, default=self.now))
        super()._run_once()


def run_virtually(make: Any) -> Any:
    """Run `make(loop)`, a coroutine, in virtual time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(make(loop))
    finally:
        loop.close()


class FakeEngine:
    """An `sglang.Engine` that answers `slots` requests at a time.

    A request's first token comes `prefill_s` after it got a slot, each further one after `step_s`.
    The cache holds every prompt that was answered since the last flush. An answer of a prompt that
    begins with `poison` is an error.
    """

    def __init__(
        self, slots: int = 1000, prefill_s: float = 0.5, step_s: float = 0.01, poison: int = -1
    ) -> None:
        self.prefill_s, self.step_s, self.poison = prefill_s, step_s, poison
        self.tokenizer_manager = self
        self.sent: list[int] = []
        self.flushes = 0
        self._free = asyncio.Semaphore(slots)
        self._abort = asyncio.Event()
        self._cache: list[list[int]] = []

    async def async_generate(
        self, input_ids: Any, sampling_params: Any, rid: Any, stream: bool
    ) -> Any:
        assert stream
        assert sampling_params["ignore_eos"]
        assert len(set(rid)) == len(input_ids)
        self.sent.append(len(input_ids))
        return self._answers(input_ids, sampling_params)

    async def _answers(self, prompts: Any, sampling: Any) -> Any:
        if prompts[0][0] == self.poison:
            raise ValueError("a poisoned prompt")
        chunks: asyncio.Queue[Any] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._one(index, prompt, sampling, chunks))
            for index, prompt in enumerate(prompts)
        ]
        left = len(tasks)
        while left:
            chunk = await chunks.get()
            left -= chunk["meta_info"]["finish_reason"] is not None
            yield chunk

    async def _one(self, index: int, prompt: Any, sampling: Any, chunks: Any) -> None:
        def tell(tokens: int, cached: int, reason: Any) -> None:
            meta = {"completion_tokens": tokens, "cached_tokens": cached, "finish_reason": reason}
            chunks.put_nowait({"index": index, "meta_info": meta})

        count, interval = sampling["max_new_tokens"], sampling["stream_interval"]
        async with self._free:
            cached = max((_common(prompt, known) for known in self._cache), default=0)
            cached = min(cached, len(prompt) - 1)
            for token in range(1, count + 1):
                if self._abort.is_set():
                    tell(token - 1, cached, {"type": "abort", "message": "aborted"})
                    return
                await asyncio.sleep(self.prefill_s if token == 1 else self.step_s)
                if token < count and (token - 1) % interval == 0:
                    tell(token, cached, None)
            self._cache.append(prompt)
            tell(count, cached, {"type": "length"})

    async def flush_cache(self, timeout_s: float) -> Any:
        self.flushes += 1
        self._cache.clear()
        return type("Answer", (), {"success": True, "message": ""})

    async def get_internal_state(self) -> Any:
        return [{"granikv": {"decode_steps": len(self.sent)}}]

    def abort_request(self, abort_all: bool) -> None:
        assert abort_all
        self._abort.set()


class Engine(FakeEngine):
    """Stands for `sglang.Engine` itself: has a loop, sizes and an end. Dies where it is told to."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(prefill_s=0.0, step_s=0.0)
        if arguments["attention_backend"] == os.environ.get("FAKE_DEATH"):
            os._exit(9)
        self.loop = asyncio.new_event_loop()

    def get_server_info(self) -> dict[str, Any]:
        return {"max_total_num_tokens": 4321, "schedule_policy": "fcfs"}

    def shutdown(self) -> None:
        self.loop.close()


def _common(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
