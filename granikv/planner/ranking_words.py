"""ranking_words: a ranking as sentences for people - is a moving split worth it, and why."""

from granikv.planner.contest import Contest
from granikv.planner.gain import WORTHWHILE
from granikv.planner.ranking import Ranking, Standing
from granikv.planner.words import OBJECTIVES

# Fewer make an interval so wide that it says nothing.
_ENOUGH_SEEDS = 3


def sentences(ranking: Ranking, contest: Contest) -> tuple[str, ...]:
    """The answer, most important sentence first."""
    lines = [_answer(ranking, contest), _over_start(ranking, contest)]
    if ranking.oracle is not None:
        lines.append(_oracle(ranking.oracle, ranking, contest))
    if contest.seeds < _ENOUGH_SEEDS:
        count = f"{contest.seeds} seed{'s say' if contest.seeds > 1 else ' says'}"
        lines.append(f"{count} little about the noise; take --seeds {_ENOUGH_SEEDS} or more.")
    return tuple(lines)


def _answer(ranking: Ranking, contest: Contest) -> str:
    static, policy = ranking.best_static.name, ranking.best_policy
    ratio, unit = policy.over_static.text, OBJECTIVES[ranking.objective]
    if ranking.answer == "worth it":
        return (
            f"A dynamic split is worth it on {contest.task.trace.name}: {policy.name} gives "
            f"{ratio} the best fixed one, {static}, in {unit}."
        )
    if ranking.answer == "worse":
        return (
            f"A dynamic split is not worth it on {contest.task.trace.name}: the best policy, "
            f"{policy.name}, gives {ratio} the best fixed one, {static}, in {unit}."
        )
    return (
        f"A dynamic split shows no gain on {contest.task.trace.name}: the best policy, "
        f"{policy.name}, gives {ratio} the best fixed one, {static}, in {unit}, which is within "
        "the noise; keep the fixed one."
    )


def _over_start(ranking: Ranking, contest: Contest) -> str:
    fraction, gain = contest.task.server.hot_fraction, ranking.over_start
    text = f"{ranking.best_policy.name} gives {gain.text} the fraction {fraction:g} it starts from"
    if ranking.answer == "worth it" or gain.mean < WORTHWHILE or gain.low <= 1.0:
        return f"{text}."
    return f"{text}, which helps where nobody has looked for the best one."


def _oracle(oracle: Standing, ranking: Ranking, contest: Contest) -> str:
    """What there was to gain, how much of it the best policy gets, and whether it was all."""
    best = ranking.best_policy
    share = "" if best.of_oracle is None else f", and {best.name} {best.of_oracle.text} of that"
    text = (
        f"The oracle, a schedule that was searched for with the whole load in sight, gives "
        f"{oracle.over_static.text} the best fixed split{share}"
    )
    if oracle.over_static.mean < WORTHWHILE:
        text += ": the search found nothing that moving could gain here"
    return f"{text}.{_more(contest)}"


def _more(contest: Contest) -> str:
    """A hint where a search ended for want of simulations."""
    options, oracles = contest.options, contest.oracles.values()
    if options is None or all(found.simulations < options.most_simulations for found in oracles):
        return ""
    return " Its search used all its simulations; with more --oracle-runs it may find better ones."
