"""policies: the whole of `granikv policies` without its terminal - contest to ranking and files."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from granikv.planner.contest import ORACLE, Contest, run_entries, run_oracle
from granikv.planner.oracle import Oracle
from granikv.planner.parallel import saved
from granikv.planner.provenance import coverage, task_json
from granikv.planner.ranking import Ranking, Standing, rank
from granikv.planner.ranking_words import sentences
from granikv.planner.search import Progress


def compare_policies(
    contest: Contest,
    out: Path,
    on_progress: Progress,
    on_stage: Callable[[str], None],
    jobs: int | None = None,
) -> Ranking | None:
    """Run everything and rank it.

    The ranking is None when an interrupt came before the nominal seed was complete. Run records of
    the nominal seed and policies.json are in `out` afterwards, also after an interrupt or an error.

    Raises:
        ConfigError: a policy fails.
    """

    def run() -> None:
        on_stage("Simulating")
        run_entries(contest, out / "runs", on_progress, jobs)
        if contest.options is not None:
            on_stage("Searching for the oracle")
            run_oracle(contest, out / "runs", on_progress, jobs)

    def save() -> Ranking | None:
        ranking = _try_rank(contest)
        _write(contest, ranking, out / "policies.json")
        return ranking

    return saved(contest, run, save)


def _try_rank(contest: Contest) -> Ranking | None:
    try:
        return rank(contest)
    except ValueError:
        return None


def _write(contest: Contest, ranking: Ranking | None, path: Path) -> None:
    """Write policies.json: the question, the answer, every run."""
    body: dict[str, Any] = {
        "format": "granikv-policies-1",
        "is_partial": contest.is_partial,
        **task_json(contest.task),
        "replicas": contest.replicas,
        "seeds": contest.seeds,
        "entries": [asdict(entry) for entry in contest.entries],
        "oracle_options": None if contest.options is None else asdict(contest.options),
        "cost_model_coverage": coverage(contest),
        "ranking": None if ranking is None else _ranking_json(ranking, contest),
        "oracles": [
            {"seed": seed, **_oracle_json(oracle)}
            for seed, oracle in sorted(contest.oracles.items())
        ],
        "runs": [
            {"name": name, **result.to_json()}
            for name in (*(entry.name for entry in contest.entries), ORACLE)
            for result in contest.of(name)
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=1) + "\n")


def _ranking_json(ranking: Ranking, contest: Contest) -> dict[str, Any]:
    return {
        "answer": ranking.answer,
        "objective": ranking.objective,
        "best_static": ranking.best_static.name,
        "best_policy": ranking.best_policy.name,
        "best_policy_over_start": asdict(ranking.over_start),
        "standings": [_standing_json(standing) for standing in ranking.standings],
        "sentences": list(sentences(ranking, contest)),
    }


def _standing_json(standing: Standing) -> dict[str, Any]:
    of_oracle = standing.of_oracle
    return {
        "name": standing.name,
        "kind": standing.kind,
        "over_best_static": asdict(standing.over_static),
        "of_oracle": None if of_oracle is None else asdict(of_oracle),
    }


def _oracle_json(oracle: Oracle) -> dict[str, Any]:
    """The schedule is `(seconds, HOT tokens or null to stay)` of each replica."""
    schedule = oracle.best.schedule
    return {
        "score": oracle.best.score,
        "started_from": oracle.start.name,
        "start_score": oracle.start.score,
        "simulations": oracle.simulations,
        "hot_fraction": schedule.hot_fraction,
        "schedule": [[[ask.at_s, ask.hot_tokens] for ask in asks] for asks in schedule.tracks],
    }
