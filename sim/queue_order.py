"""The order in which waiting requests are tried: first come first served, or longest cached prefix
first.
"""

from collections import deque

from granikv.sim.config import SchedulePolicy
from granikv.sim.prefix_index import PrefixIndex
from granikv.sim.requests import RequestState
from granikv.traces.request import Run

# SGLang 0.5.17, schedule_policy.py: LPM falls back to FCFS above 128 waiting requests; requests
# with at most 32 cached tokens wait when another waiting request shares at least 32 tokens with
# them and goes first.
_LPM_QUEUE_LIMIT = 128
_IN_BATCH_CHECK_TOKENS = 32
_IN_BATCH_SHARED_TOKENS = 32


def order_waiting(waiting: deque[RequestState], policy: SchedulePolicy, index: PrefixIndex) -> None:
    """Sort `waiting` in place; FCFS leaves it as it is."""
    if policy == "fcfs" or len(waiting) > _LPM_QUEUE_LIMIT:
        return
    leaders: list[tuple[Run, ...]] = []
    ranked: list[tuple[int, int, RequestState]] = []
    for place, state in enumerate(waiting):
        cursor, _ = index.match(state.fill, state.fill_tokens - 1)
        rank = -cursor.depth
        if cursor.depth <= _IN_BATCH_CHECK_TOKENS:
            if any(_shared(state.fill, other) >= _IN_BATCH_SHARED_TOKENS for other in leaders):
                rank = 1
            else:
                leaders.append(state.fill)
        ranked.append((rank, place, state))
    ranked.sort(key=lambda entry: entry[:2])
    waiting.clear()
    waiting.extend(state for _, _, state in ranked)


def _shared(left: tuple[Run, ...], right: tuple[Run, ...]) -> int:
    """Leading tokens that two prompts share."""
    shared = 0
    for (segment, length), (other, other_length) in zip(left, right, strict=False):
        if segment != other:
            break
        shared += min(length, other_length)
        if length != other_length:
            break
    return shared
