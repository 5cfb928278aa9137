"""`granikv trace info`: what a trace holds, and what a HOT pool could serve of it."""

from typing import Annotated

import typer

from granikv.cli.groups import with_groups
from granikv.cli.reading import not_empty, report_lines
from granikv.cli.screen import progress_bar, results, say
from granikv.cli.trace_options import ReadGroup, TraceArgument, TransformGroup


@with_groups(read=ReadGroup, transform=TransformGroup)
def command(
    trace: TraceArgument,
    *,
    top: Annotated[int, typer.Option(min=1, help="Shared prefixes to list.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of everything random.")] = 0,
    read: ReadGroup,
    transform: TransformGroup,
) -> None:
    """Show lengths, rate, shared prefixes and what a HOT pool of the best of them would serve."""
    from granikv.cli.tables import trace_tables
    from granikv.traces.stats import trace_info
    from granikv.traces.transform import apply

    source = read.open(trace, seed)
    requests = not_empty(apply(source, transform.options(), seed), trace)
    with progress_bar("Reading the trace"):
        info = trace_info(requests, top=top)
    say(*report_lines(source))
    for table in trace_tables(info):
        results().print(table)
