"""serve_table: results as a table, each rate beside those of stock and of FA3's kernels in ours."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from granikv.validate.serve_results import settings_in

BASELINES = ("stock", "granikv-fa3")
_Measured = dict[tuple[str, str], list[Mapping[str, Any]]]  # of one cell, by variant and settings
_KEY = ("model", "seed", "engine", "gpu", "cell")


@dataclass(frozen=True, slots=True)
class TableRow:
    """One variant of one cell.

    Attributes:
        tokens_per_s: median over repeats.
        spread: (largest - smallest) / median over repeats.
        settings: what the server was told without a restart.
        step_ms: decode step, None where the cell has none.
        ttft_ms: median over repeats of the median TTFT, None where the cell has none.
        tpot_ms: likewise of TPOT.
        ratios: tokens_per_s over each baseline's, None without that baseline of the same GPU,
            model, seed and engine arguments. A baseline under the same settings comes first, then
            one without any.
        is_same_run: whether each baseline was measured by the same command.
        notes: what to know before using the number.
    """

    cell: str
    variant: str
    settings: str
    repeats: int
    tokens_per_s: float
    spread: float
    step_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    ratios: Mapping[str, float | None]
    is_same_run: Mapping[str, bool]
    notes: tuple[str, ...]


def table(
    results: Iterable[Mapping[str, Any]], baselines: Sequence[str] = BASELINES
) -> list[TableRow]:
    """One row per cell, variant and settings, in the order in which cells were first measured."""
    found: dict[tuple[Any, ...], _Measured] = {}
    for row in results:
        if row["status"] == "complete":
            cell = found.setdefault(tuple(row.get(name) for name in _KEY), {})
            cell.setdefault((row["variant"], settings_in(row)), []).append(row)
    return [
        _row(variant, settings, cell, baselines)
        for cell in found.values()
        for variant, settings in cell
    ]


def _row(variant: str, settings: str, cell: _Measured, baselines: Sequence[str]) -> TableRow:
    rows = cell[variant, settings]
    rates = [row["tokens_per_s"] for row in rows]
    runs = {row["run"] for row in rows}
    beside = {name: cell.get((name, settings)) or cell.get((name, "{}"), []) for name in baselines}
    return TableRow(
        rows[0]["cell"],
        variant,
        settings,
        len(rows),
        median(rates),
        (max(rates) - min(rates)) / median(rates),
        _median(rows, "step_ms"),
        _median(rows, "ttft_p50_ms"),
        _median(rows, "tpot_p50_ms"),
        {
            name: median(rates) / median(row["tokens_per_s"] for row in base) if base else None
            for name, base in beside.items()
        },
        {name: runs == {row["run"] for row in base} for name, base in beside.items()},
        tuple(_notes(rows)),
    )


def _median(rows: Sequence[Mapping[str, Any]], column: str) -> float | None:
    values = [row[column] for row in rows if column in row]
    return median(values) if values else None


def _notes(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    if rows[0].get("engine", "{}") != "{}":
        yield rows[0]["engine"]
    if settings_in(rows[0]) != "{}":
        yield settings_in(rows[0])
    if not all(row.get("is_steady", True) for row in rows):
        yield "not steady"
    if any(row.get("failed") for row in rows):
        yield f"{sum(row.get('failed', 0) for row in rows)} requests failed"


def table_text(results: Sequence[Mapping[str, Any]]) -> str:
    """The table in Markdown, and a line for each failure that no later result has mended.

    A ratio with * has a baseline from another run of the command.
    """
    times = ["step ms", "TTFT p50 ms", "TPOT p50 ms"]
    header = ["cell", "variant", "tokens/s", *times, *(f"/ {name}" for name in BASELINES)]
    lines = [[*header, "repeats", "spread", "notes"]]
    for row in table(results):
        waits = [_ms(row.step_ms), _ms(row.ttft_ms), _ms(row.tpot_ms)]
        ratios = [_ratio(row, name) for name in BASELINES]
        rest = [str(row.repeats), f"{row.spread:.1%}", ", ".join(row.notes)]
        lines.append([row.cell, row.variant, f"{row.tokens_per_s:,.0f}", *waits, *ratios, *rest])
    text = _markdown(lines) if len(lines) > 1 else "No results yet."
    return "\n".join([text, *failures(results)])


def failures(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each cell or server that failed and has no result."""
    done = {_of(row) for row in results if row["status"] == "complete"}
    failed = {_of(row): row for row in results if row["status"] != "complete"}
    return [_failure(row) for key, row in failed.items() if key not in done]


def _of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["variant"], row["cell"], row.get("engine"), settings_in(row), row["repeat"]


def _failure(row: Mapping[str, Any]) -> str:
    given = [text for text in (row.get("engine", "{}"), settings_in(row)) if text != "{}"]
    what = f"{row['cell']} #{row['repeat']} failed" if row["cell"] else "the server died"
    return f"{' '.join([row['variant'], *given])}: {what}: {row['error']}"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"


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
