"""replay: the requests of a live run through the simulator, on the live run's clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import polars as pl

from granikv.core.errors import ConfigError
from granikv.cost_models.models import load_model
from granikv.cost_models.params import GpuParams, load_params
from granikv.cost_models.step import StepCost
from granikv.sim.config import ServerConfig
from granikv.sim.run import MemorySink, simulate
from granikv.traces.request import Request, Run
from granikv.validate.compare.live_run import LiveRun, server_config

_APART_S = 100.0  # between what is answered before the clock begins; any answer takes less


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the simulator says of a live run: run records, 0 s being the live run's."""

    requests: pl.DataFrame
    steps: pl.DataFrame


def cost_of(model: str, gpu: str, tp: int, params: GpuParams | None = None) -> StepCost:
    """Step times of a live server, from the shipped parameters of its GPU or from others.

    Raises:
        ConfigError: model or GPU are not known.
    """
    return StepCost(params or load_params(gpu), load_model(model), tp=tp)


def replay(run: LiveRun, cost: StepCost, *, exact: bool = False) -> Replayed:
    """Simulate a live run; `exact` asks the cost of every single step.

    Raises:
        ConfigError: the run has no trace, or the simulator has no such server.
    """
    if run.trace is None:
        raise ConfigError(f"{run.folder} has no trace.jsonl, so its requests are not known.")
    config = server_config(run.header.flags, run.variant, run.header.size_tokens, exact=exact)
    return simulated(run.trace, run.cached, config, cost)


def simulated(
    trace: Sequence[Request],
    cached: Sequence[tuple[Run, ...]],
    config: ServerConfig,
    cost: StepCost,
    wrap: Callable[[StepCost, float], StepCost] | None = None,
) -> Replayed:
    """Requests after prompts that are in the cache already.

    `wrap` may put another cost in the place of `cost`; it is told where the trace's clock begins,
    in seconds of the simulation.
    """
    begin_s = _APART_S * len(cached)
    before = [Request(number, _APART_S * number, prompt, 1) for number, prompt in enumerate(cached)]
    first = 1 + max((r.request_id for r in trace), default=0)
    before = [replace(r, request_id=first + r.request_id) for r in before]
    shifted = [replace(r, arrival_s=r.arrival_s + begin_s) for r in trace]
    sink = MemorySink()
    simulate([*before, *shifted], config, wrap(cost, begin_s) if wrap else cost, sink)
    requests, steps = sink.frames()
    times = ("arrival_s", "sent_s", "first_token_s", "finish_s")
    return Replayed(
        requests.filter(pl.col("id") < first)
        .with_columns(pl.col(name) - begin_s for name in times)
        .sort("id"),
        steps.filter(pl.col("start_s") >= begin_s).with_columns(pl.col("start_s") - begin_s),
    )
