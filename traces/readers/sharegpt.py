"""ShareGPT JSON: conversations as text.

Layout: a JSON array of {"id", "conversations": [{"from": "human" | "gpt", "value": text}]}. Token
counts come from the number of characters; answers are repeated by later prompts, so turns share
everything before them.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from granikv.core.errors import TraceFormatError
from granikv.traces.readers.arrivals import made_arrivals
from granikv.traces.readers.reading import Reading, Timed, open_text
from granikv.traces.request import Request, Run
from granikv.traces.segments import Origin, named

_CHUNK_CHARS = 1 << 20
_NO_ITEM = re.compile(r"[\s,]*")
_HUMAN = ("human", "user")
_MODEL = ("gpt", "assistant", "chatgpt", "bing", "bard")


def read(reading: Reading) -> Iterator[Timed]:
    """One request per human message that was answered; a conversation arrives as a whole.

    In a closed loop later turns wait for the answer (no pause is recorded); in an open loop all of
    them arrive with the first.
    """
    if reading.options.chars_per_token is None:
        raise TraceFormatError(
            f"{reading.path} holds text, not lengths; give chars_per_token (about 4 in English)."
        )
    times = made_arrivals(reading)
    for row, conversation in enumerate(_array(reading), 1):
        reading.row = row
        requests = _turns(reading, conversation)
        if requests:
            time = next(times)
            yield from ((time, request) for request in requests)


def _turns(reading: Reading, conversation: Any) -> list[Request]:
    turns = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(turns, list):
        raise reading.error("conversations", "want a list of turns", "repair or remove the entry")
    requests: list[Request] = []
    prompt: tuple[Run, ...] = ()
    asked = 0
    for turn in turns:
        text = turn.get("value") if isinstance(turn, dict) else None
        if not isinstance(text, str):
            raise reading.error("value", f"want text, got {text!r}", "repair or remove the entry")
        speaker = turn.get("from")
        if speaker in _HUMAN:
            asked += _tokens(reading, text)
        elif speaker in _MODEL and (asked or requests):
            # Some conversations start with an answer to nothing: there is no prompt for it.
            request = _request(
                reading, conversation, prompt, asked, _tokens(reading, text), requests
            )
            if request is None:
                continue
            requests.append(request)
            answer = named(Origin.OUTPUT, request.request_id)
            prompt = (*request.prompt, Run(answer, request.output_tokens))
            asked = 0
    return requests


def _request(
    reading: Reading,
    conversation: dict[str, Any],
    history: tuple[Run, ...],
    asked: int,
    answered: int,
    before: list[Request],
) -> Request | None:
    admitted = reading.admit(asked, answered)
    if admitted is None:
        return None
    request_id, asked, answered = admitted
    request = Request(
        request_id,
        0.0,
        (*history, Run(named(Origin.TURN, request_id), asked)),
        answered,
        session=str(conversation.get("id", reading.row)),
        output_segment=named(Origin.OUTPUT, request_id),
    )
    if before and reading.options.closed_loop:
        request.after = before[-1].request_id
    return request


def _tokens(reading: Reading, text: str) -> int:
    chars_per_token = reading.options.chars_per_token
    assert chars_per_token is not None
    return math.ceil(len(text) / chars_per_token)


def _array(reading: Reading) -> Iterator[Any]:
    """The items of a JSON array, one at a time: the whole file is some 700 MB."""
    decoder = json.JSONDecoder()
    with open_text(reading.path) as file:
        buffer = file.read(_CHUNK_CHARS).lstrip()
        if not buffer.startswith("["):
            raise TraceFormatError(f"{reading.path} is not a JSON array; check the file.")
        place = 1
        while True:
            place = _NO_ITEM.match(buffer, place).end()  # type: ignore[union-attr]
            if buffer.startswith("]", place):
                return
            try:
                item, place = decoder.raw_decode(buffer, place)
            except ValueError as error:
                chunk = file.read(_CHUNK_CHARS)
                if not chunk:
                    raise TraceFormatError(
                        f"{reading.path} ends inside its array ({error}); get the whole file."
                    ) from None
                buffer, place = buffer[place:] + chunk, 0
                continue
            yield item
