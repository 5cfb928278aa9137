"""`granikv calibrate`: recorded steps of live servers to a parameter file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from granikv.cli.folders import check_new_file
from granikv.cli.screen import progress_bar, results, say
from granikv.core.errors import ConfigError

if TYPE_CHECKING:
    from granikv.cost_models.fit.recorded_steps import RecordedRun


def command(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders with run records of live servers on that GPU.")
    ],
    *,
    hardware: Annotated[str, typer.Option(help="GPU: a shipped name or a YAML file.")],
    out: Annotated[Path, typer.Option(help="File for the new parameters (JSON).")],
    params: Annotated[
        str | None, typer.Option(help="Parameter file to start from; the GPU's own by default.")
    ] = None,
    held_out: Annotated[
        list[Path] | None,
        typer.Option(help="A run to judge the result on, never fitted; may be given repeatedly."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over an existing file.")] = False,
) -> None:
    """Refit what belongs to whole steps to recorded steps: host time, a fused launch, extends."""
    from granikv.cli.calibrate_tables import change_table, error_table
    from granikv.cost_models.fit.calibrate import calibrate
    from granikv.cost_models.hardware import load_hardware
    from granikv.cost_models.params import load_params

    check_new_file(out)
    if out.exists() and not force:
        raise ConfigError(f"{out} exists; name another file, or give --force to write over it.")
    both = {folder.resolve() for folder in runs} & {folder.resolve() for folder in held_out or []}
    if both:
        raise ConfigError(f"{both.pop()} is fitted and held out; give it once.")
    gpu = load_hardware(hardware)
    start = load_params(params or gpu.name)
    if start.gpu != gpu.name:
        raise ConfigError(f"The parameters are of {start.gpu}, not of {gpu.name}; give others.")
    with progress_bar("Fitting recorded steps"):
        fitted = [_read(folder, gpu.name) for folder in runs]
        judges = [_read(folder, gpu.name) for folder in held_out or []]
        found = calibrate(fitted, start, gpu, judges)
    results().print(change_table(gpu.name, found.changes))
    results().print(error_table("Steps of the runs fitted", found.steps))
    if found.held_out is not None:
        results().print(error_table("Steps of the runs held out", found.held_out))
    say(
        "Absolute error of a decode step's time, median / p90; without its run: by a fit to the "
        "other runs.",
        *found.kept,
    )
    found.params.save(out)
    say(f"Written: {out}")


def _read(folder: Path, gpu: str) -> "RecordedRun":
    """The steps of a live server's run records."""
    from granikv.cost_models.fit.recorded_steps import RecordedRun
    from granikv.cost_models.models import load_model
    from granikv.validate.compare.live_run import read_live
    from granikv.validate.compare.shared_reads import SharedReads

    run = read_live(folder)
    if run.gpu != gpu:
        raise ConfigError(f"{folder} was recorded on {run.header.gpu}, not on {gpu}; give others.")
    if run.steps.is_empty():
        raise ConfigError(f"{folder} has no recorded steps; give runs of a server that recorded.")
    steps = SharedReads.of(run).filled(run.steps)
    return RecordedRun(
        run.name,
        load_model(run.header.model),
        run.tp,
        steps,
        run.is_stock,
        run.prefill_graph_tokens,
    )
