"""Arrivals: plays a request stream against the clock, open loop and closed loop."""

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable

import simpy

from granikv.core.errors import TraceFormatError
from granikv.traces.request import Request


class Arrivals:
    """Sends each request at its time; a closed-loop turn `think_s` after the answer it waits for.

    The stream is read as far as the clock has come, and turns right away wherever they stand, so a
    turn belongs behind the request that it waits for and not later than it can be sent.
    """

    def __init__(
        self,
        env: simpy.Environment,
        requests: Iterable[Request],
        send: Callable[[Request, int], None],
    ) -> None:
        self.sent = 0
        self._env = env
        self._send = send
        self._followers: dict[int, list[Request]] = defaultdict(list)
        self._open: set[int] = set()
        self._ends: dict[int, int] = {}
        env.process(self._play(requests))

    @property
    def waiting_turns(self) -> int:
        """Turns that have been read and wait for an answer."""
        return sum(len(turns) for turns in self._followers.values())

    def _play(self, requests: Iterable[Request]) -> Generator[simpy.Event, None, None]:
        env, clock = self._env, 0
        for request in requests:
            self._open.add(request.request_id)
            if request.after is not None:
                self._follow(request, request.after)
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

    def _follow(self, request: Request, after: int) -> None:
        if after in self._ends:
            self._later(request, self._ends[after])
        elif after in self._open:
            self._followers[after].append(request)
        else:
            raise TraceFormatError(
                f"Request {request.request_id} waits for request {after}, which is not in front of"
                " it in the trace or has no session; put it there and give both one session."
            )

    def on_end(self, request: Request) -> None:
        """A request has ended: turns that wait for it get their time."""
        now = int(self._env.now)
        self._open.discard(request.request_id)
        if request.session is not None:  # only sessions have turns that may be read later
            self._ends[request.request_id] = now
        for turn in self._followers.pop(request.request_id, ()):
            self._later(turn, now)

    def _later(self, request: Request, end_ns: int) -> None:
        delay = end_ns + round(request.think_s * 1e9) - int(self._env.now)
        timer = self._env.timeout(max(0, delay))
        timer.callbacks.append(lambda _: self._emit(request))

    def _emit(self, request: Request) -> None:
        self.sent += 1
        self._send(request, int(self._env.now))
