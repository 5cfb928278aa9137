"""Qwen-Bailian JSONL: one id per block of 16 tokens, chats by parent.

Source: github.com/alibaba-edu/qwen-bailian-usagetraces-anon, README. A block's id is a hash of
that block alone, so the same id may stand in different places: only equal paths from the first
block on are shared.
"""

from collections.abc import Iterator
from typing import Any

from granikv.traces.readers.blocks import BlockRule, runs_of_blocks
from granikv.traces.readers.reading import Reading, Timed
from granikv.traces.request import Request

_BLOCK_SIZE = 16

# What later turns need to know of a chat: request id, arrival in seconds, name of the first chat.
_Known = dict[str, tuple[int, float, str]]


def read(reading: Reading) -> Iterator[Timed]:
    """Requests of a Qwen-Bailian file, in file order.

    A turn whose parent lies before the cut, or was dropped, starts a conversation. In a closed
    loop it waits for its parent's answer plus the recorded gap between the two arrivals (the files
    have no service time, so the pause contains it). Chat ids are kept for the whole pass.
    """
    rule = BlockRule(reading, reading.options.block_size or _BLOCK_SIZE)
    chats: _Known = {}
    for record in reading.json_rows():
        time = reading.number(record, "timestamp")
        prompt_tokens = reading.integer(record, "input_length")
        segments = reading.block_ids(record)
        rule.check(len(segments), prompt_tokens)
        admitted = reading.admit(prompt_tokens, reading.integer(record, "output_length"))
        if admitted is None:
            continue
        request_id, prompt_tokens, output_tokens = admitted
        prompt = runs_of_blocks(segments, rule.block_size, prompt_tokens, request_id)
        request = Request(request_id, 0.0, prompt, output_tokens)
        _join_chat(reading, record, request, time, chats)
        yield time, request


def _join_chat(
    reading: Reading, record: dict[str, Any], request: Request, time: float, chats: _Known
) -> None:
    chat = str(record.get("chat_id"))
    parent = chats.get(str(record.get("parent_chat_id")))
    request.session = chat if parent is None else parent[2]
    chats[chat] = (request.request_id, time, request.session)
    if parent is not None and reading.options.closed_loop:
        request.after = parent[0]
        request.think_s = reading.options.think_s(time - parent[1])
