"""Contest: repartition policies, static splits and the oracle on one load, seed by seed."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from granikv.core.errors import ConfigError
from granikv.core.policies import make_policy
from granikv.planner.cells import Cell, CellResult, PlanTask, run_cell, seeded
from granikv.planner.objective import Objective
from granikv.planner.oracle import Oracle, OracleOptions, Wanted, search
from granikv.planner.parallel import run_all
from granikv.planner.search import Progress, is_overloaded
from granikv.planner.trials import Bench, Schedule, Trial

Kind = Literal["static", "policy", "oracle"]
ORACLE = "oracle"


@dataclass(frozen=True, slots=True)
class Entry:
    """What takes part.

    Attributes:
        name: for people; unique.
        repartition: name of the policy.
        hot_fraction: of the pool at the start.
    """

    name: str
    kind: Kind
    repartition: str
    hot_fraction: float


@dataclass(slots=True)
class Contest:
    """Who takes part on which load, and all results so far.

    Attributes:
        task: its server's HOT fraction is where policies start.
        objective: what counts, None for what suits the load.
        options: of the oracle, None without one.
        results: by name of the entry and seed.
        oracles: by seed.
        is_partial: after an interrupt.
    """

    task: PlanTask
    entries: tuple[Entry, ...]
    seeds: int
    replicas: int = 1
    objective: Objective | None = None
    options: OracleOptions | None = None
    results: dict[tuple[str, int], CellResult] = field(default_factory=dict)
    oracles: dict[int, Oracle] = field(default_factory=dict)
    is_partial: bool = False

    def of(self, name: str) -> list[CellResult]:
        """Results of one entry in order of seed."""
        keys = [(name, seed) for seed in range(self.seeds)]
        return [self.results[key] for key in keys if key in self.results]

    def named(self, kind: Kind) -> list[str]:
        """Names of the entries of a kind, in order."""
        return [entry.name for entry in self.entries if entry.kind == kind]

    def decided_objective(self) -> Objective:
        """Where none was chosen: goodput under an SLO; throughput when no static split keeps up or
        all comes at once; else latency, since splits that keep up all send what was asked for.

        Raises:
            ValueError: the nominal runs of the static splits are not there.
        """
        if self.objective is not None:
            return self.objective
        if self.task.slo.is_set:
            return "goodput"
        keys = [(name, 0) for name in self.named("static")]
        if not all(key in self.results for key in keys):
            raise ValueError("the nominal runs of the static splits must be there")
        nominal = [self.results[key] for key in keys]
        if nominal[0].summary.offered_s < 1.0 or all(is_overloaded(result) for result in nominal):
            return "throughput"
        return "latency"


def entries_of(
    start: float, fractions: tuple[float, ...], policies: tuple[str, ...]
) -> tuple[Entry, ...]:
    """Static splits, that which policies start from among them, and policies by short names.

    Raises:
        ConfigError: a policy does not exist, is named twice, or is static.
    """
    for name in policies:
        make_policy(name)
        if policies.count(name) > 1:
            raise ConfigError(f"--policy {name} is given twice; name each policy once.")
    if "static" in policies:
        raise ConfigError("--policy static moves nothing; fixed fractions are what --static names.")
    splits = [Entry(f"static {f:g}", "static", "static", f) for f in sorted({start, *fractions})]
    short = [name.rpartition(":")[2] for name in policies]
    taken = [*short, ORACLE]
    labels = [a if taken.count(a) == 1 else b for a, b in zip(short, policies, strict=True)]
    movers = [Entry(a, "policy", b, start) for a, b in zip(labels, policies, strict=True)]
    return (*splits, *movers)


def oracle_options(entries: tuple[Entry, ...], window_s: float, simulations: int) -> OracleOptions:
    """The oracle of a contest starts from all who take part.

    Raises:
        ConfigError: the window is not a positive time.
    """
    return OracleOptions(
        tuple(entry.hot_fraction for entry in entries if entry.kind == "static"),
        tuple(entry.repartition for entry in entries if entry.kind == "policy"),
        window_s,
        simulations,
    )


def run_entries(
    contest: Contest, records: Path, on_progress: Progress, jobs: int | None = None
) -> None:
    """Run static splits and policies into `contest.results`; nominal runs leave run records."""
    # Policies first: a user's own may fail, and had better do so at once.
    entries = sorted(contest.entries, key=lambda entry: entry.kind != "policy")
    keys = [(entry, seed) for seed in range(contest.seeds) for entry in entries]
    calls = [
        partial(_run_entry, contest.task, entry, contest.replicas, seed, records)
        for entry, seed in keys
    ]
    for done, (place, result) in enumerate(run_all(calls, jobs), 1):
        entry, seed = keys[place]
        contest.results[entry.name, seed] = result
        on_progress(done, len(calls))


def _run_entry(task: PlanTask, entry: Entry, replicas: int, seed: int, records: Path) -> CellResult:
    cell = Cell("granikv", entry.hot_fraction, replicas, seed)
    folder = None if seed else records / _folder(entry.name)
    return run_cell(_steered(task, entry.repartition), cell, folder)


def _steered(task: PlanTask, repartition: str) -> PlanTask:
    return replace(task, server=task.server.model_copy(update={"repartition": repartition}))


def _folder(name: str) -> str:
    return name.replace(" ", "-").replace("/", "_")


# ---------------------------------------------------------------------- oracle


def run_oracle(
    contest: Contest, records: Path, on_progress: Progress, jobs: int | None = None
) -> None:
    """Search for the oracle of every seed, then run it as the others ran.

    Raises:
        ValueError: the entries have not run.
    """
    if contest.options is None:
        return
    _search_all(contest, contest.options, contest.decided_objective(), on_progress, jobs)
    seeds = sorted(contest.oracles)
    calls = [
        partial(_run_schedule, contest.task, contest.oracles[seed].best.schedule, seed, records)
        for seed in seeds
    ]
    for place, result in run_all(calls, jobs):
        contest.results[ORACLE, seeds[place]] = result


def _search_all(
    contest: Contest,
    options: OracleOptions,
    objective: Objective,
    on_progress: Progress,
    jobs: int | None,
) -> None:
    """All seeds side by side: a batch of one search alone would leave cores idle."""
    task, replicas = contest.task, contest.replicas
    searches = {seed: search(options, task.server, replicas) for seed in range(contest.seeds)}
    wanted = {seed: next(steps) for seed, steps in searches.items()}
    done, total = 0, contest.seeds * options.most_simulations
    while wanted:
        keys = [(seed, place) for seed, batch in wanted.items() for place in range(len(batch))]
        calls = [
            partial(_try, task, replicas, seed, objective, wanted[seed][place])
            for seed, place in keys
        ]
        found: dict[tuple[int, int], Trial] = {}
        for place, trial in run_all(calls, jobs):
            found[keys[place]] = trial
            done += 1
            on_progress(done, total)
        for seed, batch in list(wanted.items()):
            trials = [found[seed, place] for place in range(len(batch))]
            try:
                wanted[seed] = searches[seed].send(trials)
            except StopIteration as end:
                contest.oracles[seed] = end.value
                del wanted[seed]


def _try(task: PlanTask, replicas: int, seed: int, objective: Objective, wanted: Wanted) -> Trial:
    cost, requests = seeded(task, seed)
    return wanted(
        Bench(list(requests), task.server, cost, replicas, task.router, objective, task.slo)
    )


def _run_schedule(task: PlanTask, schedule: Schedule, seed: int, records: Path) -> CellResult:
    cell = Cell("granikv", schedule.hot_fraction, len(schedule.tracks), seed)
    folder = None if seed else records / _folder(ORACLE)
    return run_cell(_steered(task, ORACLE), cell, folder, schedule.policies())
