"""Our own measured rows: from the JSON lines of a sweep to parquet, and to one median a row."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl
from pydantic import ValidationError

from granikv.core.errors import ConfigError
from granikv.cost_models.catalog import DATA
from granikv.cost_models.rows import MeasuredRow, read_rows, write_rows

# Rows whose repetitions spread more than this (IQR over median) are not fitted.
MAX_SPREAD = 0.25

_SEGMENT = pl.List(pl.List(pl.Int64))


def own_path(gpu: str) -> Path:
    """Where our own rows of a GPU are kept."""
    return DATA / "rows" / f"{gpu}.own.parquet"


def kernels_path(gpu: str) -> Path:
    """Where the rows of GraniKV's own kernels, and of FA3 beside them, are kept."""
    return DATA / "rows" / f"{gpu}.kernels.parquet"


def shipped_paths(gpu: str) -> list[Path]:
    """Every file of kernel rows that ships for a GPU."""
    return [path for path in (own_path(gpu), kernels_path(gpu)) if path.exists()]


def steps_path(gpu: str) -> Path:
    """Where the step times of a live engine are kept."""
    return DATA / "rows" / f"{gpu}.steps.parquet"


def import_lines(paths: Sequence[Path], out: Path) -> int:
    """Check the JSON lines of a sweep and write them as one parquet file; the number of rows.

    Raises:
        ConfigError: a line is not a measured row.
    """
    rows = []
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            try:
                rows.append(MeasuredRow.model_validate_json(line))
            except ValidationError as error:
                first = error.errors()[0]
                raise ConfigError(
                    f"{path}, line {number}: {first['msg']} ({first['loc']}); measure it again."
                ) from None
    write_rows(out, rows)
    return len(rows)


def read_own(paths: Sequence[Path]) -> pl.DataFrame:
    """Measured rows with `time_us`, the median of all repetitions, less the unsteady ones.

    Further columns: `prefixes` shared segments; `length` and `sharers` of the first one (0 and 1
    when there are none) and its `base`; `are_equal`, whether the others are like it and no row
    reads two; and `tokens`, the private tokens of each row.
    """
    if not paths:
        return _derived(pl.DataFrame(schema=_schema()))
    return _derived(pl.concat([read_rows(path) for path in paths]))


def _schema() -> pl.Schema:
    from granikv.cost_models.rows import SCHEMA

    return SCHEMA


def _derived(frame: pl.DataFrame) -> pl.DataFrame:
    low, high = (
        pl.col("times_us").list.eval(pl.element().quantile(q, "linear")).list.first()
        for q in (0.25, 0.75)
    )
    segments = pl.col("segments_json").str.json_decode(_SEGMENT)
    first = segments.list.first()
    sharers = first.list.get(2, null_on_oob=True).fill_null(1)
    unlike = segments.list.eval(pl.element().list.slice(1)).list.n_unique()
    median = pl.col("times_us").list.median()
    return (
        frame.with_columns(
            time_us=median,
            spread=(high - low) / median,
            prefixes=segments.list.len(),
            base=first.list.get(0, null_on_oob=True).fill_null(0),
            length=first.list.get(1, null_on_oob=True).fill_null(0),
            sharers=sharers,
            are_equal=(unlike <= 1) & (segments.list.len() * sharers <= pl.col("rows")),
            tokens=pl.col("private_tokens") / pl.col("rows"),
        )
        .filter(pl.col("spread") <= MAX_SPREAD)
        .drop("times_us")
    )
