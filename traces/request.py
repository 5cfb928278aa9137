"""Request: one line of a trace, as every reader, generator, writer and simulator sees it."""

from dataclasses import dataclass
from typing import NamedTuple


class Run(NamedTuple):
    """`length` leading tokens of the endless token stream named `segment` (64 bit).

    Two prompts share exactly the tokens of their longest common path of runs: equal segments in the
    same place share `min` of their lengths, and then the prompts part unless both runs had that
    length.
    """

    segment: int
    length: int


@dataclass(slots=True)
class Request:
    """One request: when it arrives, what it reads, how much it writes.

    Attributes:
        request_id: unique in the trace, ascending in reading order.
        arrival_s: seconds from the trace's start. In a closed-loop session (`after` is set) the
            time is not used.
        prompt: the prompt as runs; their lengths sum to `prompt_tokens`.
        output_tokens: tokens to generate, at least 1.
        session: conversation name, or None.
        after: `request_id` whose answer this turn waits for (closed loop), or None (open loop).
        think_s: seconds between the awaited answer's last token and this arrival.
        output_segment: stream name of the generated tokens, when a later prompt repeats them; else
            None.
        prefix_tokens: leading tokens that the trace itself declares as shared (a hint), 0 when it
            does not say.
    """

    request_id: int
    arrival_s: float
    prompt: tuple[Run, ...]
    output_tokens: int
    session: str | None = None
    after: int | None = None
    think_s: float = 0.0
    output_segment: int | None = None
    prefix_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Prompt length in tokens."""
        return sum(run.length for run in self.prompt)
