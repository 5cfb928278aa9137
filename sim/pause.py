"""Pause: what one replica's process waits for, and what an arrival does to that.

An alarm goes off after everything that arrives at its moment. A jump is an alarm at the end of
several decode steps; an arrival that the scheduler could admit puts it forward to the end of the
step after which it is seen.
"""

from bisect import bisect_left
from collections.abc import Sequence

import simpy
from simpy.events import EventPriority

# Ordinary SimPy events have priority 1: at equal times an arrival is in the queue before the engine
# looks.
_AFTER_ARRIVALS = EventPriority(2)


class _Alarm(simpy.Event):
    """Goes off after a delay and after every arrival of that instant; may be put forward."""

    def __init__(self, env: simpy.Environment, delay_ns: int) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        env.schedule(self, priority=_AFTER_ARRIVALS, delay=delay_ns)

    def put_forward(self, delay_ns: int) -> "_Alarm":
        """An earlier alarm that wakes whoever waits for this one, which falls silent."""
        earlier = _Alarm(self.env, delay_ns)
        earlier.callbacks, self.callbacks = self.callbacks, []
        return earlier


class Pause:
    """Of one process: it waits for one thing at a time.

    Args:
        env: whose clock counts nanoseconds.
        overlap: whether an arrival is seen one step late (`ServerConfig.overlap_schedule`).
    """

    def __init__(self, env: simpy.Environment, overlap: bool) -> None:
        self._env = env
        self._overlap = overlap
        self._idle: simpy.Event | None = None
        self._alarm: _Alarm | None = None
        self._ends: Sequence[int] | None = None
        self._start_ns = 0
        self._steps = 0

    def until(self, delay_ns: int) -> simpy.Event:
        """A delay that nothing shortens."""
        self._alarm = _Alarm(self._env, delay_ns)
        return self._alarm

    def sleep(self) -> simpy.Event:
        """Until something arrives."""
        self._idle = simpy.Event(self._env)
        return self._idle

    def jump(self, copy_ns: int, ends_ns: Sequence[int]) -> simpy.Event:
        """Decode steps that end `ends_ns` after copies that take `copy_ns`."""
        self._start_ns, self._steps = int(self._env.now) + copy_ns, len(ends_ns)
        self._ends = ends_ns if len(ends_ns) > 1 else None
        return self.until(copy_ns + int(ends_ns[-1]))

    def jumped_steps(self) -> int:
        """Steps of the jump that has just ended, which an arrival may have cut short."""
        self._ends = None
        return self._steps

    def disturb(self, *, may_admit: bool) -> None:
        """Something has arrived: wake up, or cut a jump short if it may be admitted."""
        if self._idle is not None:
            self._idle.succeed()
            self._idle = None
            return
        ends = self._ends
        if ends is None or self._alarm is None or not may_admit:
            return
        # The decision after step m sees what had come by the boundary before it (overlap) or by
        # then (no overlap).
        since = int(self._env.now) - self._start_ns
        boundary = bisect_left(ends, since) + 1 if since > 0 else 0
        steps = max(1, boundary + self._overlap)
        if steps < self._steps:
            self._steps = steps
            self._alarm = self._alarm.put_forward(int(ends[steps - 1]) - since)
