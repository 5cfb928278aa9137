"""Weka / kv-cache-tester: one JSON file per coding-agent conversation, block ids local to the file.

Source: github.com/callanjfox/kv-cache-tester, traces/. `t` counts seconds from the conversation's
start, a sub-agent's from its own start; only full blocks of 64 tokens have ids, and the rest of a
prompt is private.
"""

import heapq
import json
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from granikv.core.errors import TraceFormatError
from granikv.traces.readers.blocks import BlockRule, runs_of_blocks
from granikv.traces.readers.reading import Reading, Timed, open_text
from granikv.traces.request import Request
from granikv.traces.segments import LOCAL_BITS, local_segment


@dataclass(slots=True)
class _Turn:
    """A request with its recorded times, seconds from the conversation's start."""

    start_s: float
    end_s: float
    request: Request


def read(reading: Reading) -> Iterator[Timed]:
    """Requests of one conversation file, or of a folder of them.

    Closed loop: a conversation's requests come together, with the conversation's start as their
    arrival, and each waits for the one before it. Open loop: requests of all conversations by
    recorded time. Every recorded conversation starts at 0; `start_spread_s` spreads them.
    """
    files = _files(reading.path)
    rng = np.random.default_rng(reading.options.seed)
    starts = (rng.random(len(files)) * reading.options.start_spread_s).tolist()
    order = sorted(range(len(files)), key=starts.__getitem__)
    reading.origin = 0.0
    if reading.options.closed_loop:
        for number in order:
            for turn in _Conversation(reading, files[number], number).turns():
                yield starts[number], turn.request
        return
    yield from _by_time(reading, [(starts[number], number, files[number]) for number in order])


def _files(path: Path) -> list[Path]:
    """The conversation files, in name order; anything that is not a JSON object is passed over."""
    found: list[Path] = []
    for child in sorted(path.iterdir()) if path.is_dir() else [path]:
        if not child.is_file():
            continue
        with suppress(TraceFormatError), open_text(child) as file:
            if file.read(1) == "{":
                found.append(child)
    return found


def _by_time(reading: Reading, files: list[tuple[float, int, Path]]) -> Iterator[Timed]:
    """Merge conversations by time, reading each file only when its start is reached."""
    waiting: list[tuple[float, int, Request]] = []
    unread = deque(files)
    emitted = 0
    while waiting or unread:
        while unread and (not waiting or unread[0][0] <= waiting[0][0]):
            start_s, number, path = unread.popleft()
            for turn in _Conversation(reading, path, number).turns():
                entry = (start_s + turn.start_s, turn.request.request_id, turn.request)
                heapq.heappush(waiting, entry)
        if waiting:
            time, _, request = heapq.heappop(waiting)
            request.request_id = emitted
            emitted += 1
            yield time, request


class _Conversation:
    """One file: its main thread and the sub-agents that it starts."""

    def __init__(self, reading: Reading, path: Path, number: int) -> None:
        self._reading = reading
        self._number = number
        reading.file, reading.row = path, 0
        with open_text(path) as file:
            try:
                self._record = json.load(file)
            except ValueError as error:
                raise TraceFormatError(
                    f"{path} is not JSON ({error}); get the whole file."
                ) from None
        if not isinstance(self._record, dict) or not isinstance(self._record.get("requests"), list):
            raise TraceFormatError(f"{path} has no list of requests; it is no Weka conversation.")
        self._local = self._record.get("hash_id_scope", "local") == "local"
        self._name = str(self._record.get("id", path.name))
        self._rule = BlockRule(reading, reading.integer(self._record, "block_size", 1))

    def turns(self) -> Iterator[_Turn]:
        """Its requests in file order, each linked to the one that it waits for."""
        main: _Turn | None = None
        helper: _Turn | None = None
        for entry in self._record["requests"]:
            if isinstance(entry, dict) and entry.get("type") == "subagent":
                for helper in self._helper_turns(entry, main):
                    yield helper
                continue
            turn = self._turn(entry, 0.0, self._name)
            if turn is None:
                continue
            # The main thread goes on when its sub-agent has answered, unless it was recorded to
            # run beside it.
            if helper is not None and turn.start_s >= helper.end_s:
                self._wait(turn, helper, None)
            elif main is not None:
                self._wait(turn, main, self._think_s(entry))
            main, helper = turn, None
            yield turn

    def _helper_turns(self, entry: dict[str, Any], caller: _Turn | None) -> Iterator[_Turn]:
        start_s = self._reading.number(entry, "t")
        session = f"{self._name}/{entry.get('agent_id', self._reading.row)}"
        nested = entry.get("requests")
        if not isinstance(nested, list):
            raise self._reading.error("requests", "a sub-agent without requests", "repair the file")
        before: _Turn | None = None
        for inner in nested:
            turn = self._turn(inner, start_s, session)
            if turn is None:
                continue
            if before is not None:
                self._wait(turn, before, self._think_s(inner))
            elif caller is not None:
                self._wait(turn, caller, None)
            before = turn
            yield turn

    def _turn(self, entry: Any, base_s: float, session: str) -> _Turn | None:
        reading = self._reading
        reading.row += 1
        if not isinstance(entry, dict):
            raise reading.error("requests", "not a JSON object", "repair the file")
        prompt_tokens = reading.integer(entry, "in")
        segments = self._segments(entry)
        self._rule.check(len(segments), prompt_tokens)
        start_s = base_s + reading.number(entry, "t")
        admitted = reading.admit(prompt_tokens, reading.integer(entry, "out"))
        if admitted is None:
            return None
        request_id, prompt_tokens, output_tokens = admitted
        prompt = runs_of_blocks(segments, self._rule.block_size, prompt_tokens, request_id)
        request = Request(request_id, 0.0, prompt, output_tokens, session=session)
        service_s = reading.number(entry, "api_time") if "api_time" in entry else 0.0
        return _Turn(start_s, start_s + service_s, request)

    def _segments(self, entry: dict[str, Any]) -> list[int]:
        ids = self._reading.block_ids(entry)
        if not self._local:
            return ids
        base = local_segment(self._number, 0)
        if ids and max(ids) >> LOCAL_BITS:
            raise self._reading.error(
                "hash_ids", "a local id of more than 32 bits", "repair the file"
            )
        return [base + block_id for block_id in ids]

    def _think_s(self, entry: dict[str, Any]) -> float | None:
        return self._reading.number(entry, "think_time") if "think_time" in entry else None

    def _wait(self, turn: _Turn, awaited: _Turn, think_s: float | None) -> None:
        options = self._reading.options
        if not options.closed_loop:
            return
        pause_s = turn.start_s - awaited.end_s if think_s is None else think_s
        turn.request.after = awaited.request.request_id
        turn.request.think_s = options.think_s(pause_s)
