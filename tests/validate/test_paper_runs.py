"""Paper runs and single steps: what is counted, and where the cost model must agree with itself."""

from dataclasses import replace

import polars as pl
import pytest

from granikv.core.dispatch import Dispatcher
from granikv.core.step import Launch, Mode, Segment, StepShape
from granikv.cost_models.dispatch_table import build_cost_table
from granikv.validate.paper import steps
from granikv.validate.paper.runs import (
    capacity,
    run_cell,
    run_cells,
    server,
    steady_window,
    step_cost,
)
from granikv.validate.paper.settings import (
    CONFIGURATIONS,
    CUT,
    LLAMA,
    MEANS,
    QWEN14,
    QWEN32,
    Cell,
    with_granikv,
)

SMALL = Cell(LLAMA, "sglang", (8192,), 8, MEANS, requests=60)


def one_by_one(count: int, queue: int) -> pl.DataFrame:
    """A server of one request at a time, 1 s each; request i arrives `queue` seconds early."""
    return pl.DataFrame(
        {
            "arrival_s": [float(max(0, i - queue)) for i in range(count)],
            "first_token_s": [i + 0.5 for i in range(count)],
            "finish_s": [i + 1.0 for i in range(count)],
        }
    )


def test_steady_window_leaves_ramp_and_drain_out():
    assert steady_window(one_by_one(50, queue=3)) == (11.0, 41.0)


def test_a_run_without_a_queue_has_no_steady_window():
    with pytest.raises(ValueError, match=r"none waited at 11\.0 s"):
        steady_window(one_by_one(50, queue=-1))


def test_a_cell_that_does_not_saturate_is_an_error():
    with pytest.raises(ValueError, match="must wait all the time"):
        run_cell(replace(SMALL, max_rows=2048, requests=20))


def test_all_cores_give_what_one_gives():
    cells = [*with_granikv(SMALL), replace(SMALL, prefixes=(512,), lengths=CUT)]
    seen: list[int] = []
    alone = run_cells(cells, lambda done, total: seen.append(total), jobs=1)
    together = run_cells(cells, lambda done, total: seen.append(total), jobs=2)
    assert alone == together
    assert seen == [3] * 6


def test_dense_steps_are_those_of_the_rule():
    """Qwen's group is 5: dense from 205 rows, which 240 queued requests reach and 160 cannot."""
    shares = {}
    for rows in (160, 240):
        cell = Cell(QWEN14, "granikv", (8192,), rows, MEANS, requests=1600)
        shares[rows] = run_cell(cell)
    assert shares[160].dense_share == shares[160].dense_per_s == 0
    assert shares[240].dense_share > 0.9
    assert shares[240].dense_per_s > 0


def test_light_load_and_bursts_count_the_whole_run():
    light = run_cell(replace(SMALL, rate_per_s=0.5))
    # 338 tokens on average at half a request a second.
    assert 0.7 < light.tokens_per_s / (0.5 * 338) < 1.3
    assert light.ttft_p50_s < 1
    burst = run_cell(Cell(LLAMA, "granikv", (512,), 8, None))
    assert burst.mean_rows > 7


@pytest.mark.parametrize("served", CONFIGURATIONS, ids=lambda served: served.model)
def test_servers_are_the_papers(served):
    made = server(replace(SMALL, served=served, system="granikv"))
    assert made.size_tokens == capacity(served).size_tokens
    assert made.hot_tokens == int(0.2 * made.size_tokens)
    assert (made.admission, made.dispatch, made.max_running_requests) == ("paper", "threshold", 8)
    # 64 prefixes of 8K exceed the KV budget, as the paper says.
    assert made.size_tokens < 64 * 8192


@pytest.mark.parametrize(("launches", "expected"), [("auto", "FUSED"), ("two", "TWO_CALL")])
def test_two_launches_never_fuse(launches, expected):
    cost = step_cost(LLAMA, launches)
    dispatcher = Dispatcher(build_cost_table(cost), "threshold")
    shape = StepShape(256, 256, 65536, 256, (Segment(1, 8192, 256),), *cost.heads[:3])
    assert dispatcher.plan(shape).launch is Launch[expected]


def test_fused_launch_is_all_that_differs():
    auto, two = (step_cost(LLAMA, launches).params.terms for launches in ("auto", "two"))
    changed = {name for name, item in auto.items() if dict(two.items())[name] != item}
    assert changed == {"fused_latency_ns"}


def test_crossover_is_where_the_order_turns():
    cost = step_cost(QWEN32)
    rows = steps.crossover_rows(cost, 512) // 5
    assert steps.dense_over_cascade(cost, 512, rows) < 1
    assert rows == 1 or steps.dense_over_cascade(cost, 512, rows - 1) >= 1


def test_no_crossover_is_an_error():
    with pytest.raises(ValueError, match="by 0 rows"):
        steps.crossover_rows(step_cost(LLAMA), 8192, most_rows=0)


def test_kernel_figures_agree_with_each_other():
    cost = step_cost(LLAMA)
    cascade, dense = (
        steps.prefix_pass_us(cost, mode, 8192, 256) for mode in (Mode.CASCADE, Mode.DENSE)
    )
    assert steps.cascade_over_dense(cost, 8192, 256) == pytest.approx(cascade / dense)
    # A layer's prefix pass is all that differs between the two steps.
    step_us = [1e3 * steps.step_ms(cost, m, 8192, 256) for m in (Mode.CASCADE, Mode.DENSE)]
    assert step_us[0] - step_us[1] == pytest.approx(cost.model.layers * (cascade - dense), rel=1e-6)
    # The parameters that were set from these very figures give them back.
    assert dense == pytest.approx(442, rel=0.01)
    assert cascade / dense == pytest.approx(3.66, rel=0.01)


def test_private_pages_cost_more_than_shared_ones():
    cost = step_cost(LLAMA)
    assert steps.private_reread(cost, 8192, 256) > 2 * steps.shared_reread(cost, 8192, 256)
