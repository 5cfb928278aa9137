"""`granikv policies`: repartition policies side by side on a trace, and whether moving pays."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from granikv.cli.groups import with_groups
from granikv.cli.options import JobsOption, ServerGroup, SloGroup
from granikv.cli.screen import results, say
from granikv.cli.task import begin, end, simulated, task_of
from granikv.cli.trace_options import ReadGroup, TraceArgument, TransformGroup
from granikv.core.errors import ConfigError

if TYPE_CHECKING:
    from granikv.planner.contest import Contest
    from granikv.planner.ranking import Ranking

DEFAULT_POLICIES = ("watermark", "marginal")
_FILES = ("policies.html", "policies.json", "runs")


@with_groups(server=ServerGroup, slo=SloGroup, read=ReadGroup, transform=TransformGroup)
def command(
    trace: TraceArgument,
    *,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Policy to compare: watermark, marginal, or path/to/file.py:Name; may be repeated."
            " Both shipped ones by default."
        ),
    ] = None,
    static: Annotated[
        str, typer.Option(help="Fixed HOT pool fractions to beat: auto, 0.05:0.6 or 0.2.")
    ] = "auto",
    fp: Annotated[
        float,
        typer.Option("--fp", "--hot-fraction", help="HOT pool fraction that policies start from."),
    ] = 0.2,
    policy_interval_s: Annotated[
        float, typer.Option(help="Seconds between two looks of a policy.")
    ] = 1.0,
    objective: Annotated[
        Literal["auto", "throughput", "latency", "goodput"],
        typer.Option(
            help="What counts: output tokens per second, mean end-to-end latency, or requests"
            " within the SLO. auto: goodput with an SLO, throughput where no fixed fraction keeps"
            " up, else latency."
        ),
    ] = "auto",
    oracle: Annotated[
        bool,
        typer.Option(
            "--oracle/--no-oracle",
            help="Also search for the best schedule of fractions, with the whole load in sight.",
        ),
    ] = True,
    oracle_runs: Annotated[
        int, typer.Option(min=0, help="Most simulations of that search, for each seed.")
    ] = 60,
    window: Annotated[
        float, typer.Option(metavar="S", help="Shortest time for which it holds a fraction.")
    ] = 5.0,
    replicas: Annotated[int, typer.Option(min=1, help="Number of servers.")] = 1,
    seeds: Annotated[
        int,
        typer.Option(
            min=1, help="Runs of each; each draws the cost model from its stated error, for all."
        ),
    ] = 5,
    out: Annotated[
        Path, typer.Option(help="Folder for policies.json, policies.html and run records.")
    ] = Path("granikv-policies"),
    jobs: JobsOption = None,
    read: ReadGroup,
    transform: TransformGroup,
    slo: SloGroup,
    server: ServerGroup,
) -> None:
    """Compare policies that move the HOT/COLD boundary with fixed fractions and with an oracle."""
    from granikv.planner.contest import Contest, entries_of, oracle_options
    from granikv.planner.policies import compare_policies
    from granikv.planner.search import parse_fractions

    fractions, limits = parse_fractions(static, "--static"), slo.slo()
    entries = entries_of(fp, fractions, tuple(policy or DEFAULT_POLICIES))
    options = oracle_options(entries, window, oracle_runs) if oracle else None
    if server.repartition != "static":
        raise ConfigError("Name the policies to compare with --policy, not with --repartition.")
    if objective == "goodput" and not limits.is_set:
        raise ConfigError("--objective goodput needs --slo-ttft-ms or --slo-tpot-ms.")
    built = server.build(hot_fraction=fp, policy_interval_s=policy_interval_s)
    source = read.open(trace)
    task = task_of(source, transform, limits, built)
    chosen = None if objective == "auto" else objective
    contest = Contest(task, entries, seeds, replicas, chosen, options)
    facts = begin(source, task, built, out, "policies")
    ranking = simulated(
        lambda bar: compare_policies(contest, out, bar.advance_to, bar.stage, jobs), out, _FILES
    )
    _show(contest, ranking, out, facts)
    end(contest, out, _FILES)


def _show(contest: "Contest", ranking: "Ranking | None", out: Path, facts: dict[str, str]) -> None:
    from granikv.cli.tables import policies_table
    from granikv.planner.contest_page import write_page
    from granikv.planner.provenance import provenance_line
    from granikv.planner.ranking_words import sentences

    if ranking is not None:
        results().print(policies_table(contest, ranking))
        say(*sentences(ranking, contest))
        write_page(contest, ranking, out / "policies.html", facts)
    if contest.results:
        say(provenance_line(contest))
