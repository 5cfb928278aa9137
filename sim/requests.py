"""RequestState: a request inside a replica, from arrival to its last token."""

from enum import StrEnum

from granikv.core.directory import Reservation
from granikv.sim.radix_node import Cursor, Node
from granikv.traces.request import Request, Run

# Generated tokens that no later prompt repeats get a stream of their own, far below every segment a
# trace uses.
_PRIVATE_OUTPUT_BASE = -(1 << 62)


class Status(StrEnum):
    """How a request ended, as run records spell it."""

    FINISHED = "finished"
    REFUSED = "refused"
    ABORTED = "aborted"
    RUNNING = "running"
    WAITING = "waiting"


class RequestState:
    """What the scheduler knows of one request.

    `fill` is what has to be in the KV cache before decoding (prompt, and after a retraction the
    tokens generated so far); `cursor` marks how much of it is cached; `last_node` is the node this
    request has locked.
    """

    __slots__ = (
        "arrival_ns",
        "cached_tokens",
        "cursor",
        "fill",
        "fill_tokens",
        "finish_ns",
        "finish_step",
        "first_token_ns",
        "generated",
        "hot_tokens",
        "join_key",
        "join_step",
        "last_node",
        "placing",
        "replica",
        "request",
        "reservation",
        "row",
        "status",
    )

    def __init__(self, request: Request, arrival_ns: int, replica: int = 0) -> None:
        self.request = request
        self.replica = replica
        self.arrival_ns = arrival_ns
        self.fill = request.prompt
        self.fill_tokens = request.prompt_tokens
        self.generated = 0
        self.cursor: Cursor | None = None
        self.last_node: Node | None = None
        self.reservation: Reservation | None = None
        self.placing: tuple[int, int, int] | None = None
        self.row = 0
        self.join_key = 0
        self.join_step = 0
        self.finish_step = 0
        self.first_token_ns: int | None = None
        self.finish_ns: int | None = None
        self.cached_tokens = 0
        self.hot_tokens = 0
        self.status = Status.WAITING

    @property
    def output_segment(self) -> int:
        """Stream name of the generated tokens."""
        named = self.request.output_segment
        return _PRIVATE_OUTPUT_BASE - self.request.request_id if named is None else named

    @property
    def remaining_output(self) -> int:
        """Tokens still to generate after a retraction (all of them before the first)."""
        return self.request.output_tokens - self.generated

    def retract(self, generated: int) -> None:
        """Forget the KV; `generated` tokens are kept and prefilled again with the prompt."""
        self.generated = generated
        again = (Run(self.output_segment, generated),) if generated else ()
        self.fill = (*self.request.prompt, *again)
        self.fill_tokens = self.request.prompt_tokens + generated
        if not generated:
            self.first_token_ns = None
        self.cursor = None
        self.last_node = None
        self.status = Status.WAITING
