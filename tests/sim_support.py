"""What the simulator's tests share: cost models, small servers, random workloads and one call to
run them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import polars as pl
import simpy
from hypothesis import strategies as st

from granikv.core.dispatch import DISPATCH_CHOICES, Dispatcher
from granikv.core.step import StepPlan, StepShape
from granikv.cost_models.decode_line import DecodeLine
from granikv.cost_models.dispatch_table import build_cost_table
from granikv.cost_models.models import load_model
from granikv.cost_models.params import load_params
from granikv.cost_models.step import ExtendCost, StepCost
from granikv.sim.arrivals import Arrivals
from granikv.sim.config import ServerConfig
from granikv.sim.engine import Engine
from granikv.sim.pools import Pools
from granikv.sim.recorder import StepRecorder
from granikv.sim.requests import RequestState
from granikv.sim.run import MemorySink, RunOutcome, simulate
from granikv.traces.request import Request, Run

STEP_NS = 1_000
EXTEND_NS = 10_000
EXTEND_NS_PER_TOKEN = 100
COPY_NS_PER_TOKEN = 10


@cache
def real_cost(tp: int = 1) -> StepCost:
    """Llama-3.1-8B on an H200."""
    return StepCost(load_params("h200-sxm"), load_model("llama-3.1-8b"), tp=tp)


class ConstantCost(StepCost):
    """Every decode step takes `STEP_NS`, an extend step `EXTEND_NS` plus `EXTEND_NS_PER_TOKEN` a
    token.
    """

    def decode(self, shape: StepShape, plan: StepPlan) -> DecodeLine:
        return DecodeLine(0.0, 0.0, 0.0, ((0.0, float(STEP_NS), 0.0),))

    def extend(
        self, extend_lens: Sequence[int], prefix_lens: Sequence[int], padded_tokens: int = 0
    ) -> ExtendCost:
        total = EXTEND_NS + EXTEND_NS_PER_TOKEN * sum(extend_lens)
        return ExtendCost(total, 0.0, float(total), 0.0, 0.0)

    def in_engine(self, is_stock: bool) -> StepCost:
        return self

    def copy_ns(self, tokens: int) -> int:
        return COPY_NS_PER_TOKEN * tokens


@cache
def constant_cost() -> StepCost:
    """A stub for schedules that are worked out by hand."""
    return ConstantCost(load_params("h200-sxm"), load_model("llama-3.1-8b"))


@dataclass(slots=True)
class Result:
    """A finished simulation."""

    outcome: RunOutcome
    requests: pl.DataFrame
    steps: pl.DataFrame


def run(
    requests: Iterable[Request],
    config: ServerConfig,
    cost: StepCost | None = None,
    *,
    replicas: int = 1,
    router: str = "round_robin",
    until_s: float | None = None,
) -> Result:
    """Simulate in memory."""
    sink = MemorySink()
    outcome = simulate(
        requests,
        config,
        cost or constant_cost(),
        sink,
        replicas=replicas,
        router=router,
        until_s=until_s,
    )
    requests_frame, steps_frame = sink.frames()
    return Result(outcome, requests_frame.sort("id"), steps_frame)


class Bench:
    """One engine that a test can stop at any time and look into; built as `simulate` builds it."""

    def __init__(
        self,
        requests: Iterable[Request],
        config: ServerConfig,
        cost: StepCost | None = None,
        pools: Callable[[ServerConfig, tuple[int, int, int]], Pools] = Pools,
        dispatcher: Dispatcher | None = None,
    ) -> None:
        cost = cost or constant_cost()
        self.env = simpy.Environment(initial_time=0)
        self.sink = MemorySink()
        self.ended: list[RequestState] = []
        heads = (cost.heads.q, cost.heads.kv, cost.heads.head_dim)
        if dispatcher is None:
            dispatcher = Dispatcher(build_cost_table(cost), config.dispatch_choice)
        self.recorder = StepRecorder(self.sink)
        self.pools = pools(config, heads)
        self.engine = Engine(
            self.env, config, cost, dispatcher, self.pools, self.recorder, self._on_end
        )
        self.arrivals = Arrivals(self.env, requests, self._send)

    def _send(self, request: Request, now_ns: int) -> None:
        self.engine.submit(RequestState(request, now_ns))

    def _on_end(self, state: RequestState) -> None:
        self.ended.append(state)
        self.arrivals.on_end(state.request)

    def run(self, until_s: float | None = None) -> "Bench":
        """Go on to `until_s`, or to the end."""
        self.env.run(None if until_s is None else round(until_s * 1e9))
        return self


def prompt(*runs: tuple[int, int]) -> tuple[Run, ...]:
    """A prompt of `(segment, length)` runs."""
    return tuple(Run(segment, length) for segment, length in runs)


def lone(request_id: int, arrival_s: float, prompt_tokens: int, output_tokens: int) -> Request:
    """A request that shares nothing."""
    return Request(
        request_id, arrival_s, prompt((10_000 + request_id, prompt_tokens)), output_tokens
    )


def tiny(**changes: object) -> ServerConfig:
    """A server that fits a test: 1000 tokens, SGLang's rules, no overlap unless asked for."""
    settings: dict[str, object] = {
        "system": "sglang",
        "size_tokens": 1000,
        "chunked_prefill_size": 256,
        "max_prefill_tokens": 512,
        "overlap_schedule": False,
    }
    return ServerConfig(**{**settings, **changes})  # type: ignore[arg-type]


# ---------------------------------------------------------------------- random workloads

# A step takes 4-6 ms with `real_cost`: gaps from none to many steps, some far inside one step.
_GAPS_S = (0.0, 0.0, 0.0, 1e-6, 0.003, 0.0061, 0.02, 0.1)
_HEAD_TOKENS = (1, 17, 40, 260, 300, 500)


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    """Few streams, so that prompts share prefixes; open loop, sessions, hints, bursts and ties."""
    count = draw(st.sampled_from([2, 6, 12, 20, 30]))
    clock_s = 0.0
    requests: list[Request] = []
    for request_id in range(count):
        clock_s += draw(st.sampled_from(_GAPS_S))
        talks = [past for past in requests if past.session is not None]
        if talks and draw(st.integers(0, 3)) == 0:
            requests.append(draw(_turns(request_id, draw(st.sampled_from(talks)))))
        else:
            requests.append(draw(_openers(request_id, clock_s)))
    return requests


@st.composite
def _turns(draw: st.DrawFn, request_id: int, past: Request) -> Request:
    runs = list(past.prompt)
    if past.output_segment is not None:
        runs.append(Run(past.output_segment, past.output_tokens))
    runs.append(Run(1000 + request_id, draw(st.integers(1, 40))))
    return Request(
        request_id,
        0.0,
        tuple(runs),
        draw(_OUTPUTS),
        session=past.session,
        after=past.request_id,
        think_s=draw(st.sampled_from([0.0, 1e-6, 0.005, 0.05])),
        output_segment=draw(st.sampled_from([None, 500 + request_id])),
        prefix_tokens=draw(st.sampled_from([0, past.prefix_tokens])),
    )


@st.composite
def _openers(draw: st.DrawFn, request_id: int, arrival_s: float) -> Request:
    heads = draw(
        st.lists(
            st.tuples(st.integers(1, 3), st.sampled_from(_HEAD_TOKENS)),
            max_size=2,
            unique_by=lambda run: run[0],
        )
    )
    tail = [(1000 + request_id, draw(st.integers(1, 40)))]
    if heads and draw(st.integers(0, 4)) == 0:
        tail = []
    return Request(
        request_id,
        arrival_s,
        prompt(*heads, *tail),
        draw(_OUTPUTS),
        session=draw(st.sampled_from([None, f"s{request_id}"])),
        output_segment=draw(st.sampled_from([None, 500 + request_id])),
        prefix_tokens=draw(st.sampled_from([0, sum(length for _, length in heads)])),
    )


_OUTPUTS = st.sampled_from([1, 1, 2, 3, 20, 60, 150, 300])


@st.composite
def servers(draw: st.DrawFn) -> ServerConfig:
    """Small servers of every system, some of them too small for some requests."""
    return ServerConfig(
        system=draw(st.sampled_from(["granikv", "granikv", "granikv", "sglang", "cascade"])),
        size_tokens=draw(st.sampled_from([1600, 1000, 700, 500, 350])),
        hot_fraction=draw(st.sampled_from([0.3, 0.5, 0.1])),
        admission=draw(st.sampled_from(["value", "shared", "paper"])),
        dispatch=draw(st.sampled_from(DISPATCH_CHOICES)),
        chunked_prefill_size=draw(st.sampled_from([8192, 50, 256])),
        max_prefill_tokens=draw(st.sampled_from([16384, 100])),
        max_running_requests=draw(st.sampled_from([100, 2, 5])),
        graph_batch_sizes=draw(st.sampled_from([(1, 2, 4, 8), ()])),
        schedule_policy=draw(st.sampled_from(["fcfs", "lpm"])),
        schedule_conservativeness=draw(st.sampled_from([0.0, 0.3, 1.0])),
        overlap_schedule=draw(st.booleans()),
    )
