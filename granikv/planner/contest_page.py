"""contest_page: a contest of policies as one self-contained HTML file, and its table."""

from collections.abc import Mapping
from pathlib import Path

from granikv.planner.cells import CellResult
from granikv.planner.contest import Contest
from granikv.planner.contest_figures import fraction_figure, ranking_figure, rate_figure
from granikv.planner.gain import CONFIDENCE
from granikv.planner.page_figures import pools_figures
from granikv.planner.page_parts import Page, Section, Table
from granikv.planner.provenance import assumptions, parameters, subject
from granikv.planner.ranking import Ranking, Standing
from granikv.planner.ranking_words import sentences
from granikv.planner.words import OBJECTIVES


def standings(ranking: Ranking) -> Table:
    """Headers, and cells by name of the row, best first; all but gains of the nominal seed.

    The score has a column of its own where it is no throughput, and so have lost requests (refused
    or aborted) where there are any.
    """
    rows = {standing.name: _row(standing, ranking) for standing in ranking.standings}
    headers = next(iter(rows.values()))
    return ("", *headers), {name: tuple(cells.values()) for name, cells in rows.items()}


def _row(standing: Standing, ranking: Ranking) -> dict[str, str]:
    """Cells by header."""
    summary = standing.nominal.summary
    row = {"over best static": standing.over_static.text}
    if ranking.oracle is not None:
        row["of oracle"] = "" if standing.of_oracle is None else f"{standing.of_oracle.mean:.2f}x"
    if ranking.objective == "goodput":
        row["goodput, req/s"] = f"{summary.goodput_requests_per_s:.2f}"
    if ranking.objective == "latency":
        row["end to end, mean s"] = f"{summary.e2e_s.mean:,.2f}"
    row |= {
        "tokens/s": f"{summary.throughput_tokens_per_s:,.0f}",
        "TTFT s, p50 / p95": f"{summary.ttft_s.p50:,.2f} / {summary.ttft_s.p95:,.2f}",
        "TPOT ms, p50": f"{summary.tpot_s.p50 * 1e3:.1f}",
        "HOT share": f"{summary.hot_share:.1%}",
    }
    if any(_lost(other) for other in ranking.standings):
        row["lost"] = f"{_lost(standing):,}"
    return row | {
        "retracted": f"{summary.retractions:,}",
        "copied, tokens": f"{summary.migrated_tokens:,}",
    }


def _lost(standing: Standing) -> int:
    return standing.nominal.summary.requests - standing.nominal.summary.finished


def write_page(
    contest: Contest, ranking: Ranking, path: Path, facts: Mapping[str, str] | None = None
) -> None:
    """Write the page; `facts` are further lines of its assumptions, by name."""
    Page(
        title="policies",
        subject=subject(contest.task),
        is_partial=contest.is_partial,
        sentences=sentences(ranking, contest),
        cards=_cards(ranking),
        table=standings(ranking),
        best=to_run(ranking).name,
        sections=_sections(contest, ranking),
        assumptions=dict(facts or {}) | assumptions(contest) | _rules(contest, ranking),
        parameters=parameters(contest.task),
    ).write(path)


def to_run(ranking: Ranking) -> Standing:
    """The best that a server can run."""
    return ranking.best_policy if ranking.answer == "worth it" else ranking.best_static


def _cards(ranking: Ranking) -> dict[str, str]:
    policy, oracle = ranking.best_policy, ranking.oracle
    cards = {
        "a dynamic split against the best fixed one": ranking.answer,
        f"{policy.name} over {ranking.best_static.name}": policy.over_static.text,
        f"{policy.name} over the fraction it starts from": ranking.over_start.text,
    }
    if oracle is not None:
        cards["the oracle over the best fixed split"] = oracle.over_static.text
    return cards


def _sections(contest: Contest, ranking: Ranking) -> list[Section]:
    shown = _shown(ranking)
    unit = OBJECTIVES[ranking.objective]
    rank_note = (
        f"In {unit}, right is better. A bar is a {CONFIDENCE:.0%} interval from seeds; in each, "
        "all see the same load and the same draw of the cost model."
    )
    hot_note = "Where the boundary stood: first replica, nominal seed."
    rate_note = "Output tokens of decode steps: all replicas, nominal seed."
    pools_note = (
        "First replica, nominal seed. Red is HOT in use, blue COLD in use above it, the black line "
        "the rows of the decode batch; dotted is HOT's size where it moves."
    )
    size_tokens = contest.task.server.size_tokens
    return [
        Section("Gain over the best fixed split", rank_note, {"": ranking_figure(ranking)}),
        Section("HOT fraction over time", hot_note, {"": fraction_figure(shown, size_tokens)}),
        Section("Throughput over time", rate_note, {"": rate_figure(shown)}),
        Section("Pools over time", pools_note, dict(reversed(pools_figures(shown).items()))),
    ]


def _shown(ranking: Ranking) -> dict[str, CellResult]:
    """The best static split, all policies and the oracle."""
    best = ranking.best_static
    drawn = [best, *(s for s in ranking.standings if s.kind != "static")]
    return {standing.name: standing.nominal for standing in drawn}


def _rules(contest: Contest, ranking: Ranking) -> dict[str, str]:
    server, options = contest.task.server, contest.options
    rules = {
        "Policies": (
            f"start at {server.hot_fraction:g}, look every {server.policy_interval_s:g} s, at most "
            f"{server.move_tokens_per_step:,} tokens are copied in a step"
        )
    }
    if options is not None and ranking.oracle is not None:
        rules["Oracle"] = (
            f"the best schedule that at most {options.most_simulations} simulations of each seed "
            f"found, in windows of {options.window_s:g} s or longer; it knows the load, pays for "
            "its moves as policies do, and is never below a split or policy compared here. A "
            "better schedule may exist"
        )
    return rules
