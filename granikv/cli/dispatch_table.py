"""`granikv dispatch-table`: which kernel runs when, and the table that the dispatcher loads."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from granikv.cli.folders import check_new_file
from granikv.cli.screen import progress_bar, results, say

if TYPE_CHECKING:
    from granikv.cost_models.step import StepCost


def command(
    *,
    model: Annotated[
        str, typer.Option(help="Model: a shipped name, a YAML file, or a Hugging Face config.json.")
    ],
    gpu: Annotated[str, typer.Option(help="GPU: a shipped name or a YAML file.")],
    tp: Annotated[int, typer.Option(help="Tensor-parallel degree.")] = 1,
    params: Annotated[
        str | None, typer.Option(help="Parameter file; the GPU's own by default.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File for the dispatcher's cost table (JSON).")
    ] = None,
) -> None:
    """Show which attention mode is fastest where, from where on, and what the choice is worth."""
    from granikv.cli.fit_tables import dispatch_tables
    from granikv.cost_models.choice import PRIVATE_TOKENS, explore
    from granikv.cost_models.dispatch_table import build_cost_table
    from granikv.cost_models.hardware import load_hardware
    from granikv.cost_models.models import load_model
    from granikv.cost_models.params import load_params
    from granikv.cost_models.step import StepCost

    if out is not None:
        check_new_file(out)
    hardware = load_hardware(gpu)
    cost = StepCost(load_params(params or hardware.name), load_model(model), hardware, tp)
    table = build_cost_table(cost)
    with progress_bar("Asking the dispatcher"):
        choice = explore(cost, table)
    for shown in dispatch_tables(choice):
        results().print(shown)
    group = table.group
    crossings = ", ".join(
        f"{length:,}: {'never' if rows is None else f'{rows} rows ({rows * group})'}"
        for length, rows in choice.crossovers.items()
    )
    losses = ", ".join(f"{name} {loss:.2f}x" for name, loss in choice.losses.items())
    say(
        f"One prefix for all rows, {PRIVATE_TOKENS} private tokens a row; + is a fused launch.",
        f"Dense beats cascade from (effective rows, M_sat): {crossings}.",
        f"Threshold dispatch uses M_sat = {table.m_sat}.",
        f"A fixed mode costs, at its worst point, against the choice: {losses}.",
        f"Provenance: {_provenance(cost)}",
    )
    if out is not None:
        table.save(out)
        say(f"Written: {out}")


def _provenance(cost: "StepCost") -> str:
    terms = cost.params.terms
    parts = (
        ("paged", terms.paged),
        ("shared pages", terms.shared_page_cost),
        ("dense", terms.dense),
        ("cascade", terms.cascade_compute_efficiency),
        ("fused", terms.fused_latency_ns),
    )
    return ", ".join(f"{name} {item.provenance}" for name, item in parts) + "."
