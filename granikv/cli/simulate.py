"""`granikv simulate`: one run of one system, with everything the simulator knows about it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from granikv import __version__
from granikv.cli.failures import InterruptError
from granikv.cli.groups import with_groups
from granikv.cli.options import BuiltServer, ServerGroup, SloGroup
from granikv.cli.reading import not_empty, report_lines
from granikv.cli.screen import progress_bar, results, say
from granikv.cli.trace_options import ReadGroup, TraceArgument, TransformGroup

if TYPE_CHECKING:
    import polars as pl

    from granikv.sim.recorder import RecordSink
    from granikv.sim.run import RunOutcome
    from granikv.traces.records import RunHeader

    Run = Callable[[RecordSink], RunOutcome]
    Rows = tuple[RunOutcome, pl.LazyFrame, pl.LazyFrame]


@with_groups(server=ServerGroup, slo=SloGroup, read=ReadGroup, transform=TransformGroup)
def command(
    trace: TraceArgument,
    *,
    system: Annotated[
        Literal["granikv", "sglang", "cascade"],
        typer.Option(help="granikv, the stock engine, or one cascade level for the whole batch."),
    ] = "granikv",
    fp: Annotated[float, typer.Option("--fp", "--hot-fraction", help="HOT pool fraction.")] = 0.2,
    replicas: Annotated[int, typer.Option(help="Number of servers.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of everything random in the trace.")] = 0,
    until_s: Annotated[
        float | None,
        typer.Option("--until", metavar="S", min=0, help="Stop at this simulated time."),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Every decode step one by one; same records.")
    ] = False,
    record: Annotated[
        Path | None, typer.Option(help="Folder for run records and summary.json.")
    ] = None,
    read: ReadGroup,
    transform: TransformGroup,
    slo: SloGroup,
    server: ServerGroup,
) -> None:
    """Simulate one system on a trace and print its summary."""
    from granikv.cli.tables import run_tables
    from granikv.cost_models.step import StepCost
    from granikv.sim.metrics import summarise
    from granikv.sim.run import simulate
    from granikv.traces.transform import apply

    limits = slo.slo()
    built = server.build(system=system, hot_fraction=fp, exact=exact)
    cost = StepCost(built.params, built.model, built.hardware, built.tp)
    source = read.open(trace, seed)
    requests = not_empty(apply(source, transform.options(), seed), trace)
    with progress_bar("Simulating, requests ended") as bar:

        def run(sink: "RecordSink") -> "RunOutcome":
            return simulate(
                requests,
                built.server,
                cost,
                sink,
                replicas=replicas,
                router=built.router,
                on_progress=bar.advance_to,
                until_s=until_s,
            )

        if record is None:
            outcome, request_rows, step_rows = _in_memory(run)
        else:
            outcome, request_rows, step_rows = _recorded(
                run, record, _header(built, trace, seed, replicas)
            )
    summary = summarise(request_rows, step_rows, limits)
    say(*report_lines(source), f"KV capacity: {built.capacity}")
    for table in run_tables(summary, outcome, limits, built.tp):
        results().print(table)
    if record is not None:
        path = record / "summary.json"
        path.write_text(json.dumps(summary.to_json() | _extras(outcome), indent=1) + "\n")
        say(f"Written: {record} (run records), {path}")


def _in_memory(run: "Run") -> "Rows":
    from granikv.sim.run import MemorySink

    sink = MemorySink()
    outcome = run(sink)
    requests, steps = sink.frames()
    return outcome, requests.lazy(), steps.lazy()


def _recorded(run: "Run", folder: Path, header: "RunHeader") -> "Rows":
    from granikv.traces.records import RunWriter, read_run

    try:
        with RunWriter(folder, header) as writer:
            outcome = run(writer)
    except KeyboardInterrupt:
        raise InterruptError(f"the run records so far are kept in {folder}.") from None
    records = read_run(folder)
    return outcome, records.requests, records.steps


def _header(built: BuiltServer, trace: Path, seed: int, replicas: int) -> "RunHeader":
    from granikv.traces.records import RunHeader

    return RunHeader(
        kind="sim",
        model=built.model.name,
        gpu=built.hardware.name,
        size_tokens=built.server.size_tokens,
        hot_tokens=built.server.hot_tokens,
        seed=seed,
        trace=trace.name,
        versions={"granikv": __version__},
        flags=built.server.model_dump(mode="json")
        | {"tp": built.tp, "replicas": replicas, "router": built.router},
    )


def _extras(outcome: "RunOutcome") -> dict[str, Any]:
    """What the records alone do not say."""
    return {
        "unfinished": outcome.unfinished,
        "hot_misses_by_reason": outcome.hot_misses,
        "promoted_tokens": outcome.promoted_tokens,
        "fragmentation": outcome.fragmentation,
        "term_share": outcome.term_share,
        "split_steps": sum(totals.split_steps for totals in outcome.totals),
        "split_saved_share": outcome.split_saved_share,
    }
