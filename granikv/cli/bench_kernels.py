"""`granikv bench kernels`: decode attention over shared prefixes on this GPU."""

from pathlib import Path
from typing import Annotated

import typer

from granikv.cli.screen import say
from granikv.core.errors import ConfigError


def command(
    *,
    out: Annotated[Path, typer.Option(help="JSON lines of measured rows; appended to.")] = Path(
        "bench.jsonl"
    ),
    tier: Annotated[
        str, typer.Option(help="all, or some of figures,passes,coarse,heads,grid with commas.")
    ] = "all",
    budget_s: Annotated[float, typer.Option(min=1.0, help="Wall seconds, set-up too.")] = 480.0,
    gpu: Annotated[str, typer.Option(help="Name of the GPU in the rows.")] = "h200-sxm",
    seed: Annotated[int, typer.Option(min=0, help="Seed of values and slot orders.")] = 0,
    summary: Annotated[
        Path | None,
        typer.Option(help="Print the figures of such rows beside their reach; measure nothing."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count cells and guess seconds; needs no GPU.")
    ] = False,
) -> int:
    """Measure GraniKV's decode kernels beside FlashAttention-3's on this GPU.

    Every result is compared with FA3's, and FA3's with float64, before it is timed.
    """
    from granikv.kernels import bench, bench_figures

    if summary is not None:
        if not summary.is_file():
            raise ConfigError(f"{summary} is not a file of measured rows.")
        say(bench_figures.summary(bench_figures.read_lines(summary)))
        return 0
    try:
        planned = bench.jobs_of(tier)
    except ValueError as error:
        raise ConfigError(f"--{error}.") from None
    if dry_run:
        say(*bench.plan_lines(planned))
        return 0
    if problem := bench.device_problem():
        raise ConfigError(problem)
    return bench.run(planned, out, budget_s, gpu, seed)
