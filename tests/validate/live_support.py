"""A "live" run that is a simulation: what the ladder must find no error in."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from granikv.cost_models.models import load_model
from granikv.cost_models.params import load_params
from granikv.cost_models.step import StepCost
from granikv.sim.config import ServerConfig
from granikv.sim.run import MemorySink, simulate
from granikv.traces.records import RunHeader, RunWriter
from granikv.traces.request import Request, Run
from granikv.traces.writers import write_trace

SIZE_TOKENS = 60_000
PREFIX = Run(1, 4096)


@cache
def cost() -> StepCost:
    """Llama-3.1-8B on an H200, shipped parameters."""
    return StepCost(load_params("h200-sxm"), load_model("llama-3.1-8b"))


def arrivals(count: int = 60, rate_per_s: float = 20.0, seed: int = 0) -> list[Request]:
    """Requests behind one prefix at the times of a Poisson process."""
    rng = np.random.default_rng(seed)
    times = rng.exponential(1 / rate_per_s, count).cumsum()
    return [
        Request(
            number,
            float(time_s),
            (PREFIX, Run(1000 + number, int(rng.integers(50, 900)))),
            int(rng.integers(5, 200)),
        )
        for number, time_s in enumerate(times)
    ]


def write_run(
    folder: Path,
    variant: str = "granikv",
    requests: Sequence[Request] | None = None,
    *,
    slower: float = 1.0,
    **settings: Any,
) -> Path:
    """Records of a simulated server that say they are live; `slower` stretches its time."""
    requests = arrivals() if requests is None else requests
    system = "sglang" if variant == "stock" else "granikv"
    config = ServerConfig(
        system=system,
        size_tokens=SIZE_TOKENS,
        max_running_requests=64,
        row_split="off",
        **{"admission": "shared"} | settings,
    )
    sink = MemorySink()
    simulate(requests, config, cost(), sink)
    header = RunHeader(
        kind="live",
        model="llama-3.1-8b",
        gpu="NVIDIA H200",
        size_tokens=SIZE_TOKENS,
        hot_tokens=config.hot_tokens,
        clock_origin="2026-11-30T00:00:00+00:00",
        trace="made",
        flags={
            "variant": variant,
            "engine": {
                "max_running_requests": 64,
                "disable_prefill_cuda_graph": not config.prefill_graphs,
            },
            "variables": {f"GRANIKV_{k.upper()}": str(v) for k, v in settings.items()},
            "hot_tokens_known": len(requests),
        },
    )
    with RunWriter(folder, header) as writer:
        times = ("arrival_s", "sent_s", "first_token_s", "finish_s")
        frames = sink.frames()
        for row in frames[0].iter_rows(named=True):
            stretched = {name: row[name] and row[name] * slower for name in times}
            writer.request(*(row | stretched).values())
        for row in frames[1].iter_rows(named=True):
            stretched = {name: row[name] * slower for name in ("start_s", "gpu_us")}
            writer.step(*(row | stretched).values())
    write_trace(requests, folder / "trace.jsonl")
    return folder
