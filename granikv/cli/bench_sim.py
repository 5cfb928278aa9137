"""`granikv bench sim`: how fast the simulator and the shared core are on this machine."""

from typing import Annotated

import typer

from granikv.cli.screen import progress_bar, results


def command(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Leave the million requests out.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Runs per workload; the median counts.")] = 3,
) -> None:
    """Measure the simulator's speed and memory, and print each figure beside its goal."""
    from granikv.cli.tables import benchmark_table
    from granikv.sim.bench import run_benchmarks

    with progress_bar("Starting") as bar:
        measurements = run_benchmarks(quick=quick, repeats=repeats, on_case=bar.stage)
    results().print(benchmark_table(measurements))
