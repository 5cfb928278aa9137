"""`granikv bench serve`: decode and serving rates of a live SGLang, stock's and ours."""

from pathlib import Path
from typing import Annotated

import typer

from granikv.cli.screen import say
from granikv.core.errors import ConfigError


def command(
    model: Annotated[
        str | None, typer.Argument(help="Folder with a config.json; weights are not needed.")
    ] = None,
    *,
    out: Annotated[Path, typer.Option(help="JSON lines of results; appended to.")] = Path(
        "serve.jsonl"
    ),
    cells: Annotated[
        str, typer.Option(help="Groups or names of cells with commas; see --dry-run.")
    ] = "headline,poisson,unshared,grid",
    variants: Annotated[
        str, typer.Option(help="Servers to compare, with commas, in this order.")
    ] = "stock,granikv,granikv-fa3",
    budget_s: Annotated[float, typer.Option(min=1.0, help="No cell is started later.")] = 1500.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of tokens, lengths and arrivals.")] = 0,
    record: Annotated[
        bool, typer.Option("--record", help="Servers write their steps, for run records.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(exists=True, help="Plain trace to send as one more cell.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A server that runs already; --variants names it.")
    ] = None,
    engine: Annotated[str, typer.Option(help="More arguments of sglang.Engine, as JSON.")] = "{}",
    table: Annotated[
        bool, typer.Option("--table", help="Print the table of such results; measure nothing.")
    ] = False,
    convert: Annotated[
        bool, typer.Option("--convert", help="Only make run records of such results.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what is left to measure; needs no GPU.")
    ] = False,
) -> int:
    """Measure a live SGLang with and without GraniKV on this GPU, and print both side by side.

    Results that are in the file already are not measured again. Requests with arrival times become
    run records beside it.
    """
    from granikv.validate import bench_serve
    from granikv.validate.serve_results import Results
    from granikv.validate.serve_runs import convert as convert_runs
    from granikv.validate.serve_table import table_text

    results = Results(out)
    died = 0
    if not (table or convert):
        if model is None:
            raise ConfigError("Name the model's folder: granikv bench serve MODEL.")
        settings = bench_serve.Settings(
            model=model,
            out=out,
            cells=bench_serve.names(cells),
            variants=bench_serve.names(variants),
            budget_s=budget_s,
            seed=seed,
            record=record,
            trace=trace,
            url=url,
            engine=bench_serve.engine_arguments(engine),
        )
        if dry_run:
            say(*bench_serve.plan_lines(settings))
            return 0
        died = bench_serve.run(settings)
    elif not out.is_file():
        raise ConfigError(f"{out} is not a file of results.")
    if not table:
        say(*(f"Run records: {folder}" for folder in convert_runs(results.rows(), out)))
    if not convert:
        say(table_text(results.rows()))
    return 1 if died else 0
