"""serve_table: results as a table, each rate beside those of stock and of FA3's kernels in ours."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

BASELINES = ("stock", "granikv-fa3")
_KEY = ("model", "seed", "engine", "gpu", "cell")


@dataclass(frozen=True, slots=True)
class TableRow:
    """One variant of one cell.

    Attributes:
        tokens_per_s: median over repeats.
        spread: (largest - smallest) / median over repeats.
        step_ms: decode step, None where the cell has none.
        ratios: tokens_per_s over each baseline's, None without that baseline of the same GPU,
            model, seed and engine arguments.
        is_same_run: whether each baseline was measured by the same command.
        notes: what to know before using the number.
    """

    cell: str
    variant: str
    repeats: int
    tokens_per_s: float
    spread: float
    step_ms: float | None
    ratios: Mapping[str, float | None]
    is_same_run: Mapping[str, bool]
    notes: tuple[str, ...]


def table(
    results: Iterable[Mapping[str, Any]], baselines: Sequence[str] = BASELINES
) -> list[TableRow]:
    """One row per cell and variant, in the order in which cells were first measured."""
    found: dict[tuple[Any, ...], dict[str, list[Mapping[str, Any]]]] = {}
    for row in results:
        if row["status"] == "complete":
            cell = found.setdefault(tuple(row.get(name) for name in _KEY), {})
            cell.setdefault(row["variant"], []).append(row)
    return [
        _row(variant, rows, cell, baselines)
        for cell in found.values()
        for variant, rows in cell.items()
    ]


def _row(
    variant: str,
    rows: Sequence[Mapping[str, Any]],
    cell: Mapping[str, Sequence[Mapping[str, Any]]],
    baselines: Sequence[str],
) -> TableRow:
    rates = [row["tokens_per_s"] for row in rows]
    steps = [row["step_ms"] for row in rows if "step_ms" in row]
    runs = {row["run"] for row in rows}
    return TableRow(
        rows[0]["cell"],
        variant,
        len(rows),
        median(rates),
        (max(rates) - min(rates)) / median(rates),
        median(steps) if steps else None,
        {
            name: median(rates) / median(row["tokens_per_s"] for row in cell[name])
            if name in cell
            else None
            for name in baselines
        },
        {name: runs == {row["run"] for row in cell.get(name, ())} for name in baselines},
        tuple(_notes(rows)),
    )


def _notes(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    if rows[0].get("engine", "{}") != "{}":
        yield rows[0]["engine"]
    if not all(row.get("is_steady", True) for row in rows):
        yield "not steady"
    if any(row.get("failed") for row in rows):
        yield f"{sum(row.get('failed', 0) for row in rows)} requests failed"


def table_text(results: Sequence[Mapping[str, Any]]) -> str:
    """The table in Markdown, and a line for each failure that no later result has mended.

    A ratio with * has a baseline from another run of the command.
    """
    header = ["cell", "variant", "tokens/s", "step ms", *(f"/ {name}" for name in BASELINES)]
    lines = [[*header, "repeats", "spread", "notes"]]
    for row in table(results):
        step = "" if row.step_ms is None else f"{row.step_ms:.2f}"
        ratios = [_ratio(row, name) for name in BASELINES]
        rest = [str(row.repeats), f"{row.spread:.1%}", ", ".join(row.notes)]
        lines.append([row.cell, row.variant, f"{row.tokens_per_s:,.0f}", step, *ratios, *rest])
    text = _markdown(lines) if len(lines) > 1 else "No results yet."
    return "\n".join([text, *failures(results)])


def failures(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each cell or server that failed and has no result."""
    done = {(r["variant"], r["cell"], r["repeat"]) for r in results if r["status"] == "complete"}
    failed = {
        (row["variant"], row["cell"], row["repeat"]): row["error"]
        for row in results
        if row["status"] != "complete"
    }
    return [
        f"{variant}: {f'{cell} #{repeat} failed' if cell else 'the server died'}: {why}"
        for (variant, cell, repeat), why in failed.items()
        if (variant, cell, repeat) not in done
    ]


def _ratio(row: TableRow, baseline: str) -> str:
    ratio = row.ratios[baseline]
    if ratio is None or row.variant == baseline:
        return ""
    return f"{ratio:.2f}" + ("" if row.is_same_run[baseline] else "*")


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| "
        + " | ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in [lines[0], rule, *lines[1:]]
    )
