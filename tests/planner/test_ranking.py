"""The ranking of contests whose scores are given: best of each kind, gains, answers, words."""

import math
from dataclasses import replace

import pytest

from granikv.core.errors import ConfigError
from granikv.planner.cells import Cell
from granikv.planner.contest import ORACLE, Contest, Entry, entries_of, oracle_options
from granikv.planner.contest_page import standings, to_run
from granikv.planner.oracle import Oracle
from granikv.planner.ranking import rank
from granikv.planner.ranking_words import sentences
from granikv.planner.trials import Trial, constant
from granikv.sim.metrics import Slo

LEVEL = [4.0, 8.0, 2.0]


@pytest.fixture(scope="module")
def make_contest(planned, make_task):
    """A contest whose mean end-to-end latencies are given by name, one a seed."""
    template = planned[0].of("granikv", 0.2)[0]

    def kind_of(name: str) -> str:
        return "static" if name.startswith("static") else "policy"

    def make(latencies: dict[str, list[float]], **changes: object) -> Contest:
        entries = tuple(
            Entry(name, kind_of(name), name, 0.2) for name in latencies if name != ORACLE
        )
        seeds = max(len(values) for values in latencies.values())
        contest = Contest(make_task(), entries, seeds, objective="latency")
        for name, values in latencies.items():
            for seed, latency_s in enumerate(values):
                e2e = replace(template.summary.e2e_s, mean=latency_s)
                summary = replace(template.summary, e2e_s=e2e, **changes)
                cell = Cell("granikv", 0.2, 1, seed)
                contest.results[name, seed] = replace(template, cell=cell, summary=summary)
        return contest

    return make


def slower(level: list[float], factors: list[float]) -> list[float]:
    return [value * factor for value, factor in zip(level, factors, strict=True)]


def test_gain_and_interval_are_those_worked_out_by_hand(make_contest):
    """Gains of 2.0, 2.2 and 2.5. Their logarithms 0.6931, 0.7885 and 0.9163 have the mean 0.7993
    and the standard deviation 0.1120; times t(0.95; 2) = 2.9200 and sqrt(1 + 1/3) = 1.1547 that is
    0.3775 to either side.
    """
    policy = [value / gain for value, gain in zip(LEVEL, [2.0, 2.2, 2.5], strict=True)]
    ranking = rank(make_contest({"static 0.2": LEVEL, "mover": policy}))
    gain = ranking.best_policy.over_static
    assert (gain.mean, gain.low, gain.high) == pytest.approx((2.2240, 1.5247, 3.2440), abs=1e-4)
    assert gain.text == "2.22x (1.52-3.24)"
    assert ranking.answer == "worth it"


def test_what_hits_both_alike_cancels(make_contest):
    """Seeds that differ by a factor of 4 leave no doubt about a gain of 1.25 in each."""
    ranking = rank(make_contest({"static 0.2": LEVEL, "mover": slower(LEVEL, [0.8, 0.8, 0.8])}))
    gain = ranking.best_policy.over_static
    assert (gain.low, gain.mean, gain.high) == pytest.approx((1.25, 1.25, 1.25))


def test_moving_does_not_pay(make_contest):
    """Slower by 1.10, 1.11 and 1.12: exp(-0.1043 +- 2.9200 * 0.0090 * 1.1547)."""
    contest = make_contest(
        {
            "static 0.1": slower(LEVEL, [1.2, 1.2, 1.2]),
            "static 0.2": LEVEL,
            "near": slower(LEVEL, [1.10, 1.11, 1.12]),
            "far": slower(LEVEL, [2.0, 2.0, 2.0]),
        }
    )
    ranking = rank(contest)
    assert ranking.answer == "worse"
    assert [s.name for s in ranking.standings] == ["static 0.2", "near", "static 0.1", "far"]
    assert to_run(ranking).name == "static 0.2"
    first, second, *_ = sentences(ranking, contest)
    assert first == (
        "A dynamic split is not worth it on workload.yaml: the best policy, near, gives 0.90x "
        "(0.87-0.93) the best fixed one, static 0.2, in mean end-to-end latency (as speed-up)."
    )
    assert second == "near gives 0.90x (0.87-0.93) the fraction 0.2 it starts from."


def test_a_gain_that_the_noise_can_explain_is_none(make_contest):
    contest = make_contest({"static 0.2": LEVEL, "mover": slower(LEVEL, [0.7, 1.1, 0.8])})
    ranking = rank(contest)
    assert ranking.best_policy.over_static.mean > 1.1
    assert ranking.answer == "within the noise"
    assert to_run(ranking).name == "static 0.2"
    assert "shows no gain" in sentences(ranking, contest)[0]


def test_a_sure_gain_of_less_than_a_hundredth_is_none(make_contest):
    contest = make_contest({"static 0.2": LEVEL, "mover": slower(LEVEL, [0.995, 0.995, 0.995])})
    assert rank(contest).answer == "within the noise"


def test_the_best_of_many_policies_has_to_be_better_by_more(make_contest):
    """Logarithms of 0.08, 0.10 and 0.12: 0.100 +- 0.067 for one, +- 0.161 for the best of five."""
    mover = [value / math.exp(log) for value, log in zip(LEVEL, [0.08, 0.10, 0.12], strict=True)]
    alone = {"static 0.2": LEVEL, "mover": mover}
    others = {f"other {number}": slower(LEVEL, [1.5, 1.5, 1.5]) for number in range(4)}
    assert rank(make_contest(alone)).answer == "worth it"
    assert rank(make_contest(alone | others)).answer == "within the noise"


def test_best_static_split_is_that_of_all_seeds_and_the_smallest_of_equals(make_contest):
    contest = make_contest(
        {
            "static 0.1": [3.0, 9.0, 9.0],  # best in the nominal seed only
            "static 0.2": [4.0, 4.0, 4.0],
            "static 0.3": [4.0, 4.0, 4.0],
            "mover": [4.0, 4.0, 4.0],
        }
    )
    assert rank(contest).best_static.name == "static 0.2"


def test_oracle_stands_first_and_is_what_others_are_a_part_of(make_contest):
    contest = make_contest(
        {
            "static 0.2": LEVEL,
            "mover": slower(LEVEL, [0.625, 0.625, 0.625]),
            ORACLE: slower(LEVEL, [0.5, 0.5, 0.5]),
        }
    )
    ranking = rank(contest)
    assert [s.name for s in ranking.standings] == [ORACLE, "mover", "static 0.2"]
    assert ranking.oracle.over_static.mean == pytest.approx(2.0)
    assert ranking.best_policy.of_oracle.mean == pytest.approx(0.8)
    assert ranking.best_static.of_oracle.mean == pytest.approx(0.5)
    assert to_run(ranking).name == "mover"  # nobody can run the oracle
    words = sentences(ranking, contest)[2]
    assert "gives 2.00x" in words
    assert "mover 0.80x" in words


def test_oracle_that_finds_nothing_says_so(make_contest):
    contest = make_contest({"static 0.2": LEVEL, "mover": LEVEL, ORACLE: LEVEL})
    assert "found nothing that moving could gain" in sentences(rank(contest), contest)[2]


@pytest.mark.parametrize(("simulations", "says_so"), [(5, False), (12, True)])
def test_a_search_that_ended_too_early_says_so(make_contest, simulations, says_so):
    contest = make_contest({"static 0.2": LEVEL, "mover": LEVEL, ORACLE: LEVEL})
    contest.options = oracle_options(contest.entries, 5.0, 10)
    trial = Trial(constant(0.2, 40, 1), 1.0, 9.0)
    contest.oracles[0] = Oracle(trial, trial, simulations)
    assert ("--oracle-runs" in sentences(rank(contest), contest)[2]) is says_so


def test_gain_over_the_start_is_told_apart(make_contest):
    """A policy may beat the split that it starts from and still lose to the best one."""
    contest = make_contest(
        {
            "static 0.2": slower(LEVEL, [2.0, 2.0, 2.0]),
            "static 0.4": LEVEL,
            "mover": slower(LEVEL, [1.25, 1.25, 1.25]),
        }
    )
    ranking = rank(contest)
    assert ranking.answer == "worse"
    assert ranking.over_start.mean == pytest.approx(1.6)
    assert "helps where nobody has looked for the best one" in sentences(ranking, contest)[1]


@pytest.mark.parametrize(("seeds", "words"), [(1, "1 seed says"), (2, "2 seeds say"), (3, None)])
def test_few_seeds_are_told(make_contest, seeds, words):
    contest = make_contest({"static 0.2": LEVEL[:seeds], "mover": LEVEL[:seeds]})
    last = sentences(rank(contest), contest)[-1]
    assert last.startswith(words) if words else "seeds" not in last


def test_interrupted_contest(make_contest):
    contest = make_contest({"static 0.2": LEVEL, "mover": LEVEL[:1], ORACLE: LEVEL[:1]})
    assert rank(contest).best_policy.over_static.mean == pytest.approx(1.0)
    del contest.results[ORACLE, 0]
    assert rank(contest).oracle is None
    del contest.results["mover", 0]
    with pytest.raises(ValueError, match="nominal seed"):
        rank(contest)


# ---------------------------------------------------------------------- table


def test_table_is_of_the_nominal_seed(make_contest):
    contest = make_contest({"static 0.2": LEVEL, "mover": slower(LEVEL, [0.8, 0.8, 0.8])})
    headers, rows = standings(rank(contest))
    cells = dict(zip(headers[1:], rows["mover"], strict=True))
    assert cells["over best static"].startswith("1.25x")
    assert cells["end to end, mean s"] == "3.20"
    assert not {"of oracle", "lost", "goodput, req/s"} & set(headers)


def test_table_shows_lost_requests_where_there_are_any(make_contest):
    contest = make_contest({"static 0.2": [4.0], "mover": [4.0]})
    served = contest.results["mover", 0]
    summary = replace(served.summary, finished=served.summary.requests - 7)
    contest.results["mover", 0] = replace(served, summary=summary)
    headers, rows = standings(rank(contest))
    place = headers.index("lost") - 1
    assert (rows["static 0.2"][place], rows["mover"][place]) == ("0", "7")


# ---------------------------------------------------------------------- objective


def test_objective_where_none_is_chosen(make_contest):
    names = ("static 0.1", "static 0.2", "mover")
    contest = make_contest({name: [4.0] for name in names}, offered_s=100.0)
    contest.objective = None

    def overload(*overloaded: str) -> None:
        for name in overloaded:
            waits = {"early_ttft_s": 0.1, "late_ttft_s": 50.0}
            contest.results[name, 0] = replace(contest.results[name, 0], **waits)

    assert contest.decided_objective() == "latency"
    overload("static 0.1")  # the other keeps up: its throughput is what was asked for
    assert contest.decided_objective() == "latency"
    overload("static 0.2")
    assert contest.decided_objective() == "throughput"
    contest.objective = "latency"
    assert contest.decided_objective() == "latency"
    contest.objective, contest.task = None, replace(contest.task, slo=Slo(ttft_s=1.0))
    assert contest.decided_objective() == "goodput"


def test_objective_of_a_burst_is_throughput(make_contest):
    contest = make_contest({"static 0.2": [4.0], "mover": [4.0]}, offered_s=0.5)
    contest.objective = None
    assert contest.decided_objective() == "throughput"


# ---------------------------------------------------------------------- entries


def test_entries_hold_the_start_and_name_policies_shortly(tmp_path):
    for name in ("a", "b"):
        policy = "class Mine:\n    def observe(self, window):\n        return None\n"
        (tmp_path / f"{name}.py").write_text(policy + "class oracle(Mine): ...\n")
    a, b = f"{tmp_path}/a.py:Mine", f"{tmp_path}/b.py:Mine"
    entries = entries_of(0.3, (0.1, 0.5), ("marginal", a))
    assert [entry.name for entry in entries] == [
        "static 0.1", "static 0.3", "static 0.5", "marginal", "Mine",
    ]  # fmt: skip
    assert {entry.hot_fraction for entry in entries if entry.kind == "policy"} == {0.3}
    # Names of different ones differ, and none is taken for the oracle.
    assert [entry.name for entry in entries_of(0.3, (0.3,), (a, b))] == ["static 0.3", a, b]
    assert entries_of(0.3, (0.3,), (f"{tmp_path}/a.py:oracle",))[1].name != ORACLE


@pytest.mark.parametrize(
    ("policies", "words"),
    [
        (("marginal", "marginal"), "--policy marginal is given twice"),
        (("static",), "--policy static moves nothing"),
        (("marginl",), "did you mean 'marginal'"),
    ],
)
def test_entries_that_make_no_sense(policies, words):
    with pytest.raises(ConfigError, match=words):
        entries_of(0.2, (0.2,), policies)
