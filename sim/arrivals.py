"""Arrivals: plays a request stream against the clock, open loop and closed loop."""

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable

import simpy

from granikv.core.errors import TraceFormatError
from granikv.traces.request import Request


class Arrivals:
    """Sends each request at its time; a closed-loop turn is sent `think_s` after the answer that it
    waits for.

    `last_arrival_ns` and `sent` describe what has been sent so far.
    """

    def __init__(
        self,
        env: simpy.Environment,
        requests: Iterable[Request],
        send: Callable[[Request, int], None],
    ) -> None:
        self.sent = 0
        self.first_arrival_ns: int | None = None
        self.last_arrival_ns = 0
        self.is_exhausted = False
        self._env = env
        self._send = send
        self._followers: dict[int, list[Request]] = defaultdict(list)
        self._ended: set[int] = set()
        self._has_sessions = False
        self._newest_id: int | None = None
        env.process(self._play(requests))

    @property
    def waiting_turns(self) -> int:
        """Closed-loop turns whose predecessor has not ended."""
        return sum(len(turns) for turns in self._followers.values())

    def _play(self, requests: Iterable[Request]) -> Generator[simpy.Event, None, None]:
        env, clock = self._env, 0
        for request in requests:
            self._newest_id = request.request_id
            if request.after is not None:
                self._follow(request)
                continue
            at = round(request.arrival_s * 1e9)
            if at < clock:
                raise TraceFormatError(
                    f"Request {request.request_id} arrives at {request.arrival_s} s, before the one"
                    " in front of it; sort the trace first."
                )
            clock = at
            if at > env.now:
                yield env.timeout(at - int(env.now))
            self._emit(request)
        self.is_exhausted = True

    def _follow(self, request: Request) -> None:
        self._has_sessions = True
        if request.after in self._ended:
            self._later(request)
        elif request.after is not None:
            self._followers[request.after].append(request)

    def on_end(self, request_id: int) -> None:
        """A request has ended: turns that waited for it get their time."""
        # Until the first session is seen nobody can ask for an earlier end, but its first turn may
        # already be over.
        self._ended.add(request_id)
        for turn in self._followers.pop(request_id, ()):
            self._later(turn)

    def _later(self, request: Request) -> None:
        delay = round(request.think_s * 1e9)
        timer = self._env.timeout(delay)
        timer.callbacks.append(lambda _: self._emit(request))

    def _emit(self, request: Request) -> None:
        now = int(self._env.now)
        self.sent += 1
        self.last_arrival_ns = now
        if self.first_arrival_ns is None:
            self.first_arrival_ns = now
        self._send(request, now)
