"""Tables of `granikv calibrate`: what changed, and errors of steps before and after."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    import polars as pl


def change_table(gpu: str, changes: Mapping[str, tuple[str, str]]) -> Table:
    """Each refitted term before and after."""
    table = _table(f"Terms of {gpu}", ("term", "before", "after"))
    for name, values in changes.items():
        table.add_row(name, *values)
    return table


def error_table(title: str, steps: "pl.DataFrame") -> Table:
    """Errors by mode and rows, then by run, as `step_errors` summarises them."""
    from granikv.cost_models.fit.step_errors import step_errors

    headers = ("mode or run", "rows", "steps", "before", "after", "without its run")
    has_left_out = "left_out_ns" in steps.columns
    table = _table(title, headers if has_left_out else headers[:-1])
    for error in step_errors(steps):
        pairs = [f"{median:.1%} / {p90:.1%}" for median, p90 in error.errors]
        table.add_row(error.group, error.rows, f"{error.steps:,}", *pairs)
    return table


def _table(title: str, headers: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for place, header in enumerate(headers):
        table.add_column(header, justify="right" if place else "left", no_wrap=True)
    return table
