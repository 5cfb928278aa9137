"""Reading: one counting pass over a trace, and the sentence for a trace with nothing in it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from granikv.core.errors import ConfigError

if TYPE_CHECKING:
    from granikv.traces.request import Request
    from granikv.traces.source import TraceSource
    from granikv.traces.transform import TransformOptions


@dataclass(frozen=True, slots=True)
class TraceCount:
    """What a trace holds after its transforms; `prompt_tokens` and `output_tokens` are sums."""

    requests: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int

    @property
    def text(self) -> str:
        """One line for people."""
        prompt, output = self.prompt_tokens / self.requests, self.output_tokens / self.requests
        rate = f", {self.requests / self.duration_s:.3g} requests/s" if self.duration_s else ""
        return (
            f"{self.requests:,} requests over {self.duration_s:,.0f} s{rate}, "
            f"on average {prompt:,.0f} prompt and {output:,.0f} output tokens"
        )


def count_trace(source: "TraceSource", transform: "TransformOptions", seed: int = 0) -> TraceCount:
    """Read the trace once, without holding it.

    Raises:
        ConfigError: no request is left.
        TraceFormatError: a row cannot be read.
    """
    from granikv.traces.transform import apply

    count = prompt_tokens = output_tokens = 0
    first_s = last_s = 0.0
    for request in not_empty(apply(source, transform, seed), source.path):
        if not count:
            first_s = request.arrival_s
        count += 1
        last_s = request.arrival_s
        prompt_tokens += request.prompt_tokens
        output_tokens += request.output_tokens
    return TraceCount(count, last_s - first_s, prompt_tokens, output_tokens)


def not_empty(requests: Iterable["Request"], path: Path) -> Iterator["Request"]:
    """The same stream.

    Raises:
        ConfigError: it has no request, now, not when it is read.
    """
    stream = iter(requests)
    first = next(stream, None)
    if first is None:
        raise ConfigError(
            f"{path} leaves no request to simulate; check the file, --start and --end, and "
            "--keep-failed."
        )
    return chain((first,), stream)


def report_lines(source: "TraceSource") -> list[str]:
    """What the latest pass did with the rows: read, dropped, clamped, and its warnings."""
    return [
        f"{source.path.name} ({source.format}): {source.report.summary()}",
        *source.report.warnings,
    ]
