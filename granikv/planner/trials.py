"""Trials: one simulation each of a policy or of a schedule, for its score alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

from granikv.core.policies import make_policy
from granikv.cost_models.step import StepCost
from granikv.planner.objective import Objective, score
from granikv.sim.config import ServerConfig
from granikv.sim.metrics import Slo, summarise
from granikv.sim.run import MemorySink, simulate
from granikv.sim.schedule import Ask, RecordingPolicy, ScheduledPolicy
from granikv.traces.request import Request


@dataclass(frozen=True, slots=True)
class Schedule:
    """HOT sizes over time.

    Attributes:
        hot_fraction: of the pool at 0 s.
        tracks: asks of each replica.
    """

    hot_fraction: float
    tracks: tuple[tuple[Ask, ...], ...]

    def policies(self) -> list[ScheduledPolicy]:
        """What makes a simulation follow it."""
        return [ScheduledPolicy(asks) for asks in self.tracks]

    def hold(self, start_s: float, end_s: float, hot_tokens: int) -> "Schedule":
        """The same, but for a time in which every replica wants `hot_tokens`."""
        tracks = tuple(_held(asks, start_s, end_s, hot_tokens) for asks in self.tracks)
        return replace(self, tracks=tracks)


def constant(hot_fraction: float, hot_tokens: int, replicas: int) -> Schedule:
    """A static split as a schedule."""
    return Schedule(hot_fraction, ((Ask(0.0, hot_tokens),),) * replicas)


def _held(asks: tuple[Ask, ...], start_s: float, end_s: float, hot_tokens: int) -> tuple[Ask, ...]:
    before = [ask for ask in asks if ask.at_s < start_s]
    after = [ask for ask in asks if ask.at_s > end_s]
    due = [ask.hot_tokens for ask in asks if ask.at_s <= end_s]
    resumed = Ask(end_s, due[-1] if due else None)
    return (*before, Ask(start_s, hot_tokens), resumed, *after)


@dataclass(frozen=True, slots=True)
class Bench:
    """Load and server of a row of trials, and what counts; every trial sees the same."""

    requests: Sequence[Request]
    server: ServerConfig
    cost: StepCost
    replicas: int = 1
    router: str = "round_robin"
    objective: Objective = "throughput"
    slo: Slo = field(default_factory=Slo)


@dataclass(frozen=True, slots=True)
class Trial:
    """How a run was steered and what came of it.

    Attributes:
        schedule: gives the same run again.
        score: by the bench's objective.
        end_s: when its last request ended.
        name: of the policy; empty for a schedule that was tried.
    """

    schedule: Schedule
    score: float
    end_s: float
    name: str = ""


def try_policy(bench: Bench, name: str, hot_fraction: float) -> Trial:
    """Run a policy by name.

    Raises:
        ConfigError: it does not exist or fails.
    """
    policies = [RecordingPolicy(make_policy(name)) for _ in range(bench.replicas)]
    found, end_s = _run(bench, hot_fraction, policies)
    tracks = tuple(_thinned(policy.asks) for policy in policies)
    return Trial(Schedule(hot_fraction, tracks), found, end_s, name)


def _thinned(asks: Iterable[Ask]) -> tuple[Ask, ...]:
    """Without those that want what the one before wants: an ask holds until the next one."""
    groups = groupby(asks, key=attrgetter("hot_tokens"))
    return tuple(next(same) for _, same in groups)


def try_schedule(bench: Bench, schedule: Schedule) -> Trial:
    """Run a schedule."""
    return Trial(schedule, *_run(bench, schedule.hot_fraction, schedule.policies()))


class _RequestsSink(MemorySink):
    """No score needs step rows."""

    def step(self, *row: Any) -> None:
        """Drop it."""


def _run(
    bench: Bench, hot_fraction: float, policies: Sequence[RecordingPolicy | ScheduledPolicy]
) -> tuple[float, float]:
    sink = _RequestsSink()
    outcome = simulate(
        bench.requests,
        bench.server.model_copy(update={"hot_fraction": hot_fraction}),
        bench.cost,
        sink,
        replicas=bench.replicas,
        router=bench.router,
        policies=policies,
    )
    return score(summarise(*sink.frames(), bench.slo), bench.objective), outcome.end_s
