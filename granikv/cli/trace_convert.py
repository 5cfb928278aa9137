"""`granikv trace convert`: any trace to GraniKV's canonical form, or to one of the plain ones."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from granikv.cli.groups import with_groups
from granikv.cli.trace_files import rewrite
from granikv.cli.trace_options import ReadGroup, TraceArgument


@with_groups(read=ReadGroup)
def command(
    trace: TraceArgument,
    out: Annotated[Path, typer.Argument(help="File to write; packed when it ends in .gz.")],
    *,
    to: Annotated[
        Literal["canonical", "plain", "mooncake"],
        typer.Option(
            help="canonical keeps everything; plain is for bench serve --trace, mooncake for "
            "other tools."
        ),
    ] = "canonical",
    to_block_size: Annotated[
        int, typer.Option(min=1, help="Tokens of one block of a mooncake file.")
    ] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Of everything random.")] = 0,
    read: ReadGroup,
) -> None:
    """Write a trace in another format."""
    from granikv.traces.writers import write_mooncake, write_plain, write_trace

    writers = {
        "canonical": write_trace,
        "plain": write_plain,
        "mooncake": partial(write_mooncake, block_size=to_block_size),
    }
    rewrite(read.open(trace, seed), out, write=writers[to])
