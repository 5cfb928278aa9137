"""The ladder: no error where simulated and "live" run are the same, the right one elsewhere."""

import json
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from live_support import PREFIX, SIZE_TOKENS, arrivals, cost, write_run

from granikv.core.errors import ConfigError
from granikv.validate.compare.decision_rung import Outcome, decide
from granikv.validate.compare.ladder import climb, figures, grown, to_json, window_of
from granikv.validate.compare.live_run import read_live, server_config, settings_of
from granikv.validate.compare.page import write_page
from granikv.validate.compare.request_rung import compare_requests
from granikv.validate.compare.saturation_rung import Load, saturations
from granikv.validate.compare.shared_reads import SharedReads
from granikv.validate.compare.step_rung import step_times

SETTINGS = (
    ("granikv", {}),
    ("granikv", {"hot_fraction": 0.1, "dispatch": "cascade"}),
    ("granikv", {"hot_fraction": 0.05, "admission": "paper", "dispatch": "threshold"}),
    ("granikv", {"hot_fraction": 0.02, "dispatch": "paged"}),  # no room in HOT
    ("stock", {}),
)


@pytest.mark.parametrize(("variant", "settings"), SETTINGS)
def test_a_run_of_the_simulator_itself_has_no_error(tmp_path: Path, variant: str, settings: dict):
    write_run(tmp_path / "run", variant, **settings)
    ladder = climb([tmp_path])
    (report,) = ladder.runs
    assert report.steps is not None
    assert report.requests is not None
    assert report.schedule is not None
    by_mode = {mode: error for (mode,), error in report.steps.errors("mode").items()}
    # Prefills in which a prefix is copied into HOT take longer than their batch says.
    assert by_mode.pop("extend").median < 1e-6
    assert max(error.worst for error in by_mode.values()) < 1e-6
    assert not report.steps.skipped
    # The schedule takes the time of similar steps, not of the very same ones.
    assert abs(report.schedule.requests.throughput_error) < 0.02
    assert report.schedule.live_prefill_tokens == report.schedule.simulated_prefill_tokens
    found = report.requests
    assert found.throughput_error == pytest.approx(0, abs=1e-9)
    assert (found.cached_points, found.same_cached) == (0, 1)
    assert found.live_hot == pytest.approx(found.simulated_hot)
    assert {(t.ks, t.paired.worst < 1e-9) for t in found.times.values()} == {(0, True)}


def test_a_server_that_is_a_tenth_slower_is_found_a_tenth_slower(tmp_path: Path):
    # All at once, so that stretching time changes no decision.
    requests = [replace(request, arrival_s=0.0) for request in arrivals()]
    (report,) = climb([write_run(tmp_path / "run", requests=requests, slower=1.1)]).runs
    assert report.steps is not None
    assert report.requests is not None
    assert report.schedule is not None
    (error,) = report.steps.errors().values()
    assert error.bias == pytest.approx(1 / 1.1 - 1, abs=1e-3)
    assert error.count == report.run.steps.height
    assert report.requests.throughput_error == pytest.approx(0.1, abs=1e-3)
    for time in report.requests.times.values():
        assert time.paired.bias == pytest.approx(1 / 1.1 - 1, abs=1e-3)
    # The scheduler is not to blame: with the run's own step times it is right.
    assert abs(report.schedule.requests.throughput_error) < 0.02


def test_a_cache_that_misses_is_seen_in_the_schedule(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    live = pl.read_parquet(folder / "requests.parquet")
    live.with_columns(cached_tokens=pl.lit(0, pl.Int64)).write_parquet(folder / "requests.parquet")
    (report,) = climb([folder]).runs
    assert report.schedule is not None
    assert report.schedule.requests.cached_points > 50
    assert report.schedule.requests.same_cached < 0.1


def test_what_a_stock_server_shares_follows_from_its_requests(tmp_path: Path):
    run = read_live(write_run(tmp_path / "run", "stock"))
    reads = SharedReads.of(run)
    compared = 0
    for step in run.steps.filter(pl.col("kind") == "decode").iter_rows(named=True):
        told = json.loads(step["segments_json"])
        if not told:
            continue
        ((_, length, rows),) = told
        blind = step | {
            "segments_json": "[]",
            "private_tokens": step["private_tokens"] + length * rows,
            "start_s": step["start_s"] + 1e-9,
        }
        segments, private = reads.at(blind)
        assert [s.length for s in segments] == [PREFIX.length]
        # One that has just ended decodes once more.
        assert abs(segments[0].rows - rows) <= 2
        assert private + segments[0].rows * PREFIX.length == blind["private_tokens"]
        compared += 1
    assert compared > 50


def test_extends_are_priced_where_their_parts_are_known(tmp_path: Path):
    run = read_live(write_run(tmp_path / "run"))
    row = run.steps.filter(pl.col("kind") == "extend").head(1)
    told = row.with_columns(plan_json=pl.lit('{"extend": [[300, 4096], [40, 0]]}'))
    found = step_times(replace(run, steps=told), cost())
    # 340 new tokens run as the graph of 352; a server without such graphs runs them as they are.
    want_us = cost().extend([300, 40], [4096, 0], 352).total_ns / 1e3
    assert found.table["mode"].to_list() == ["extend"]
    assert found.table["predicted_us"].to_list() == [pytest.approx(want_us)]
    flags = run.header.flags | {"engine": {"disable_prefill_cuda_graph": True}}
    eager = replace(run, steps=told, header=run.header.model_copy(update={"flags": flags}))
    want_us = cost().extend([300, 40], [4096, 0]).total_ns / 1e3
    assert step_times(eager, cost()).table["predicted_us"].to_list() == [pytest.approx(want_us)]
    unknown = row.with_columns(plan_json=pl.lit("{}"))
    assert sum(step_times(replace(run, steps=unknown), cost()).skipped.values()) == 1


def test_a_window_counts_only_what_finishes_in_it():
    frame = pl.DataFrame(
        {
            "id": range(6),
            "session": None,
            "arrival_s": [0.0] * 6,
            "sent_s": [0.0] * 6,
            "first_token_s": [1.0] * 6,
            "finish_s": [2.0, 3.0, 4.0, 5.0, 6.0, None],
            "prompt_tokens": 100,
            "cached_tokens": 50,
            "hot_tokens": 0,
            "output_tokens": [10, 20, 30, 40, 50, 7],
            "status": ["finished"] * 5 + ["unfinished"],
        }
    )
    found = compare_requests(frame, frame, (2, 2))
    assert found.live_tokens_per_s == pytest.approx((30 + 40) / (5.0 - 3.0))
    assert found.pairs == 5


def test_settings_come_from_variables_and_sweeps():
    flags = {"variables": {"GRANIKV_DISPATCH": "paged"}, "settings": '{"hot_fraction": 0.4}'}
    assert settings_of(flags, "granikv") == {
        "admission": "shared",
        "dispatch": "paged",
        "hot_fraction": 0.4,
    }
    assert settings_of(flags, "stock") == {}
    flags["scheduler"] = {"max_running_requests": 7, "chunked_prefill_size": 512}
    flags["engine"] = {"max_running_requests": 256}
    config = server_config(flags, "granikv", SIZE_TOKENS)
    assert (config.max_running_requests, config.chunked_prefill_size) == (7, 512)
    assert (config.dispatch, config.hot_tokens) == ("paged", int(0.4 * SIZE_TOKENS))
    with pytest.raises(ConfigError, match="no simulation of a stock-page64 server"):
        server_config(flags, "stock-page64", SIZE_TOKENS)


def test_the_best_choice_and_what_another_costs():
    def outcomes(workload: str, *rates: tuple[str, str, float, float]) -> list[Outcome]:
        return [Outcome(workload, server, setting, a, b) for server, setting, a, b in rates]

    found = decide(
        [
            *outcomes("one", ("stock", "stock", 50, 60), ("granikv", "0.1", 100, 90)),
            *outcomes("one", ("granikv", "0.2", 98, 95), ("granikv", "0.4", 70, 40)),
            *outcomes("even", ("granikv", "0.1", 100, 80), ("granikv", "0.2", 101, 79)),
            *outcomes("lonely", ("granikv", "0.1", 100, 100)),
        ]
    )
    server, settings, even = found
    assert (server.question, server.best, server.chosen, server.loss) == (
        "server",
        "granikv",
        "granikv",
        0,
    )
    assert (settings.question, settings.best, settings.chosen) == ("settings", "0.1", "0.2")
    assert settings.loss == pytest.approx(0.02)
    assert (settings.range, settings.simulated_range) == pytest.approx((100 / 70 - 1, 90 / 40 - 1))
    assert settings.points == pytest.approx(100 * (90 / 40 - 100 / 70))
    assert settings.counts
    assert not even.counts


def test_the_rate_at_which_a_queue_begins():
    def at(rate: float, live_s: float, simulated_s: float) -> Load:
        return Load("one", rate, live_s, simulated_s)

    # Live: 0.1 s at 4 and 10 s at 8, so 1 s half way. Simulated: 1 s at 7.
    found = saturations([at(8, 10.0, 10.0**0.5), at(4, 0.1, 0.1), at(6, 1.0, 0.1**0.5)])
    assert [one.workload for one in found] == ["one"]
    assert found[0].live_per_s == pytest.approx(6.0)
    assert found[0].simulated_per_s == pytest.approx(7.0)
    assert found[0].error == pytest.approx(1 / 6)
    (never,) = saturations([at(4, 0.1, 0.1), at(8, 0.2, 2.0)])
    assert (never.live_per_s, never.error) == (None, None)
    assert saturations([at(4, 0.1, 0.1)]) == []


def test_loads_at_several_rates_say_where_the_queue_begins(tmp_path: Path):
    for rate, name in ((10.0, 5), (300.0, 31)):
        folder = write_run(tmp_path / f"at{rate:g}", requests=arrivals(200, rate))
        header = json.loads((folder / "header.json").read_text())
        header["trace"] = f"poisson-4096@{name}"  # names of rates without a window
        (folder / "header.json").write_text(json.dumps(header))
    ladder = climb([tmp_path])
    (found,) = ladder.saturations
    assert found.live_per_s is not None
    assert found.error == pytest.approx(0.0, abs=1e-9)
    assert any(name.startswith("saturation ") for name in figures(ladder))


def test_servers_that_cannot_be_simulated_are_refused():
    for flag in ({"disable_radix_cache": True}, {"page_size": 64}):
        with pytest.raises(ConfigError, match="no simulation of a server without prefix cache"):
            server_config({"scheduler": flag}, "granikv", SIZE_TOKENS)
    graphs = server_config({"scheduler": {"decode_graph_rows": [1, 4]}}, "stock", SIZE_TOKENS)
    assert graphs.graph_batch_sizes == (1, 4)


def test_repeats_say_how_much_an_error_means(tmp_path: Path):
    requests = arrivals()
    write_run(tmp_path / "a", requests=requests)
    write_run(tmp_path / "b", requests=requests, slower=1.05)
    ladder = climb([tmp_path])
    (spreads,) = ladder.spreads.values()
    assert spreads["throughput"] == pytest.approx(0.05, abs=0.005)


def test_errors_that_grow_are_named():
    before = {"a": 0.02, "b": 0.02, "gone": 0.1}
    now = {"a": 0.0229, "b": 0.0231, "new": 0.5}
    assert grown(now, before) == {"b": (0.02, 0.0231)}


def test_report_and_page_hold_every_rung(tmp_path: Path):
    write_run(tmp_path / "runs" / "mine")
    ladder = climb([tmp_path / "runs"])
    json.dumps(to_json(ladder))
    names = figures(ladder)
    assert {name.split()[0] for name in names} == {"step", "schedule", "run"}
    write_page(ladder, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for title in ("Steps", "Requests", "Distributions", "Batches over time"):
        assert f"<h2>{title}</h2>" in page
    assert "mine" in page


def test_a_path_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="holds no run"):
        climb([tmp_path])


def test_a_simulated_run_is_refused(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    header = json.loads((folder / "header.json").read_text())
    (folder / "header.json").write_text(json.dumps(header | {"kind": "sim"}))
    with pytest.raises(ConfigError, match="is a sim run"):
        read_live(folder)


def test_the_window_of_a_known_cell(tmp_path: Path):
    run = read_live(write_run(tmp_path / "run"))
    assert window_of(run) is None
    header = run.header.model_copy(update={"trace": "poisson-8192"})
    assert window_of(replace(run, header=header)) == (64, 512)
    below = run.header.model_copy(update={"trace": "mixed@8"})
    assert window_of(replace(run, header=below)) is None
