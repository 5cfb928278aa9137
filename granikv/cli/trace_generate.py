"""`granikv trace generate`: a workload YAML as a trace file."""

from pathlib import Path
from typing import Annotated

import typer

from granikv.cli.trace_files import rewrite
from granikv.cli.trace_options import ReadGroup


def command(
    spec: Annotated[Path, typer.Argument(help="Workload YAML; docs/traces.md has its fields.")],
    out: Annotated[
        Path, typer.Argument(help="Canonical trace to write; packed when it ends in .gz.")
    ],
    *,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same trace.")] = 0,
) -> None:
    """Generate a synthetic trace from a workload file."""
    rewrite(ReadGroup(format="workload").open(spec, seed), out)
