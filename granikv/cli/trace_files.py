"""rewrite: the shared end of the commands that write a trace."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from granikv.cli.failures import InterruptError
from granikv.cli.folders import check_new_file
from granikv.cli.reading import not_empty, report_lines
from granikv.cli.screen import progress_bar, say

if TYPE_CHECKING:
    from granikv.traces.request import Request
    from granikv.traces.source import TraceSource
    from granikv.traces.transform import TransformOptions

    Writer = Callable[[Iterable[Request], Path], int]


def rewrite(
    source: "TraceSource",
    out: Path,
    transform: "TransformOptions | None" = None,
    seed: int = 0,
    write: "Writer | None" = None,
) -> None:
    """Write a trace, in the canonical form unless told otherwise.

    The file appears under its name when it is complete.

    Raises:
        ConfigError: nothing is left of the trace, or the file cannot be written.
        InterruptError: Ctrl-C.
    """
    from granikv.traces.transform import TransformOptions, apply
    from granikv.traces.writers import write_trace

    check_new_file(out, source.path)
    requests = not_empty(apply(source, transform or TransformOptions(), seed), source.path)
    # The suffix stays last: it decides whether the file is packed.
    partial = out.with_name(f".partial-{out.name}")
    try:
        with progress_bar("Writing the trace"):
            count = (write or write_trace)(requests, partial)
        partial.replace(out)
    except KeyboardInterrupt:
        raise InterruptError(f"{out} was not written.") from None
    finally:
        partial.unlink(missing_ok=True)
    say(*report_lines(source))
    say(f"Written: {out}, {count:,} requests")
