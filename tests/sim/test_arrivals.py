"""When requests are sent, and where to."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from sim_support import lone, prompt, run, tiny

from granikv.core.errors import ConfigError, TraceFormatError
from granikv.sim.router import ROUTERS, make_router
from granikv.traces.request import Request


def _opener(prompt_tokens: int = 10) -> Request:
    return replace(lone(0, 0.0, prompt_tokens, 5), session="s")


def _turn(id_: int, after: int, think_s: float = 0.0, tokens: int = 10) -> Request:
    return replace(lone(id_, 0.0, tokens, 3), session="s", after=after, think_s=think_s)


def _ns(values: object) -> list[int]:
    return [round(value * 1e9) for value in values]  # type: ignore[attr-defined]


def test_a_turn_comes_its_think_time_after_the_answer() -> None:
    result = run([_opener(), _turn(1, 0, 2e-3), _turn(2, 1, 3e-3)], tiny())
    arrival, finish = _ns(result.requests["arrival_s"]), _ns(result.requests["finish_s"])
    assert arrival[1] == finish[0] + 2_000_000
    assert arrival[2] == finish[1] + 3_000_000
    assert result.outcome.sent == 3


def test_several_turns_may_wait_for_one_answer() -> None:
    result = run([_opener(), _turn(1, 0), _turn(2, 0, 1e-6)], tiny())
    finish = _ns(result.requests["finish_s"])[0]
    assert _ns(result.requests["arrival_s"])[1:] == [finish, finish + 1000]


@pytest.mark.parametrize(("think_s", "arrival_s"), [(1.0, 100.0), (150.0, 150.000015)])
def test_a_turn_that_is_read_late_has_been_thinking_all_the_time(
    think_s: float, arrival_s: float
) -> None:
    """Request 1 stands before the turn in the trace, so the turn is read at 100 s; its answer came
    at 15 us.
    """
    result = run([_opener(), lone(1, 100.0, 10, 5), _turn(2, 0, think_s)], tiny())
    assert _ns(result.requests["arrival_s"])[2] == round(arrival_s * 1e9)


def test_a_turn_must_follow_a_request_in_front_of_it() -> None:
    with pytest.raises(TraceFormatError, match="Request 1 waits for request 7, which is not"):
        run([_opener(), _turn(1, 7)], tiny())


def test_a_refused_request_does_not_hold_up_its_session() -> None:
    result = run([_opener(5000), _turn(1, 0, 1e-3)], tiny())
    assert result.requests["status"].to_list() == ["refused", "finished"]
    assert _ns(result.requests["arrival_s"])[1] == 1_000_000


def test_arrivals_may_not_go_backwards() -> None:
    with pytest.raises(TraceFormatError, match=r"Request 1 arrives at 0\.5 s.*sort the trace"):
        run([lone(0, 1.0, 10, 5), lone(1, 0.5, 10, 5)], tiny())


def test_the_stream_is_read_as_it_is_needed() -> None:
    """A cut run does not read the trace to its end."""
    read = []

    def stream() -> Iterator[Request]:
        for i in range(1000):
            read.append(i)
            yield lone(i, float(i), 10, 2)

    result = run(stream(), tiny(), until_s=10.5)
    assert result.outcome.sent == 11
    assert len(read) == 12


# ---------------------------------------------------------------------- routers


@dataclass
class _Replica:
    load: int


def _loads(*loads: int) -> list[_Replica]:
    return [_Replica(load) for load in loads]


def test_round_robin_takes_turns() -> None:
    route = make_router("round_robin")
    assert [route(lone(i, 0.0, 1, 1), _loads(9, 0, 0)) for i in range(4)] == [0, 1, 2, 0]


def test_least_loaded_takes_the_first_emptiest() -> None:
    route = make_router("least_loaded")
    assert route(lone(0, 0.0, 1, 1), _loads(3, 1, 1)) == 1


def test_prefix_affinity_stays_until_a_replica_is_far_behind() -> None:
    route = make_router("prefix_affinity")
    first = Request(0, 0.0, prompt((1, 10), (5, 3)), 1)
    same = Request(1, 0.0, prompt((1, 7), (6, 3)), 1)
    other = Request(2, 0.0, prompt((2, 10)), 1)
    assert route(first, _loads(4, 1)) == 1
    assert route(same, _loads(0, 9)) == 1
    assert route(other, _loads(0, 9)) == 0
    assert route(same, _loads(10, 26)) == 1
    assert route(same, _loads(10, 27)) == 0
    assert route(same, _loads(20, 40)) == 1


def test_an_unknown_router_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        ConfigError, match="'round_robbin' does not exist; did you mean 'round_robin'"
    ):
        make_router("round_robbin")
    with pytest.raises(ConfigError, match="choose one of round_robin, least_loaded"):
        make_router("xyz")


@pytest.mark.parametrize("router", ROUTERS)
def test_replicas_share_the_work(router: str) -> None:
    requests = [lone(i, 5e-6 * i, 50, 30) for i in range(40)]
    result = run(requests, tiny(), replicas=3, router=router)
    assert result.outcome.finished == 40
    counts = result.requests["replica"].value_counts()["count"].to_list()
    assert len(counts) == 3
    assert min(counts) >= 5
    assert sum(totals.prefills for totals in result.outcome.totals) >= 3


def test_a_request_in_a_prefill_step_is_load() -> None:
    """The long prompt occupies replica 0, so the next one goes to replica 1."""
    requests = [lone(0, 0.0, 200, 2), lone(1, 1e-6, 10, 2)]
    result = run(requests, tiny(), replicas=2, router="least_loaded")
    assert result.requests["replica"].to_list() == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"replicas": 0}, "replicas must be at least 1"), ({"until_s": 0.0}, "must end after 0 s")],
)
def test_impossible_runs_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run([lone(0, 0.0, 10, 5)], tiny(), **arguments)  # type: ignore[arg-type]
