"""Ranking: what a contest says - who is best, what the oracle leaves, whether moving pays."""

from dataclasses import dataclass
from typing import Literal

from granikv.planner.cells import CellResult
from granikv.planner.contest import ORACLE, Contest, Kind
from granikv.planner.gain import WORTHWHILE, Gain, gain
from granikv.planner.objective import Objective

Answer = Literal["worth it", "within the noise", "worse"]


@dataclass(frozen=True, slots=True)
class Standing:
    """One entry's place.

    Attributes:
        over_static: against the best static split.
        of_oracle: against the oracle, None without one.
        nominal: its run of seed 0.
    """

    name: str
    kind: Kind
    over_static: Gain
    of_oracle: Gain | None
    nominal: CellResult


@dataclass(frozen=True, slots=True)
class Ranking:
    """The answer.

    Attributes:
        answer: whether the best policy beats the best static split by more than the noise, the
            other way round, or neither.
        standings: best first; the oracle, when there is one, before all.
        best_static: of all seeds together; of equally good ones the smallest.
        best_policy: the same of the policies.
        over_start: the best policy against the split that it started from.
    """

    answer: Answer
    objective: Objective
    standings: tuple[Standing, ...]
    best_static: Standing
    best_policy: Standing
    over_start: Gain

    @property
    def oracle(self) -> Standing | None:
        """The oracle's place, None without one."""
        return next((s for s in self.standings if s.kind == "oracle"), None)


def rank(contest: Contest) -> Ranking:
    """Rank by mean gain over the best static split, seed by seed.

    Raises:
        ValueError: the nominal seed is incomplete (an interrupted contest).
    """
    statics, policies = contest.named("static"), contest.named("policy")
    if not all((name, 0) in contest.results for name in (*statics, *policies)):
        raise ValueError("a contest must hold the nominal seed of every entry")
    objective = contest.decided_objective()
    base = contest.of(statics[0])
    gains = {name: gain(contest.of(name), base, objective).mean for name in statics}
    best_static = max(gains, key=gains.__getitem__)
    names: dict[Kind, list[str]] = {"static": statics, "policy": policies, "oracle": [ORACLE]}
    found = [
        _standing(contest, name, kind, best_static, objective)
        for kind in names
        for name in names[kind]
        if (name, 0) in contest.results
    ]
    standings = sorted(found, key=lambda s: (s.kind != "oracle", -s.over_static.mean))
    best_policy = next(s for s in standings if s.kind == "policy")
    start = f"static {contest.task.server.hot_fraction:g}"
    return Ranking(
        answer=_answer(contest, best_policy.name, best_static, objective),
        objective=objective,
        standings=tuple(standings),
        best_static=next(s for s in standings if s.name == best_static),
        best_policy=best_policy,
        over_start=gain(contest.of(best_policy.name), contest.of(start), objective),
    )


def _standing(
    contest: Contest, name: str, kind: Kind, best_static: str, objective: Objective
) -> Standing:
    runs, oracle = contest.of(name), contest.of(ORACLE)
    return Standing(
        name=name,
        kind=kind,
        over_static=gain(runs, contest.of(best_static), objective),
        of_oracle=gain(runs, oracle, objective) if oracle else None,
        nominal=runs[0],
    )


def _answer(contest: Contest, policy: str, static: str, objective: Objective) -> Answer:
    """The best policy of several looks good by luck alone: its interval is widened for that."""
    cautious = gain(contest.of(policy), contest.of(static), objective, len(contest.named("policy")))
    if cautious.mean >= WORTHWHILE and cautious.low > 1.0:
        return "worth it"
    is_worse = cautious.mean <= 1 / WORTHWHILE and cautious.high < 1.0
    return "worse" if is_worse else "within the noise"
