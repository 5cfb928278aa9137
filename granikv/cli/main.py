"""main: the `granikv` command."""

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from granikv import __version__
from granikv.cli import (
    bench_kernels,
    bench_serve,
    bench_sim,
    calibrate,
    dispatch_table,
    fit,
    plan,
    policies,
    serve,
    simulate,
    trace_convert,
    trace_cut,
    trace_generate,
    trace_info,
    validate_ablation,
    validate_paper,
    validate_runs,
)
from granikv.cli.default_command import DefaultCommandGroup
from granikv.cli.failures import exit_code_of

_SETTINGS: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "no_args_is_help": True,
}

app = typer.Typer(help="Plan and simulate a split KV cache for an LLM server.", **_SETTINGS)
trace = typer.Typer(help="Look at, convert, cut and generate request traces.", **_SETTINGS)
bench = typer.Typer(help="Measure GraniKV itself.", **_SETTINGS)
validate = typer.Typer(
    cls=DefaultCommandGroup, help="Compare predictions with what was measured.", **_SETTINGS
)


def _version(is_asked: bool) -> None:
    if is_asked:
        print(f"granikv {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Plan and simulate a split KV cache for an LLM server."""


app.command("plan")(plan.command)
app.command("policies")(policies.command)
app.command("simulate")(simulate.command)
app.command("serve", context_settings={"allow_extra_args": True})(serve.command)
app.command("fit")(fit.command)
app.command("calibrate")(calibrate.command)
app.command("dispatch-table")(dispatch_table.command)
app.add_typer(trace, name="trace")
trace.command("info")(trace_info.command)
trace.command("convert")(trace_convert.command)
trace.command("cut")(trace_cut.command)
trace.command("generate")(trace_generate.command)
app.add_typer(bench, name="bench")
bench.command("sim")(bench_sim.command)
bench.command("kernels")(bench_kernels.command)
bench.command("serve")(bench_serve.command)
app.add_typer(validate, name="validate")
validate.command("runs")(validate_runs.command)
validate.command("ablation")(validate_ablation.command)
validate.command("paper")(validate_paper.command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (the process's own by default) and answer its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    return exit_code_of(lambda: app(arguments, prog_name="granikv", standalone_mode=False))


if __name__ == "__main__":
    sys.exit(main())
