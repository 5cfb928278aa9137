"""What a live run's flags say about its server: graphs of prefill, pools, settings in words."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from granikv.cost_models.memory import prefill_graph_tokens
from granikv.traces.records import REQUEST_SCHEMA, STEP_SCHEMA, RunHeader
from granikv.validate.compare.live_run import LiveRun, server_config, settings_of, words_of


def _run(**flags: Any) -> LiveRun:
    header = RunHeader(
        kind="live", model="llama-3.1-8b", gpu="NVIDIA H200", size_tokens=60_000, hot_tokens=0,
        clock_origin="x", trace="made", flags=flags,
    )  # fmt: skip
    empty = (pl.DataFrame(schema=schema) for schema in (REQUEST_SCHEMA, STEP_SCHEMA))
    return LiveRun(Path("run"), header, *empty, None, ())


@pytest.mark.parametrize(
    ("flags", "has_graphs"),
    [
        ({}, False),  # as `granikv bench serve` starts its servers
        ({"disable_prefill_cuda_graph": False}, True),
        ({"engine": {"disable_prefill_cuda_graph": False}}, True),
        ({"engine": {"disable_prefill_cuda_graph": True}}, False),
        # What the server resolved goes before what it was given.
        (
            {
                "engine": {"disable_prefill_cuda_graph": True},
                "scheduler": {"disable_prefill_cuda_graph": False},
            },
            True,
        ),
        ({"disable_prefill_cuda_graph": False, "disable_cuda_graph": True}, False),
    ],
)
def test_graphs_of_prefill_follow_the_servers_flags(flags: dict, has_graphs: bool) -> None:
    assert _run(**flags).prefill_graph_tokens == (prefill_graph_tokens(8192) if has_graphs else ())
    assert server_config(flags, "granikv", 60_000).prefill_graphs is has_graphs


def test_no_graph_is_larger_than_a_chunk() -> None:
    run = _run(disable_prefill_cuda_graph=False, scheduler={"chunked_prefill_size": 512})
    assert run.prefill_graph_tokens[-1] == 512
    assert len(run.prefill_graph_tokens) == 8 + 14 + 8


def test_words_leave_out_what_every_live_server_has() -> None:
    assert words_of({"admission": "shared"}) == ""
    assert words_of({}) == ""
    told = {"hot_fraction": 0.1, "admission": "shared", "dispatch": "paged"}
    assert words_of(told) == "dispatch=paged, hot_fraction=0.1"
    assert told["admission"] == "shared"
    assert words_of({"admission": "paper"}) == "admission=paper"


def test_what_moves_the_boundary_comes_from_variables_too() -> None:
    variables = {
        "GRANIKV_REPARTITION": "marginal",
        "GRANIKV_POLICY_INTERVAL_S": "2.5",
        "GRANIKV_MOVE_TOKENS_PER_STEP": "1024",
        "GRANIKV_RECORD": "/somewhere",
    }
    chosen = settings_of({"variables": variables}, "granikv")
    assert chosen == {
        "admission": "shared",
        "repartition": "marginal",
        "policy_interval_s": "2.5",
        "move_tokens_per_step": "1024",
    }
    config = server_config({"variables": variables}, "granikv", 60_000)
    assert (config.repartition, config.policy_interval_s) == ("marginal", 2.5)
    assert config.move_tokens_per_step == 1024
