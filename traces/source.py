"""open_trace: any supported trace as a stream of requests that can be read again and again."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Literal

from granikv.core.errors import ConfigError
from granikv.traces.detect import FORMATS, Format, detect
from granikv.traces.options import ReadOptions, ReadReport
from granikv.traces.readers import (
    azure,
    bailian,
    bench_serving,
    burstgpt,
    canonical,
    mooncake,
    plain,
    ragpulse,
    sharegpt,
    vidur,
    weka,
    workload,
)
from granikv.traces.readers.reading import Reading, Timed
from granikv.traces.request import Request

_READERS: dict[Format, Callable[[Reading], Iterator[Timed]]] = {
    "mooncake": mooncake.read,
    "bailian": bailian.read,
    "azure": azure.read,
    "burstgpt": burstgpt.read,
    "ragpulse": ragpulse.read,
    "weka": weka.read,
    "vidur": vidur.read,
    "sharegpt": sharegpt.read,
    "bench_serving": bench_serving.read,
    "canonical": canonical.read,
    "plain": plain.read,
    "workload": workload.read,
}

# Options that only some formats can honour; elsewhere they would be ignored in silence.
_ONLY_FOR: dict[str, tuple[Format, ...]] = {
    "block_size": ("mooncake", "bailian"),
    "time_unit": ("mooncake", "vidur"),
    "chars_per_token": ("sharegpt",),
    "bench_run": ("bench_serving",),
    "requests_per_s": ("vidur", "sharegpt", "bench_serving"),
}
_FOLDERS: tuple[Format, ...] = ("weka", "ragpulse")

_LOWEST_RATE_PER_S = 0.001
_HIGHEST_RATE_PER_S = 1_000.0


class TraceSource:
    """A trace on disk; each iteration reads it anew and holds no more than the current row.

    Attributes:
        path: the file or folder.
        format: its format.
        options: how it is read.
        report: what the latest iteration did, complete once that has reached the end.
    """

    def __init__(self, path: Path, trace_format: Format, options: ReadOptions) -> None:
        self.path = path
        self.format = trace_format
        self.options = options
        self.report = ReadReport()

    def __iter__(self) -> Iterator[Request]:
        """Requests in order of arrival.

        Raises:
            TraceFormatError: a row cannot be read, or is earlier than the one before it.
        """
        reading = Reading(self.path, self.options)
        self.report = reading.report
        rows = _READERS[self.format](reading)
        # RAGPulse's public file is two recordings whose clocks both start at 0: always sorted.
        if self.options.sort or self.format == "ragpulse":
            rows = _sorted(reading, rows)
        return _on_the_clock(reading, rows)


def open_trace(
    path: str | Path,
    *,
    format: Format | Literal["auto"] = "auto",
    options: ReadOptions | None = None,
) -> TraceSource:
    """Open a trace file or folder, finding its format from its content.

    Raises:
        TraceFormatError: there is no such file, or no format fits it.
        ConfigError: an option does not apply to the format.
    """
    path = Path(path)
    options = options or ReadOptions()
    if format != "auto" and format not in FORMATS:
        raise ConfigError(
            f"There is no trace format {format!r}; use auto or one of {', '.join(FORMATS)}."
        )
    found = detect(path) if format == "auto" or not path.exists() else format
    if path.is_dir() and found not in _FOLDERS:
        raise ConfigError(f"{path} is a folder; a {found} trace is one file, name that.")
    for name, formats in _ONLY_FOR.items():
        if getattr(options, name) is not None and found not in formats:
            raise ConfigError(
                f"{name} does not apply to {path} ({found}), only to "
                f"{', '.join(formats)}; leave it out."
            )
    return TraceSource(path, found, options)


def _sorted(reading: Reading, rows: Iterator[Timed]) -> Iterator[Timed]:
    """All rows in memory, sorted by time (stable), numbered anew."""
    held = list(rows)
    reading.report.out_of_order = sum(1 for before, after in pairwise(held) if after[0] < before[0])
    held.sort(key=lambda timed: timed[0])
    if not reading.report.out_of_order:
        return iter(held)
    new_ids = {request.request_id: new_id for new_id, (_, request) in enumerate(held)}
    for _, request in held:
        request.request_id = new_ids[request.request_id]
        if request.after is not None:
            request.after = new_ids[request.after]
    return iter(held)


def _on_the_clock(reading: Reading, rows: Iterator[Timed]) -> Iterator[Request]:
    """Requests with their arrival in seconds from the trace's start, checked to ascend."""
    origin = reading.origin
    latest: float | None = None
    per_second = reading.per_second
    for time, request in rows:
        if latest is None:
            # The reader has run up to its first row by now, so its settings stand.
            per_second = reading.per_second
            origin = time if reading.origin is None else reading.origin
            latest = origin
        if time < latest:
            raise reading.error(
                "time", f"earlier than the row before ({time} after {latest})", "read it with sort"
            )
        latest = time
        assert origin is not None
        # Integer stamps are subtracted before they are divided: 7-digit fractions survive.
        request.arrival_s = (time - origin) / per_second
        yield request
    if latest is not None and origin is not None:
        _warn_about_rate(reading.report, (latest - origin) / per_second)


def _warn_about_rate(report: ReadReport, duration_s: float) -> None:
    if not duration_s > 0 or report.kept < 2:
        return
    rate = (report.kept - 1) / duration_s
    if not _LOWEST_RATE_PER_S <= rate <= _HIGHEST_RATE_PER_S:
        report.warnings.append(f"{rate:.3g} requests per second on average: check the time unit.")
