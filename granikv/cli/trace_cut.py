"""`granikv trace cut`: a part of a trace, or the trace changed, as a file of its own."""

from pathlib import Path
from typing import Annotated

import typer

from granikv.cli.groups import with_groups
from granikv.cli.trace_files import rewrite
from granikv.cli.trace_options import ReadGroup, TraceArgument, TransformGroup


@with_groups(read=ReadGroup, transform=TransformGroup)
def command(
    trace: TraceArgument,
    out: Annotated[
        Path, typer.Argument(help="Canonical trace to write; packed when it ends in .gz.")
    ],
    *,
    seed: Annotated[int, typer.Option(min=0, help="Of everything random.")] = 0,
    read: ReadGroup,
    transform: TransformGroup,
) -> None:
    """Write the part of a trace between --start and --end, or the trace with other changes."""
    rewrite(read.open(trace, seed), out, transform.options(), seed)
