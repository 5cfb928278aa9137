"""Of a trace: the argument that names it, and option groups of how it is read and changed."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from granikv.cli.checked import checked

# The trace layer is imported where it is used: `granikv --help` must not wait for it.
if TYPE_CHECKING:
    from granikv.traces.options import ReadOptions
    from granikv.traces.source import TraceSource
    from granikv.traces.transform import TransformOptions

_READING = "Reading the trace"
_TRANSFORM = "Changing the trace"

TraceArgument = Annotated[Path, typer.Argument(help="Trace file or folder, or a workload YAML.")]


@dataclass(frozen=True, slots=True)
class ReadGroup:
    """How the trace file is read."""

    format: Annotated[
        str, typer.Option(help="Trace format; auto looks at the content.", rich_help_panel=_READING)
    ] = "auto"
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens of one hash block, when the format leaves it open.",
            rich_help_panel=_READING,
        ),
    ] = None
    closed_loop: Annotated[
        bool,
        typer.Option(
            "--closed-loop/--open-loop",
            help="Closed: the next turn waits for the answer before it. Open: recorded times.",
            rich_help_panel=_READING,
        ),
    ] = True
    max_think_s: Annotated[
        float | None,
        typer.Option(
            "--max-think",
            metavar="S",
            help="Longest pause before a turn.",
            rich_help_panel=_READING,
        ),
    ] = None
    start_spread_s: Annotated[
        float,
        typer.Option(
            "--start-spread",
            metavar="S",
            help="Conversations that all start at 0 start at random in this many seconds.",
            rich_help_panel=_READING,
        ),
    ] = 0.0
    keep_failed: Annotated[
        bool,
        typer.Option(
            "--keep-failed",
            help="Keep requests without prompt or output, with one token; dropped otherwise.",
            rich_help_panel=_READING,
        ),
    ] = False
    time_unit: Annotated[
        Literal["s", "ms", "us", "ns"] | None,
        typer.Option(
            help="Unit of the time stamps, when the format leaves it open.",
            rich_help_panel=_READING,
        ),
    ] = None
    requests_per_s: Annotated[
        float | None,
        typer.Option(
            help="Poisson arrivals for files without times; inf sends all at once.",
            rich_help_panel=_READING,
        ),
    ] = None
    chars_per_token: Annotated[
        float | None,
        typer.Option(
            help="Characters of one token, for files that hold text.", rich_help_panel=_READING
        ),
    ] = None
    bench_run: Annotated[
        int | None,
        typer.Option(
            help="Which run (from 0) of a benchmark's output file.", rich_help_panel=_READING
        ),
    ] = None
    sort: Annotated[
        bool,
        typer.Option(
            "--sort",
            help="Sort an unsorted trace in memory instead of refusing it.",
            rich_help_panel=_READING,
        ),
    ] = False

    def open(self, path: Path, seed: int = 0) -> "TraceSource":
        """Open the trace.

        Raises:
            ConfigError: an option is out of range or does not apply to the format.
            TraceFormatError: the file is no trace.
        """
        from granikv.traces.source import open_trace

        return open_trace(path, format=self.format, options=self.options(seed))  # type: ignore[arg-type]

    def options(self, seed: int = 0) -> "ReadOptions":
        """The reader's own form.

        Raises:
            ConfigError: an option is out of range.
        """
        from granikv.traces.options import ReadOptions

        return checked(
            ReadOptions,
            block_size=self.block_size,
            drop_failed=not self.keep_failed,
            closed_loop=self.closed_loop,
            max_think_s=self.max_think_s,
            start_spread_s=self.start_spread_s,
            time_unit=self.time_unit,
            requests_per_s=self.requests_per_s,
            chars_per_token=self.chars_per_token,
            bench_run=self.bench_run,
            sort=self.sort,
            seed=seed,
        )


@dataclass(frozen=True, slots=True)
class TransformGroup:
    """What is done to the trace, in this order: cut, prepend, jitter, speed up."""

    start_s: Annotated[
        float,
        typer.Option(
            "--start",
            metavar="S",
            help="Leave out requests before this time.",
            rich_help_panel=_TRANSFORM,
        ),
    ] = 0.0
    end_s: Annotated[
        float | None,
        typer.Option(
            "--end",
            metavar="S",
            help="Leave out requests from this time on.",
            rich_help_panel=_TRANSFORM,
        ),
    ] = None
    max_requests: Annotated[
        int | None, typer.Option(help="Keep at most so many requests.", rich_help_panel=_TRANSFORM)
    ] = None
    prepend_prefix_tokens: Annotated[
        int,
        typer.Option(
            "--prepend-prefix",
            metavar="TOKENS",
            help="Put one shared prefix of this length before every prompt.",
            rich_help_panel=_TRANSFORM,
        ),
    ] = 0
    tick_jitter_s: Annotated[
        float,
        typer.Option(
            "--tick-jitter",
            metavar="S",
            help="Move each arrival by a random time below this, for traces with a coarse clock.",
            rich_help_panel=_TRANSFORM,
        ),
    ] = 0.0
    speedup: Annotated[
        float,
        typer.Option(
            metavar="X", help="2 plays the trace twice as fast.", rich_help_panel=_TRANSFORM
        ),
    ] = 1.0

    def options(self) -> "TransformOptions":
        """The trace layer's own form.

        Raises:
            ConfigError: an option is out of range.
        """
        from granikv.traces.transform import TransformOptions

        return checked(
            TransformOptions,
            start_s=self.start_s,
            end_s=self.end_s,
            max_requests=self.max_requests,
            prepend_prefix_tokens=self.prepend_prefix_tokens,
            tick_jitter_s=self.tick_jitter_s,
            speedup=self.speedup,
        )
