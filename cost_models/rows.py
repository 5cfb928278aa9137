"""Measured rows: the one schema that benchmarks write and fitting reads."""

from collections.abc import Iterable
from pathlib import Path

import polars as pl
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from granikv.core.errors import ConfigError

_COLUMNS: dict[str, pl.DataType | type[pl.DataType]] = {
    "op": pl.String,
    "backend": pl.String,
    "gpu": pl.String,
    "dtype": pl.String,
    "num_q_heads": pl.Int64,
    "num_kv_heads": pl.Int64,
    "head_dim": pl.Int64,
    "page_size": pl.Int64,
    "rows": pl.Int64,
    "segments_json": pl.String,
    "private_tokens": pl.Int64,
    "m": pl.Int64,
    "n": pl.Int64,
    "k": pl.Int64,
    "num_gpus": pl.Int64,
    "bytes": pl.Int64,
    "times_us": pl.List(pl.Float64),
    "versions_json": pl.String,
    "clocks": pl.String,
    "date": pl.String,
    "source": pl.String,
}
SCHEMA = pl.Schema(_COLUMNS)


class MeasuredRow(BaseModel):
    """One measured point: what ran, and every time that was taken. Sizes that an op lacks are None.

    Attributes:
        op: `gemm`, `decode_attention`, `extend_attention`, `all_reduce`, `merge`, `copy` or `step`.
        backend: the kernel or library that ran, as it names itself.
        gpu: name of the hardware file.
        rows: requests in the batch.
        segments_json: `[[base, length, rows], ...]` of the shared segments.
        private_tokens: KV tokens in no segment, summed over rows.
        m, n, k: matrix product `[m, k] x [k, n]`.
        bytes: message or copy size.
        times_us: all repetitions, not a summary; median and spread are derived.
        versions_json: driver, CUDA, torch and kernel library versions.
        clocks: SM and memory clock as read, or None.
        date: day of the measurement, `YYYY-MM-DD`.
        source: script, or table and licence.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    op: str = Field(min_length=1)
    backend: str = Field(min_length=1)
    gpu: str = Field(min_length=1)
    dtype: str = Field(min_length=1)
    num_q_heads: int | None = Field(default=None, gt=0)
    num_kv_heads: int | None = Field(default=None, gt=0)
    head_dim: int | None = Field(default=None, gt=0)
    page_size: int | None = Field(default=None, gt=0)
    rows: int | None = Field(default=None, gt=0)
    segments_json: str = "[]"
    private_tokens: int | None = Field(default=None, ge=0)
    m: int | None = Field(default=None, gt=0)
    n: int | None = Field(default=None, gt=0)
    k: int | None = Field(default=None, gt=0)
    num_gpus: int = Field(default=1, gt=0)
    bytes: int | None = Field(default=None, ge=0)
    times_us: list[float] = Field(min_length=1)
    versions_json: str = "{}"
    clocks: str | None = None
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")
    source: str = Field(min_length=1)


def write_rows(path: Path, rows: Iterable[MeasuredRow]) -> None:
    """Write rows as parquet in `SCHEMA`."""
    frame = pl.DataFrame([row.model_dump() for row in rows], schema=SCHEMA)
    frame.write_parquet(path, compression="zstd")


def read_rows(path: Path) -> pl.DataFrame:
    """Read rows that `write_rows` wrote, in `SCHEMA`.

    Raises:
        ConfigError: not a parquet file, another set of columns, or a row that breaks the schema.
    """
    try:
        frame = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ConfigError(f"{path} is not a parquet file of measured rows: {error}") from None
    if frame.schema != SCHEMA:
        wrong = sorted(set(frame.schema.items()) ^ set(SCHEMA.items()), key=str)
        names = ", ".join(dict.fromkeys(name for name, _ in wrong)) or "column order"
        raise ConfigError(f"{path} does not have the columns of measured rows; look at {names}.")
    for number, record in enumerate(frame.iter_rows(named=True)):
        try:
            MeasuredRow.model_validate(record)
        except ValidationError as error:
            first = error.errors()[0]
            field = first["loc"][0] if first["loc"] else "row"
            raise ConfigError(
                f"{path}, row {number}: {field} is wrong ({first['msg']}); measure it again."
            ) from None
    return frame
