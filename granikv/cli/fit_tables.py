"""fit_tables: held-out errors and dispatch choices as rich tables."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from granikv.cost_models.choice import Choice
    from granikv.cost_models.fit.result import TermFit


def fit_table(gpu: str, fits: "Sequence[TermFit]") -> Table:
    """Held-out errors of every fitted term beside their goals and the peer's."""
    from granikv.cost_models.fit.figures import HEADERS, figure_rows

    table = _table(f"Kernels of {gpu}: error on shapes held out", HEADERS)
    for row in figure_rows(gpu, fits):
        table.add_row(*row)
    return table


def dispatch_tables(choice: "Choice") -> list[Table]:
    """Which mode runs at each prefix length and batch size, and what the choice is worth."""
    headers = ["", *map(str, choice.rows)]
    modes = _table("Mode by prefix length (down) and rows", headers)
    worth = _table("Step time of the stock engine / chosen", headers)
    for place, length in enumerate(choice.lengths):
        modes.add_row(f"{length:,}", *choice.modes[place])
        worth.add_row(f"{length:,}", *(f"{gain:.2f}" for gain in choice.gains[place]))
    return [modes, worth]


def _table(title: str, headers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for place, header in enumerate(headers):
        table.add_column(header, justify="right" if place else "left", no_wrap=not place)
    return table
