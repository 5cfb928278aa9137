"""`granikv plan`: which HOT pool fraction, and how many replicas, a trace needs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from granikv.cli.groups import with_groups
from granikv.cli.options import JobsOption, ServerGroup, SloGroup, parse_replicas
from granikv.cli.screen import results, say
from granikv.cli.task import begin, end, simulated, task_of
from granikv.cli.trace_options import ReadGroup, TraceArgument, TransformGroup

if TYPE_CHECKING:
    from granikv.planner.search import Findings
    from granikv.planner.verdict import Verdict

_FILES = ("plan.html", "plan.json", "runs")


@with_groups(server=ServerGroup, slo=SloGroup, read=ReadGroup, transform=TransformGroup)
def command(
    trace: TraceArgument,
    *,
    fp: Annotated[
        str,
        typer.Option(
            "--fp", "--hot-fraction", help="HOT pool fractions to try: auto, 0.05:0.6 or 0.2."
        ),
    ] = "auto",
    replicas: Annotated[str, typer.Option(help="Number of servers, or auto.")] = "1",
    seeds: Annotated[
        int,
        typer.Option(
            min=1, help="Runs per point; each draws the cost model from its stated error."
        ),
    ] = 5,
    out: Annotated[
        Path, typer.Option(help="Folder for plan.json, plan.html and run records.")
    ] = Path("granikv-plan"),
    jobs: JobsOption = None,
    read: ReadGroup,
    transform: TransformGroup,
    slo: SloGroup,
    server: ServerGroup,
) -> None:
    """Recommend a HOT pool fraction for a trace, a model and a GPU, with an interval and a page."""
    from granikv.planner.plan import make_plan
    from granikv.planner.search import parse_fractions

    fractions, number = parse_fractions(fp), parse_replicas(replicas)
    built = server.build()
    source = read.open(trace)
    task = task_of(source, transform, slo.slo(), built)
    facts = begin(source, task, built, out, "plan")
    findings, verdict = simulated(
        lambda bar: make_plan(task, fractions, number, seeds, out, bar.advance_to, bar.stage, jobs),
        out,
        _FILES,
    )
    _show(findings, verdict, out, facts)
    end(findings, out, _FILES)


def _show(
    findings: "Findings", verdict: "Verdict | None", out: Path, facts: dict[str, str]
) -> None:
    from granikv.cli.tables import plan_table
    from granikv.planner.page import write_page
    from granikv.planner.provenance import provenance_line

    if findings.results:
        results().print(plan_table(findings, verdict))
    if verdict is not None:
        say(*verdict.sentences)
        needed = _needed(findings)
        say(*(f"{name}: {text}." for name, text in needed.items()))
        write_page(findings, verdict, out / "plan.html", facts | needed)
    say(provenance_line(findings))


def _needed(findings: "Findings") -> dict[str, str]:
    """The numbers of replicas that were searched for, as a line; empty when there was no search."""
    from granikv.planner.search import MAX_REPLICAS

    names = {"granikv": "with a HOT pool", "sglang": "with the stock engine"}
    parts = [
        f"{f'more than {MAX_REPLICAS}' if count is None else count} {names[system]}"
        for system, count in findings.needed_replicas.items()
    ]
    return {"Replicas needed": ", ".join(parts)} if parts else {}
