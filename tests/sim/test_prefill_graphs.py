"""Prefills by CUDA graphs: the sizes of a server's own chunk, and the simulated time of a step."""

import pytest
from sim_support import real_cost, run

from granikv.sim.config import ServerConfig
from granikv.traces.request import Request, Run

CONFIG = ServerConfig(size_tokens=60_000, chunked_prefill_size=2048)


@pytest.mark.parametrize(("tokens", "padded"), [(1, 4), (300, 320), (2048, 2048), (2049, 0)])
def test_a_step_is_padded_to_the_next_graph(tokens: int, padded: int) -> None:
    assert CONFIG.padded_tokens(tokens) == padded


def test_a_server_without_graphs_pads_nothing() -> None:
    assert ServerConfig(size_tokens=60_000).prefill_graphs
    assert CONFIG.model_copy(update={"prefill_graphs": False}).padded_tokens(300) == 0


@pytest.mark.parametrize("has_graphs", [True, False])
def test_a_simulated_prefill_takes_the_time_of_its_graph(has_graphs: bool) -> None:
    config = CONFIG.model_copy(update={"prefill_graphs": has_graphs, "overlap_schedule": False})
    done = run([Request(0, 0.0, (Run(1, 300),), 2)], config, real_cost())
    (step,) = done.steps.filter(kind="extend").iter_rows(named=True)
    cost_ns = real_cost().extend([300], [0], 320 if has_graphs else 0).total_ns
    assert step["gpu_us"] == pytest.approx(cost_ns / 1e3)
    assert done.requests["first_token_s"][0] == pytest.approx(cost_ns / 1e9)
