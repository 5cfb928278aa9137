"""Writers: GraniKV's canonical JSONL (exact), plain JSONL for the load driver, and plain Mooncake
JSONL for other tools.
"""

import gzip
import json
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import IO, Any

from granikv.core.errors import TraceFormatError
from granikv.traces.readers import canonical
from granikv.traces.request import Request
from granikv.traces.segments import is_private

_MS_PER_SECOND = 1_000


def write_trace(requests: Iterable[Request], path: Path) -> int:
    """Write a canonical trace (packed when the name ends in .gz); the number of requests.

    The first line is a header; rows have Mooncake's keys (`timestamp` in ms, `hash_ids` with one
    id per run) plus `run_lengths` and, where they say something, `session_id`, `after`, `think_s`,
    `output_segment` and `prefix_tokens`. Reading the file back gives equal requests.
    """
    header = {"format": canonical.FORMAT, "version": canonical.VERSION, "timestamp_unit": "ms"}
    return _write_rows(path, chain([header], map(_row, requests))) - 1


def write_mooncake(requests: Iterable[Request], path: Path, block_size: int) -> int:
    """Write plain Mooncake JSONL, one id per block, for other tools; the number of requests.

    Sessions and declared prefixes are lost: each row is an independent arrival.

    Raises:
        TraceFormatError: a run ends inside a block, so block ids cannot say what is shared.
    """
    blocks = _BlockIds(block_size, path)
    return _write_rows(path, (blocks.row(request) for request in requests))


def write_plain(requests: Iterable[Request], path: Path) -> int:
    """Write what `granikv bench serve --trace` sends, one request a line; the number of requests.

    Sessions and their order are kept; think times, declared prefixes and what is known of outputs
    are lost.
    """
    return _write_rows(path, map(_plain_row, requests))


def _plain_row(request: Request) -> dict[str, Any]:
    row = {
        "id": request.request_id,
        "arrival_s": request.arrival_s,
        "output_tokens": request.output_tokens,
        "session": request.session,
        "after": request.after,
        "prompt": [[run.segment, run.length] for run in request.prompt],
    }
    return {name: value for name, value in row.items() if value is not None}


def _write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    count = 0
    with _open(path) as file:
        for row in rows:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
            count += 1
    return count


def _open(path: Path) -> IO[str]:
    if path.suffix != ".gz":
        return path.open("w", encoding="utf-8")
    return gzip.open(path, "wt", encoding="utf-8")


def _row(request: Request) -> dict[str, Any]:
    timestamp = request.arrival_s * _MS_PER_SECOND
    row: dict[str, Any] = {
        "timestamp": int(timestamp) if timestamp.is_integer() else timestamp,
        "input_length": request.prompt_tokens,
        "output_length": request.output_tokens,
        "hash_ids": [run.segment for run in request.prompt],
        "run_lengths": [run.length for run in request.prompt],
        "request_id": request.request_id,
    }
    if timestamp / _MS_PER_SECOND != request.arrival_s:
        # Not every time in seconds has a float in milliseconds that leads back to it.
        row["arrival_s"] = request.arrival_s
    if request.session is not None:
        row["session_id"] = request.session
    if request.after is not None:
        row["after"] = request.after
    if request.think_s:
        row["think_s"] = request.think_s
    if request.output_segment is not None:
        row["output_segment"] = request.output_segment
    if request.prefix_tokens:
        row["prefix_tokens"] = request.prefix_tokens
    return row


class _BlockIds:
    """Numbers blocks as Mooncake does: densely from 0, one number for each prefix."""

    def __init__(self, block_size: int, path: Path) -> None:
        self._block_size = block_size
        self._path = path
        self._known: dict[tuple[int | None, int, int, int], int] = {}
        self._next = 0

    def row(self, request: Request) -> dict[str, Any]:
        """A request as a Mooncake row."""
        return {
            "timestamp": request.arrival_s * _MS_PER_SECOND,
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": self._ids(request),
        }

    def _ids(self, request: Request) -> list[int]:
        """One id per block of a prompt; blocks of private runs are never looked up again."""
        ids: list[int] = []
        for place, run in enumerate(request.prompt, 1):
            full, rest = divmod(run.length, self._block_size)
            if rest and place < len(request.prompt):
                raise TraceFormatError(
                    f"{self._path}: request {request.request_id} has a run of {run.length} tokens, "
                    f"which blocks of {self._block_size} cannot hold; write the canonical format."
                )
            lengths = [self._block_size] * full + [rest] * bool(rest)
            for index, length in enumerate(lengths):
                ids.append(self._id(ids[-1] if ids else None, run.segment, index, length))
        return ids

    def _id(self, parent: int | None, segment: int, index: int, length: int) -> int:
        new = self._next
        if not is_private(segment):
            # The same stream behind another prefix, or cut at another length, is another block.
            new = self._known.setdefault((parent, segment, index, length), new)
        self._next = max(self._next, new + 1)
        return new
