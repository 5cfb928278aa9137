"""`granikv fit`: measured rows to a parameter file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from granikv.cli.screen import progress_bar, results, say
from granikv.core.errors import ConfigError

if TYPE_CHECKING:
    import polars as pl


def command(
    rows: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Measured rows: parquet, or the JSON lines of a sweep. The shipped ones of the "
            "GPU when none are given."
        ),
    ] = None,
    *,
    hardware: Annotated[str, typer.Option(help="GPU: a shipped name or a YAML file.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for <gpu>.json; only figures are shown without it.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="HTML page with every residual.")] = None,
) -> None:
    """Fit the cost model of a GPU to measured rows, judged on shapes that the fit has not seen."""
    from granikv.cli.fit_tables import fit_table
    from granikv.cost_models.fit.build import build_params
    from granikv.cost_models.fit.figures import NOTE, PEER_NOTE
    from granikv.cost_models.fit.report import write_report
    from granikv.cost_models.hardware import load_hardware

    gpu = load_hardware(hardware)
    own = _read(rows) if rows else None
    if out is not None and not out.is_dir():
        raise ConfigError(f"{out} is not a folder; create it first.")
    with progress_bar("Fitting") as bar:
        result = build_params(gpu, own, lambda term: bar.stage(f"Fitting {term}"))
    results().print(fit_table(result.params.derived_from or gpu.name, result.fits))
    say(NOTE, PEER_NOTE, result.params.note)
    if out is not None:
        path = out / f"{gpu.name}.json"
        result.params.save(path)
        say(f"Written: {path}")
    if report is not None:
        write_report(result.params, result.fits, report)
        say(f"Written: {report}")


def _read(paths: list[Path]) -> "pl.DataFrame":
    """Rows of all files; JSON lines are checked and converted on the way."""
    import tempfile

    from granikv.cost_models.readers.own import import_lines, read_own

    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{path} is not a file of measured rows.")
    lines = [path for path in paths if path.suffix == ".jsonl"]
    tables = [path for path in paths if path.suffix != ".jsonl"]
    with tempfile.TemporaryDirectory() as folder:
        if lines:
            converted = Path(folder) / "rows.parquet"
            import_lines(lines, converted)
            tables.append(converted)
        return read_own(tables)
