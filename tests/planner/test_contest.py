"""Contests that are run: who takes part, what is kept, and the same results every time."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from granikv.core.errors import ConfigError
from granikv.planner.cells import PlanTask
from granikv.planner.contest import ORACLE, Contest, Entry, entries_of, oracle_options
from granikv.planner.policies import compare_policies
from granikv.planner.ranking import Ranking
from granikv.traces.records import read_run
from granikv.traces.transform import TransformOptions

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
OWN = '''
class Own:
    """Wants half of all tokens once 4 s are over."""

    def observe(self, window):
        return window.size_tokens // 2 if window.now_s > 4 else None
'''


@pytest.fixture(scope="module")
def make_contest(make_task: Callable[..., PlanTask], tmp_path_factory: pytest.TempPathFactory):
    """A contest on the first requests of the example of docs/policies.md."""
    own = tmp_path_factory.mktemp("policy") / "own.py"
    own.write_text(OWN)
    given = make_task()
    server = given.server.model_copy(update={"size_tokens": 80_000, "hot_fraction": 0.1})
    task = replace(
        given,
        trace=EXAMPLES / "drift.yaml",
        transform=TransformOptions(max_requests=250),
        server=server,
    )

    def make(simulations: int | None = 12, policies: tuple[str, ...] = (), **changes) -> Contest:
        entries = entries_of(0.1, (0.3,), policies or ("watermark", f"{own}:Own"))
        options = None if simulations is None else oracle_options(entries, 4.0, simulations)
        return Contest(task, entries, 2, options=options, **changes)

    return make


def compare(contest: Contest, out: Path, jobs: int = 1) -> Ranking | None:
    return compare_policies(contest, out, lambda *_: None, lambda _: None, jobs)


@pytest.fixture(scope="module")
def done(make_contest, tmp_path_factory) -> tuple[Contest, Ranking, Path]:
    out = tmp_path_factory.mktemp("contest")
    contest = make_contest()
    ranking = compare(contest, out)
    assert ranking is not None
    return contest, ranking, out


def test_everybody_ran_with_every_seed(done):
    contest, ranking, _ = done
    names = {"static 0.1", "static 0.3", "watermark", "Own", ORACLE}
    assert {s.name for s in ranking.standings} == names
    assert set(contest.results) == {(name, seed) for name in names for seed in (0, 1)}
    assert not contest.is_partial


def test_each_ran_what_it_is_named_after(done):
    contest, _, _ = done
    sizes = {name: contest.of(name)[0].timeline["hot_tokens"] for name in ("static 0.3", "Own")}
    assert set(sizes["static 0.3"]) == {24_000}
    assert (sizes["Own"][0], sizes["Own"][-1]) == (8_000, 40_000)


def test_seeds_are_the_same_load_for_all_and_differ(done):
    contest, _, _ = done
    for seed in (0, 1):
        loads = {
            (result.summary.prompt_tokens, result.summary.offered_s)
            for (_, number), result in contest.results.items()
            if number == seed
        }
        assert len(loads) == 1
    first, second = contest.of("static 0.1")
    assert first.summary.offered_s != second.summary.offered_s


def test_oracle_is_above_all_in_every_seed(done):
    contest, ranking, _ = done
    for seed in (0, 1):
        latency = {
            name: result.summary.e2e_s.mean
            for (name, number), result in contest.results.items()
            if number == seed
        }
        assert latency[ORACLE] == min(latency.values())
        # The run that is drawn is the run that was found.
        assert 1 / latency[ORACLE] == pytest.approx(contest.oracles[seed].best.score, rel=1e-12)
    assert ranking.oracle.over_static.mean > 1.0


def test_run_records_are_of_the_nominal_seed(done):
    _, _, out = done
    folders = {path.parent.name: path for path in (out / "runs").glob("*/*")}
    assert set(folders) == {"static-0.1", "static-0.3", "watermark", "Own", ORACLE}
    for name, folder in folders.items():
        run = read_run(folder)
        assert run.header.seed == 0
        assert run.requests.collect().height == 250
        assert run.header.flags["repartition"].endswith(name.rpartition("-")[0] or name)


def test_policies_json_has_question_answer_and_runs(done):
    contest, ranking, out = done
    body = json.loads((out / "policies.json").read_text())
    assert body["format"] == "granikv-policies-1"
    assert (body["seeds"], body["is_partial"]) == (2, False)
    assert [entry["name"] for entry in body["entries"]] == [e.name for e in contest.entries]
    assert body["ranking"]["answer"] == ranking.answer
    assert body["ranking"]["standings"][0]["name"] == ORACLE
    assert [oracle["seed"] for oracle in body["oracles"]] == [0, 1]
    assert len(body["runs"]) == 10
    run = next(run for run in body["runs"] if run["name"] == "Own")
    assert set(run["timeline"]["hot_tokens"]) == {8_000, 40_000}


@pytest.mark.parametrize("jobs", [1, 2])
def test_same_seeds_give_the_same_file(done, make_contest, tmp_path, jobs):
    compare(make_contest(), tmp_path, jobs)
    assert (tmp_path / "policies.json").read_bytes() == (done[2] / "policies.json").read_bytes()


def test_without_an_oracle_nothing_is_searched(make_contest, tmp_path):
    contest = make_contest(simulations=None)
    ranking = compare(contest, tmp_path)
    assert (ranking.oracle, contest.oracles) == (None, {})
    assert not (tmp_path / "runs/oracle").exists()


def test_a_chosen_objective_is_what_the_oracle_is_searched_for(make_contest, done, tmp_path):
    contest = make_contest(simulations=4, objective="throughput")
    ranking = compare(contest, tmp_path)
    assert ranking.objective == "throughput"
    rates = [result.summary.throughput_tokens_per_s for result in contest.of(ORACLE)]
    assert rates == pytest.approx([contest.oracles[seed].best.score for seed in (0, 1)])


# ---------------------------------------------------------------------- bad ends


def test_a_policy_that_fails_ends_it_at_once_and_leaves_a_folder_that_can_be_used_again(
    make_contest, tmp_path
):
    broken = tmp_path / "broken.py"
    broken.write_text("class Broken:\n    def observe(self, window):\n        return 1 / 0\n")
    contest = make_contest(policies=("watermark", f"{broken}:Broken"))
    with pytest.raises(ConfigError, match=r"Broken of .*broken.py failed in line 3 \(ZeroDiv"):
        compare(contest, tmp_path / "out")
    body = json.loads((tmp_path / "out/policies.json").read_text())
    assert (body["is_partial"], body["ranking"]) == (True, None)
    # Policies run before fixed splits, so that little time is lost.
    assert [run["name"] for run in body["runs"]] == ["watermark"]


def test_an_interrupt_of_the_search_keeps_the_ranking(make_contest, tmp_path, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("granikv.planner.policies.run_oracle", stop)
    monkeypatch.setattr("granikv.planner.parallel.ignore_interrupts", lambda: None)
    contest = make_contest()
    ranking = compare(contest, tmp_path)
    assert contest.is_partial
    assert ranking.oracle is None
    body = json.loads((tmp_path / "policies.json").read_text())
    assert (body["is_partial"], len(body["runs"])) == (True, 8)
    assert body["ranking"]["best_static"] == ranking.best_static.name


def test_entry_names_make_folders(make_contest, tmp_path):
    """A name with slashes is one folder."""
    own = make_contest().entries[-1].repartition
    contest = make_contest(simulations=None)
    contest.entries = (Entry("static 0.1", "static", "static", 0.1), Entry(own, "policy", own, 0.1))
    contest.seeds = 1
    assert compare(contest, tmp_path) is not None
    assert len(list((tmp_path / "runs").iterdir())) == 2
