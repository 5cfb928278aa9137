"""simulate: a request stream through one or more replicas, to run records and totals."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import simpy

from granikv.core.dispatch import Dispatcher
from granikv.core.errors import ConfigError
from granikv.core.repartition import RepartitionPolicy
from granikv.cost_models.dispatch_table import build_cost_table
from granikv.cost_models.step import StepCost
from granikv.sim.arrivals import Arrivals
from granikv.sim.config import ServerConfig
from granikv.sim.engine import Engine
from granikv.sim.ledger import EngineTotals
from granikv.sim.pools import Pools
from granikv.sim.recorder import RecordSink, StepRecorder
from granikv.sim.requests import RequestState, Status
from granikv.sim.router import make_router
from granikv.traces.records import REQUEST_SCHEMA, STEP_SCHEMA
from granikv.traces.request import Request


class MemorySink:
    """Keeps a run's rows in memory, for runs that nobody needs on disk."""

    def __init__(self) -> None:
        self._requests: list[tuple[Any, ...]] = []
        self._steps: list[tuple[Any, ...]] = []

    def request(self, *row: Any) -> None:
        """Keep one ended request."""
        self._requests.append(row)

    def step(self, *row: Any) -> None:
        """Keep one step row."""
        self._steps.append(row)

    def frames(self) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Requests and steps with the run-record schemas."""
        return (
            pl.DataFrame(self._requests, schema=REQUEST_SCHEMA, orient="row"),
            pl.DataFrame(self._steps, schema=STEP_SCHEMA, orient="row"),
        )


@dataclass(slots=True)
class RunOutcome:
    """What a simulation knows beyond its records.

    Attributes:
        unfinished: zero unless the run was cut short.
        boundaries: for each replica, from when (seconds) HOT had how many tokens.
    """

    end_s: float
    sent: int
    finished: int
    refused: int
    aborted: int
    unfinished: int
    totals: list[EngineTotals]
    hot_misses: dict[str, int]
    promoted_tokens: int
    boundaries: list[list[tuple[float, int]]]

    @property
    def fragmentation(self) -> float:
        """Share of free HOT tokens outside the largest free run, over busy time."""
        busy = sum(totals.busy_ns for totals in self.totals)
        return sum(totals.fragmentation_ns for totals in self.totals) / busy if busy else 0.0

    @property
    def split_saved_share(self) -> float:
        """Time that row splits saved (by the cost model), as a share of busy time."""
        busy = sum(totals.busy_ns for totals in self.totals)
        return sum(totals.split_saved_ns for totals in self.totals) / busy if busy else 0.0

    @property
    def term_share(self) -> dict[str, float]:
        """Share of busy time by term: decode steps split by term, extend steps and copies whole."""
        busy = sum(totals.busy_ns for totals in self.totals) or 1
        names = ("host", "gemm", "attention", "collective", "extend", "copy")
        return {
            name: sum(getattr(totals, f"{name}_ns") for totals in self.totals) / busy
            for name in names
        }


def simulate(
    requests: Iterable[Request],
    config: ServerConfig,
    cost: StepCost,
    sink: RecordSink,
    *,
    replicas: int = 1,
    router: str = "round_robin",
    on_progress: Callable[[int], None] | None = None,
    until_s: float | None = None,
    policies: Sequence[RepartitionPolicy] | None = None,
) -> RunOutcome:
    """Run the stream to its end (or to `until_s` simulated seconds) and hand rows to `sink`.

    `on_progress` is called with the number of ended requests, every 256 of them. Step rows of
    several replicas follow each other in time order of their ends. `policies`, one a replica, move
    the boundary in place of the policy that `config.repartition` names.

    Raises:
        ConfigError: `replicas` is not positive, or a name is not known.
        ValueError: the number of `policies` is not that of replicas.
        TraceFormatError: arrival times go backwards.
    """
    if until_s is not None and until_s <= 0:
        raise ConfigError(f"The simulation must end after 0 s, got {until_s}.")
    if replicas < 1:
        raise ConfigError(f"--replicas must be at least 1, got {replicas}.")
    if policies is not None and len(policies) != replicas:
        raise ValueError(f"policies must be {replicas}, one a replica, got {len(policies)}")
    cost = cost.in_engine(config.is_stock)
    env = simpy.Environment(initial_time=0)
    dispatcher = Dispatcher(build_cost_table(cost), config.dispatch_choice, config.row_split)
    ended = dict.fromkeys(Status, 0)

    def on_end(state: RequestState) -> None:
        ended[state.status] += 1
        sink.request(*request_row(state))
        arrivals.on_end(state.request)
        if on_progress is not None:
            count = ended[Status.FINISHED] + ended[Status.REFUSED]
            if count % 256 == 0:
                on_progress(count)

    heads = (cost.heads.q, cost.heads.kv, cost.heads.head_dim)
    engines = []
    recorders = []
    for replica in range(replicas):
        recorder = StepRecorder(sink, replica)
        recorders.append(recorder)
        pools, policy = Pools(config, heads), None if policies is None else policies[replica]
        engines.append(Engine(env, config, cost, dispatcher, pools, recorder, on_end, policy))
    route = make_router(router)

    def send(request: Request, now_ns: int) -> None:
        replica = route(request, engines) if replicas > 1 else 0
        engines[replica].submit(RequestState(request, now_ns, replica))

    arrivals = Arrivals(env, requests, send)
    env.run(None if until_s is None else round(until_s * 1e9))
    for recorder in recorders:
        recorder.flush()
    left = [state for engine in engines for state in engine.unfinished()]
    for state in left:
        sink.request(*request_row(state))
    misses: dict[str, int] = {}
    for engine in engines:
        for reason, count in engine.pools.directory.misses.items():
            misses[reason] = misses.get(reason, 0) + count
    return RunOutcome(
        end_s=float(env.now) / 1e9,
        sent=arrivals.sent,
        finished=ended[Status.FINISHED],
        refused=ended[Status.REFUSED],
        aborted=ended[Status.ABORTED],
        unfinished=len(left),
        totals=[engine.ledger.totals for engine in engines],
        hot_misses=misses,
        promoted_tokens=sum(
            e.pools.placement.promoted_tokens for e in engines if e.pools.placement is not None
        ),
        boundaries=[engine.ledger.boundary for engine in engines],
    )


def request_row(state: RequestState) -> tuple[Any, ...]:
    """A request in the run-record schema; times the request has not reached are null."""
    request, arrival_s = state.request, state.arrival_ns / 1e9
    first, finish = state.first_token_ns, state.finish_ns
    done = state.status == Status.FINISHED
    return (
        request.request_id,
        request.session,
        arrival_s,
        arrival_s,
        None if first is None else first / 1e9,
        None if finish is None or not done else finish / 1e9,
        request.prompt_tokens,
        request.output_tokens if done else state.generated,
        state.cached_tokens,
        state.hot_tokens,
        state.status.value,
        state.replica,
    )
