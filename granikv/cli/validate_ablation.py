"""`granikv validate ablation`: what each part of GraniKV is worth."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from granikv.cli.groups import with_groups
from granikv.cli.options import ServerGroup
from granikv.cli.screen import progress_bar, results, say
from granikv.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from granikv.validate.compare.ablation import AblationRow


@with_groups(server=ServerGroup)
def command(
    live: Annotated[
        list[Path] | None, typer.Argument(help="Results of `granikv bench serve`, to set beside.")
    ] = None,
    *,
    cells: Annotated[
        str, typer.Option(help="Steady cells, with commas.")
    ] = "16384x256,mixed-2k-16k-x256",
    server: ServerGroup,
) -> None:
    """Take the gain apart: stock, global cascade, cascades in COLD, in HOT, full dispatch."""
    from granikv.cost_models.step import StepCost
    from granikv.validate.compare.ablation import ablate
    from granikv.validate.serve_results import Results

    built = server.build()
    cost = StepCost(built.params, built.model, built.hardware, built.tp)
    if missing := [path for path in live or () if not path.is_file()]:
        raise ConfigError(f"{missing[0]} is not a file of results.")
    rows = [row for path in live or () for row in Results(path).rows()]
    with progress_bar("Simulating"):
        found = ablate([name.strip() for name in cells.split(",")], built.server, cost, rows)
    say(f"KV capacity: {built.capacity}")
    results().print(_table(found))


def _table(rows: "list[AblationRow]") -> "Table":
    from granikv.cli.validate_tables import wide_table
    from granikv.validate.compare.ablation import PARTS

    headers = ["cell", "server", "simulated tokens/s", "over stock", "live tokens/s", "over stock"]
    table = wide_table("Decode rates, each line with one thing more", [*headers, "error"])
    base: dict[str, AblationRow] = {row.cell: row for row in rows if row.server == "stock"}
    for row in rows:
        stock = base[row.cell]
        is_live = row.live is not None and stock.live is not None
        table.add_row(
            row.cell if row is stock else "",
            PARTS[row.server],
            f"{row.simulated:,.0f}",
            f"{row.simulated / stock.simulated:.2f}x",
            "" if row.live is None else f"{row.live:,.0f}",
            f"{row.live / stock.live:.2f}x" if is_live else "",
            "" if row.live is None else f"{row.simulated / row.live - 1:+.1%}",
        )
    return table
