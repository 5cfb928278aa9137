"""`granikv bench serve`: decode and serving rates of a live SGLang, stock's and ours."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from granikv.cli.screen import say
from granikv.core.errors import ConfigError
from granikv.validate.serve_options import OPTIONS, Option, settings_of


def _with_options(command: Callable[..., int]) -> Callable[..., int]:
    """Make a command take `OPTIONS`, which `python -m granikv.validate.bench_serve` has too."""
    own = [p for p in inspect.signature(command).parameters.values() if p.kind != p.VAR_KEYWORD]
    both = [*own, *(_parameter(name, option) for name, option in OPTIONS.items())]
    # typer reads both: defaults and order from the signature, options from the annotations.
    command.__annotations__ = {p.name: p.annotation for p in both}
    command.__signature__ = inspect.Signature(both)  # type: ignore[attr-defined]
    return command


def _parameter(name: str, option: Option) -> inspect.Parameter:
    kind: Any = list[str] if option.kind is list else option.kind
    switch = (f"--{name.replace('_', '-')}",) if option.kind is bool else ()
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=option.default,
        annotation=Annotated[
            kind if option.default is not None else kind | None,
            typer.Option(*switch, help=option.help),
        ],
    )


@_with_options
def command(
    model: Annotated[
        str | None, typer.Argument(help="Folder with a config.json; weights are not needed.")
    ] = None,
    *,
    convert: Annotated[
        bool, typer.Option("--convert", help="Only make run records of such results.")
    ] = False,
    **chosen: Any,
) -> int:
    """Measure a live SGLang with and without GraniKV on this GPU, and print both side by side.

    Results that are in the file already are not measured again. Requests with arrival times become
    run records beside it.
    """
    from granikv.validate import bench_serve
    from granikv.validate.serve_plan import plan_lines
    from granikv.validate.serve_results import Results
    from granikv.validate.serve_runs import convert as convert_runs
    from granikv.validate.serve_table import table_text

    out: Path = chosen["out"]
    died = 0
    if not (chosen["table"] or convert):
        settings = settings_of(model, chosen)
        if chosen["dry_run"]:
            say(*plan_lines(settings))
            return 0
        died = bench_serve.run(settings)
    elif not out.is_file():
        raise ConfigError(f"{out} is not a file of results.")
    rows = Results(out).rows()
    if not chosen["table"]:
        say(*(f"Run records: {folder}" for folder in convert_runs(rows, out)))
    if not convert:
        say(table_text(rows))
    return 1 if died else 0
