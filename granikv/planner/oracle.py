"""Oracle: the best HOT fraction of every window, found by simulating the whole load repeatedly.

It is an upper bound for policies, which know the past only. Its server pays for moves as any other
does: it wants a size, and the Repartitioner moves slots as it can.
"""

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from granikv.core.errors import ConfigError
from granikv.planner.trials import Bench, Schedule, Trial, constant, try_policy, try_schedule
from granikv.sim.config import ServerConfig

# A trial that is wanted: called with the bench, it runs.
Wanted = Callable[[Bench], Trial]
Search = Generator[list[Wanted], list[Trial], "Oracle"]
# The boundary moves between two steps, which are milliseconds apart.
_SHORTEST_WINDOW_S = 0.001


@dataclass(frozen=True, slots=True)
class OracleOptions:
    """How it is searched for.

    Attributes:
        fractions: pool fractions that a window may have, besides none at all; as static splits
            they are where the search starts.
        policies: names of policies that it must not fall behind; they start at the server's own
            fraction.
        window_s: length of a window.
        simulations: most simulations after those of fractions and policies.
    """

    fractions: tuple[float, ...]
    policies: tuple[str, ...] = ()
    window_s: float = 5.0
    simulations: int = 60

    def __post_init__(self) -> None:
        """Check the options."""
        if not self.fractions:
            raise ConfigError("The oracle needs at least one HOT fraction to start from.")
        if not _SHORTEST_WINDOW_S <= self.window_s < math.inf:
            raise ConfigError(
                f"--window must be a finite time of at least {_SHORTEST_WINDOW_S:g} s, got "
                f"{self.window_s:g}."
            )

    @property
    def most_simulations(self) -> int:
        """Those of the starts included."""
        return len(self.fractions) + len(self.policies) + self.simulations


@dataclass(frozen=True, slots=True)
class Oracle:
    """The best schedule that was found, never worse than any split or policy it started from.

    Attributes:
        best: its trial.
        start: the static split or policy that it was improved from.
        simulations: how many simulations that took, the starts' included.
    """

    best: Trial
    start: Trial
    simulations: int


def find_oracle(bench: Bench, options: OracleOptions) -> Oracle:
    """Search in this process."""
    steps = search(options, bench.server, bench.replicas)
    wanted = next(steps)
    while True:
        try:
            wanted = steps.send([run(bench) for run in wanted])
        except StopIteration as found:
            oracle: Oracle = found.value
            return oracle


def search(options: OracleOptions, server: ServerConfig, replicas: int = 1) -> Search:
    """Ask for trials in batches, whose trials may run side by side, and return the oracle.

    The best start is improved block by block, from half the run down to single windows: in each
    block every fraction is tried, and the best kept when the whole run gains by it.
    """
    size = server.size_tokens
    statics = [constant(f, int(f * size), replicas) for f in options.fractions]
    trials = yield [
        *(partial(_static, schedule=schedule) for schedule in statics),
        *(
            partial(try_policy, name=name, hot_fraction=server.hot_fraction)
            for name in options.policies
        ),
    ]
    start = best = _best(trials)
    count, left = len(trials), options.simulations
    windows = max(1, -(-int(best.end_s * 1e9) // int(options.window_s * 1e9)))
    fractions = sorted({0.0, *options.fractions})
    seen = {trial.schedule for trial in trials}
    for first, last in _blocks(windows):
        if not left:
            break
        start_s, end_s = first * options.window_s, last * options.window_s
        tried = [_changed(best.schedule, start_s, end_s, f, size) for f in fractions]
        tried = [schedule for schedule in tried if schedule not in seen][:left]
        seen.update(tried)
        left -= len(tried)
        if tried:
            count += len(tried)
            trials = yield [partial(try_schedule, schedule=schedule) for schedule in tried]
            best = _best([best, *trials])
    return Oracle(best, start, count)


def _static(bench: Bench, schedule: Schedule) -> Trial:
    trial = try_schedule(bench, schedule)
    return replace(trial, name=f"static {schedule.hot_fraction:g}")


def _best(trials: Sequence[Trial]) -> Trial:
    """The first of the best ones."""
    return max(trials, key=lambda trial: trial.score)


def _blocks(windows: int) -> Iterable[tuple[int, int]]:
    """Blocks of windows that halve: (first, last + 1)."""
    length = windows
    while length > 1:
        length = -(-length // 2)
        for first in range(0, windows, length):
            yield first, min(first + length, windows)


def _changed(
    schedule: Schedule, start_s: float, end_s: float, fraction: float, size_tokens: int
) -> Schedule:
    changed = schedule.hold(start_s, end_s, int(fraction * size_tokens))
    # A server starts with what its first window wants, but no server starts without HOT.
    return changed if start_s or not fraction else replace(changed, hot_fraction=fraction)
