"""How often a call is repeated, and how long a point takes; needs no GPU."""

WARM_UPS = 3
MAX_REPLAYS = 20
MIN_REPLAYS = 6
_POINT_BUDGET_US = 160_000.0  # device time that the replays of one point may take
_FLUSH_US = 100.0


def plan_calls(call_us: float) -> int:
    """Calls in one graph: enough that the launch of the graph does not count.

    Args:
        call_us: expected device time of one call.
    """
    if call_us > 4000:
        return 1
    if call_us > 1000:
        return 2
    return max(4, min(32, round(320 / call_us)))


def plan_replays(replay_us: float) -> int:
    """Timed replays of a graph: 20, or fewer once they would take more than 160 ms together."""
    return max(MIN_REPLAYS, min(MAX_REPLAYS, int(_POINT_BUDGET_US / max(replay_us, 1e-3))))


def point_s(call_us: float, overhead_s: float = 0.02) -> float:
    """Wall time that a point should take, capture and set-up included."""
    calls = plan_calls(call_us)
    replay_us = calls * call_us
    timed = (WARM_UPS + plan_replays(replay_us)) * (replay_us + _FLUSH_US)
    return overhead_s + calls * (2e-4 + call_us * 1e-6) + timed * 1e-6
