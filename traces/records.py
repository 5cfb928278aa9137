"""Run records: what a run, simulated or live, leaves behind for metrics and comparison."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import polars as pl
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from granikv.core.errors import ConfigError, TraceFormatError

Status = Literal["complete", "partial"]

# session is null for a request without one; times are seconds on the header's clock, null when not
# reached.
REQUEST_SCHEMA = pl.Schema(
    {
        "id": pl.Int64(),
        "session": pl.String(),
        "arrival_s": pl.Float64(),
        "sent_s": pl.Float64(),
        "first_token_s": pl.Float64(),
        "finish_s": pl.Float64(),
        "prompt_tokens": pl.Int64(),
        "output_tokens": pl.Int64(),
        "cached_tokens": pl.Int64(),
        "hot_tokens": pl.Int64(),
        "status": pl.String(),
        "replica": pl.Int64(),
    }
)

# A row stands for `steps` decode steps in a row that differ only in private tokens; gpu_us is
# their sum. plan_json is a decode step's `core.step.StepPlan` or an extend step's
# `core.step.ExtendShape`: {"extend": [[new_tokens, prefix_tokens], ...]}, a pair a request in the
# order of the batch; "{}" where neither is known.
STEP_SCHEMA = pl.Schema(
    {
        "iter": pl.Int64(),
        "steps": pl.Int64(),
        "start_s": pl.Float64(),
        "gpu_us": pl.Float64(),
        "kind": pl.String(),
        "rows": pl.Int64(),
        "padded_rows": pl.Int64(),
        "prefill_tokens": pl.Int64(),
        "private_tokens": pl.Int64(),
        "segments_json": pl.String(),
        "plan_json": pl.String(),
        "hot_used": pl.Int64(),
        "cold_free": pl.Int64(),
        "hot_misses": pl.Int64(),
        "evictions": pl.Int64(),
        "retractions": pl.Int64(),
        "migrated_tokens": pl.Int64(),
        "replica": pl.Int64(),
    }
)

_HEADER = "header.json"
_PARTS = "parts"
_FLUSH_ROWS = 50_000


class RunHeader(BaseModel):
    """What ran.

    Attributes:
        kind: simulated or live.
        model: model name.
        gpu: GPU name.
        size_tokens: slots of the KV pool.
        hot_tokens: HOT slots at the start.
        seed: of the run, None when it had none.
        clock_origin: what 0 s means ("trace start", or an ISO 8601 date for a live server).
        trace: where the requests came from.
        versions: package versions that matter.
        flags: settings of the run.
        status: "open" while it is written (or after a crash), then complete or partial.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["granikv-run-1"] = "granikv-run-1"
    kind: Literal["sim", "live"]
    model: str
    gpu: str
    size_tokens: int
    hot_tokens: int
    seed: int | None = None
    clock_origin: str = "trace start"
    trace: str = ""
    versions: dict[str, str] = {}
    flags: dict[str, JsonValue] = {}
    status: Literal["open", "complete", "partial"] = "open"

    @property
    def tp(self) -> int:
        """Tensor-parallel degree of a live run: of its flags, or of its engine's arguments."""
        engine = self.flags.get("engine")
        known = self.flags | (engine if isinstance(engine, dict) else {})
        return int(str(known.get("tp_size") or 1))


@dataclass(frozen=True, slots=True)
class Run:
    """Run records on disk: the header and a lazy frame for each of the two schemas above."""

    folder: Path
    header: RunHeader
    requests: pl.LazyFrame
    steps: pl.LazyFrame


class _Table:
    """One table that grows on disk: rows wait in a list until there are enough for a part file."""

    def __init__(self, folder: Path, name: str, schema: pl.Schema) -> None:
        self._target = folder / f"{name}.parquet"
        self._parts = folder / _PARTS
        self._name = name
        self._schema = schema
        self._written = 0
        self.rows: list[tuple[Any, ...]] = []

    def flush(self) -> None:
        """Move the waiting rows to a part file."""
        if not self.rows:
            return
        columns = zip(*self.rows, strict=True)
        frame = pl.DataFrame(
            [
                pl.Series(name, values, dtype)
                for (name, dtype), values in zip(self._schema.items(), columns, strict=True)
            ]
        )
        # Zero-padded, so that name order is row order.
        frame.write_parquet(self._parts / f"{self._name}-{self._written:08d}.parquet")
        self._written += 1
        self.rows.clear()

    def join(self) -> None:
        """Write the final file from all parts, without holding them in memory."""
        self.flush()
        if not self._written:
            pl.DataFrame(schema=self._schema).write_parquet(self._target)
            return
        pl.scan_parquet(self._parts / f"{self._name}-*.parquet").sink_parquet(self._target)


class RunWriter:
    """Writes run records into a folder; rows of a run of any length stay on disk, not in memory.

    As a context manager it closes as complete, or as partial when an exception (also Ctrl-C)
    leaves the block.
    """

    def __init__(self, folder: Path, header: RunHeader) -> None:
        """Create the folder.

        Raises:
            ConfigError: the folder already holds run records.
        """
        if (folder / _HEADER).exists():
            raise ConfigError(f"{folder} already holds a run; choose another folder or remove it.")
        (folder / _PARTS).mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.header = header
        self._requests = _Table(folder, "requests", REQUEST_SCHEMA)
        self._steps = _Table(folder, "steps", STEP_SCHEMA)
        self._request_rows = self._requests.rows
        self._step_rows = self._steps.rows
        self._write_header(header)

    def request(
        self,
        request_id: int,
        session: str | None,
        arrival_s: float,
        sent_s: float | None,
        first_token_s: float | None,
        finish_s: float | None,
        prompt_tokens: int,
        output_tokens: int,
        cached_tokens: int,
        hot_tokens: int,
        status: str,
        replica: int = 0,
    ) -> None:
        """Add a row to requests.parquet, in the order of `REQUEST_SCHEMA`."""
        rows = self._request_rows
        rows.append(
            (
                request_id,
                session,
                arrival_s,
                sent_s,
                first_token_s,
                finish_s,
                prompt_tokens,
                output_tokens,
                cached_tokens,
                hot_tokens,
                status,
                replica,
            )
        )
        if len(rows) >= _FLUSH_ROWS:
            self._requests.flush()

    def step(
        self,
        iteration: int,
        steps: int,
        start_s: float,
        gpu_us: float,
        kind: str,
        rows: int,
        padded_rows: int,
        prefill_tokens: int,
        private_tokens: int,
        segments_json: str,
        plan_json: str,
        hot_used: int,
        cold_free: int,
        hot_misses: int,
        evictions: int,
        retractions: int,
        migrated_tokens: int,
        replica: int = 0,
    ) -> None:
        """Add a row to steps.parquet, in the order of `STEP_SCHEMA`."""
        waiting = self._step_rows
        waiting.append(
            (
                iteration,
                steps,
                start_s,
                gpu_us,
                kind,
                rows,
                padded_rows,
                prefill_tokens,
                private_tokens,
                segments_json,
                plan_json,
                hot_used,
                cold_free,
                hot_misses,
                evictions,
                retractions,
                migrated_tokens,
                replica,
            )
        )
        if len(waiting) >= _FLUSH_ROWS:
            self._steps.flush()

    def close(self, status: Status = "complete") -> None:
        """Write the two tables and the final header; a second call does nothing."""
        if self.header.status != "open":
            return
        self._requests.join()
        self._steps.join()
        self.header = self.header.model_copy(update={"status": status})
        self._write_header(self.header)
        shutil.rmtree(self.folder / _PARTS)

    def _write_header(self, header: RunHeader) -> None:
        (self.folder / _HEADER).write_text(header.model_dump_json(indent=1) + "\n")

    def __enter__(self) -> Self:
        """The writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close: partial after an exception, complete otherwise."""
        self.close("complete" if kind is None else "partial")


def read_run(folder: Path) -> Run:
    """Open the run records in a folder; the tables are read when they are collected.

    Raises:
        TraceFormatError: there are none, they were never closed, or a table lacks a column.
    """
    try:
        header = RunHeader.model_validate_json((folder / _HEADER).read_text())
    except OSError:
        raise TraceFormatError(
            f"{folder} holds no run ({_HEADER} is missing); check the path."
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise TraceFormatError(
            f"{folder / _HEADER}, {field}: {first['msg']}; it is of another version, run again."
        ) from None
    if header.status == "open":
        raise TraceFormatError(f"{folder} holds a run that never finished; run it again.")
    return Run(
        folder,
        header,
        _scan(folder / "requests.parquet", REQUEST_SCHEMA),
        _scan(folder / "steps.parquet", STEP_SCHEMA),
    )


def _scan(path: Path, schema: pl.Schema) -> pl.LazyFrame:
    try:
        frame = pl.scan_parquet(path)
        found = frame.collect_schema()
    except (OSError, pl.exceptions.PolarsError) as error:
        raise TraceFormatError(f"{path} cannot be read ({error}); run it again.") from None
    wrong = [name for name, dtype in schema.items() if found.get(name) != dtype]
    if wrong:
        raise TraceFormatError(f"{path} has no proper column {', '.join(wrong)}; run it again.")
    return frame
