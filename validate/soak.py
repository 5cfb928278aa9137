"""soak: everything at once, for long, on a server of ours: `python -m granikv.validate.soak MODEL`.

Shared, nested and unshared prompts, some of them aborted, on pools that are far too small, with
another hot fraction, admission, dispatch and policy of the boundary every now and then. SGLang
checks at every step and every idle moment that no slot is lost and ends the server if one is. With
`GRANIKV_CHECK_STEPS`, steps are computed twice. Prints one JSON object; exit code 1 where a request
had no proper end or a checked step differed.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from granikv.validate.servers import STRICT, VARIANTS, serving

Choices = Mapping[str, str | float]
# HOT far too small, COLD far too small, and a plain one; all policies and modes; moving boundaries.
PHASES: tuple[Choices, ...] = (
    {"hot_fraction": 0.02, "admission": "shared", "dispatch": "cost"},
    {"hot_fraction": 0.6, "admission": "paper", "dispatch": "dense"},
    {"hot_fraction": 0.25, "admission": "value", "dispatch": "cascade"},
    {"hot_fraction": 0.6, "admission": "shared", "dispatch": "threshold"},
    {"hot_fraction": 0.02, "admission": "shared", "dispatch": "cascade_cold"},
    {"hot_fraction": 0.02, "admission": "value", "dispatch": "cost", "repartition": "watermark"},
    {"hot_fraction": 0.6, "admission": "shared", "dispatch": "cost", "repartition": "marginal"},
)
_LOOKS = {"GRANIKV_POLICY_INTERVAL_S": "0.2", "GRANIKV_MOVE_TOKENS_PER_STEP": "500"}
_IDLE_S = 2.0  # between phases: SGLang's check runs when it has nothing to do
_ABORTED = 0.15
_DECLARED = 0.3  # of the requests on a prefix


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of a soak, and how many requests are under way at once."""

    pool_tokens: int = 24_000
    prefix_tokens: int = 3_000
    own_tokens: int = 300
    output_tokens: int = 48
    at_once: int = 96


@dataclass(frozen=True, slots=True)
class Job:
    """One request; aborted after so many tokens, 0 right after it was sent, None never.

    Attributes:
        prefix_tokens: declared as shared.
    """

    prompt: list[int]
    output_tokens: int
    abort_after: int | None
    prefix_tokens: int = 0


def jobs(count: int, sizes: Sizes, vocabulary: int, seed: int) -> list[Job]:
    """Requests on eight prefixes, on three longer ones of each, and on none."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        return list(map(int, rng.integers(10, vocabulary, count)))

    prefixes = [tokens(int(rng.integers(20, sizes.prefix_tokens))) for _ in range(8)]
    nested = [
        prefix + tokens(int(rng.integers(10, sizes.prefix_tokens // 4 + 11)))
        for prefix in prefixes
        for _ in range(3)
    ]
    made = []
    for _ in range(count):
        kind = rng.random()
        head: Sequence[int] = ()
        if kind < 0.45:
            head = prefixes[int(rng.integers(len(prefixes)))]
        elif kind < 0.85:
            head = nested[int(rng.integers(len(nested)))]
        own = tokens(int(rng.integers(1, sizes.own_tokens)))
        output = int(rng.integers(1, sizes.output_tokens))
        aborted = rng.random() < _ABORTED
        abort_after = int(rng.integers(0, output)) if aborted else None
        declared = len(head) if rng.random() < _DECLARED else 0
        made.append(Job([*head, *own], output, abort_after, declared))
    return made


async def send(client: Any, job: Job, rid: str) -> str:
    """One request to its end; the word for how it ended."""
    tokens, status = 0, "unanswered"
    stream = client.stream([job.prompt], job.output_tokens, 1, [rid], job.prefix_tokens)
    if job.abort_after == 0:
        asyncio.get_running_loop().call_later(0.01, asyncio.ensure_future, client.abort(rid))
    async for chunk in stream:
        tokens = chunk.tokens
        if chunk.status is not None:
            status = chunk.status
        elif job.abort_after is not None and tokens >= max(job.abort_after, 1):
            await client.abort(rid)
    if status == "finished" and tokens != job.output_tokens:
        return "too short"
    if status == "aborted" and job.abort_after is None:
        return "aborted unasked"
    return status


async def phase(client: Any, work: Sequence[Job], at_once: int, name: str) -> Counter[str]:
    """Send jobs, so many at once."""
    gate, ends = asyncio.Semaphore(at_once), Counter[str]()

    async def one(number: int, job: Job) -> None:
        async with gate:
            # SGLang aborts every request whose name begins so: no name begins another one.
            ends[await send(client, job, f"{name}-{number}.")] += 1

    await asyncio.gather(*(one(number, job) for number, job in enumerate(work)))
    return ends


def _without_clock(choices: Choices) -> Choices:
    """What ranks that must decide alike may have: the policy `value` reads a clock."""
    return {**choices, "admission": "shared"} if choices["admission"] == "value" else choices


async def soak(
    client: Any, phases: Sequence[Choices], count: int, sizes: Sizes, vocabulary: int
) -> dict[str, Any]:
    """All phases; `ends` of the phases and the seconds they took."""
    result: dict[str, Any] = {"requests": 0, "phases": []}
    per_phase = -(-count // len(phases))
    for number, choices in enumerate(phases):
        await asyncio.sleep(_IDLE_S)
        await client.configure(choices)
        begin_s = time.monotonic()
        work = jobs(per_phase, sizes, vocabulary, number)
        ends = await phase(client, work, sizes.at_once, f"soak{number}")
        took_s = round(time.monotonic() - begin_s, 1)
        result["requests"] += len(work)
        result["phases"].append({**choices, "ends": dict(ends), "took_s": took_s})
    await asyncio.sleep(_IDLE_S)
    # A prompt that COLD can never hold gets an answer, and a server that lives answers the next.
    result["too_long"] = await send(client, Job([7] * sizes.pool_tokens, 1, None), "too-long")
    result["afterwards"] = await send(client, Job([7] * 8, 4, None), "afterwards")
    result["server"] = await client.state()
    return result


def is_clean(result: Mapping[str, Any]) -> bool:
    """Whether every request had a proper end, and no checked step differed."""
    ends = {end for one in result["phases"] for end in one["ends"]}
    last = (result["too_long"], result["afterwards"])
    if ends - {"finished", "aborted"} or last != ("aborted unasked", "finished"):
        return False
    return int(result["server"]["check_failures"]) == 0


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="A long mixed load on pools that are too small.")
    parser.add_argument("model", help="folder with a config.json")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--engine", default="{}", help="more arguments of sglang.Engine, as JSON")
    parser.add_argument("--sizes", default="{}", help="fields of Sizes, as JSON")
    parser.add_argument("--vocabulary", type=int, default=100_000, help="token ids below it")
    chosen = parser.parse_args(argv)
    sizes = Sizes(**json.loads(chosen.sizes))
    arguments = {"max_total_tokens": sizes.pool_tokens, **json.loads(chosen.engine)}
    variant = replace(VARIANTS["granikv"].given(arguments), variables={**STRICT, **_LOOKS})
    phases = PHASES if arguments.get("tp_size", 1) == 1 else list(map(_without_clock, PHASES))
    with serving(variant, chosen.model) as server:
        work = soak(server.client, phases, chosen.requests, sizes, chosen.vocabulary)
        result = server.run(work)
    print(json.dumps(result))
    return 0 if is_clean(result) else 1


if __name__ == "__main__":
    sys.exit(main())
