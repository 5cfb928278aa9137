"""Paper runs: simulate cells, on all cores, and keep the few numbers that the claims ask for."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import joblib
import polars as pl

from granikv.cost_models.hardware import load_hardware
from granikv.cost_models.memory import Capacity, kv_capacity_tokens, server_defaults
from granikv.cost_models.models import load_model
from granikv.cost_models.params import GpuParams, load_params
from granikv.cost_models.step import StepCost
from granikv.sim.config import ServerConfig
from granikv.sim.metrics import summarise
from granikv.sim.run import MemorySink, simulate
from granikv.traces.generate import generate
from granikv.validate.paper.outcomes import Outcome
from granikv.validate.paper.settings import GPU, HOT_FRACTION, Cell, Launches, Served

_SEED = 0
# The steady part of a saturated run, by share of the requests that have finished.
_STEADY = (0.2, 0.8)
# A fused launch that takes this long is never the faster one.
_NO_FUSED_NS = 1e12


@cache
def step_cost(served: Served, launches: Launches = "auto") -> StepCost:
    """The shipped cost model of the paper's GPU."""
    params = load_params(GPU)
    if launches == "two":
        params = _without_fused(params)
    return StepCost(params, load_model(served.model), load_hardware(GPU), served.tp)


def capacity(served: Served) -> Capacity:
    """KV tokens by SGLang's memory rule: the paper's own capacity is not known."""
    return kv_capacity_tokens(load_model(served.model), load_hardware(GPU), served.tp)


def run_cell(cell: Cell) -> Outcome:
    """Simulate one cell.

    Raises:
        ValueError: the cell was to be past saturation and was not.
    """
    cost, sink = step_cost(cell.served, cell.launches), MemorySink()
    outcome = simulate(generate(cell.workload(), _SEED), server(cell), cost, sink)
    requests, steps = sink.frames()
    summary = summarise(requests, steps)
    begin_s, end_s = steady_window(requests) if cell.is_saturated else (0.0, outcome.end_s)
    dense, all_steps = _dense_steps(steps, begin_s, end_s)
    return Outcome(
        tokens_per_s=_tokens(requests, begin_s, end_s) / (end_s - begin_s)
        if cell.is_saturated
        else summary.throughput_tokens_per_s,
        tpot_p50_s=summary.tpot_s.p50,
        ttft_p50_s=summary.ttft_s.p50,
        mean_rows=summary.mean_rows,
        dense_share=dense / all_steps,
        dense_per_s=dense / (end_s - begin_s),
    )


def run_cells(
    cells: Sequence[Cell], on_progress: Callable[[int, int], None], jobs: int | None = None
) -> dict[Cell, Outcome]:
    """Simulate all cells, `jobs` at a time (all cores by default)."""
    outcomes: dict[Cell, Outcome] = {}
    for done, (cell, outcome) in enumerate(_stream(cells, jobs), 1):
        outcomes[cell] = outcome
        on_progress(done, len(cells))
    return outcomes


def server(cell: Cell) -> ServerConfig:
    """The cell's server: the paper's choices, and SGLang's defaults for this GPU."""
    defaults = server_defaults(load_hardware(GPU), cell.served.tp)
    return ServerConfig(
        system=cell.system,
        size_tokens=capacity(cell.served).size_tokens,
        hot_fraction=HOT_FRACTION,
        admission="paper",
        dispatch=cell.dispatch,
        max_running_requests=cell.max_rows,
        chunked_prefill_size=defaults.chunked_prefill_tokens,
        graph_batch_sizes=defaults.graph_rows,
    )


def steady_window(requests: pl.DataFrame) -> tuple[float, float]:
    """Begin and end in seconds of the part of a run in which requests waited all the time.

    Raises:
        ValueError: none waited at one of its ends.
    """
    finish = requests["finish_s"].drop_nulls().sort()
    begin_s, end_s = (float(finish[int(share * len(finish))]) for share in _STEADY)
    for now_s in (begin_s, end_s):
        waiting = (pl.col("arrival_s") <= now_s) & (pl.col("first_token_s") > now_s)
        if requests.filter(waiting).is_empty():
            raise ValueError(f"requests must wait all the time, but none waited at {now_s:.1f} s")
    return begin_s, end_s


def _tokens(requests: pl.DataFrame, begin_s: float, end_s: float) -> int:
    """Output tokens of the requests that finished in a window."""
    within = (pl.col("finish_s") > begin_s) & (pl.col("finish_s") <= end_s)
    return int(requests.filter(within)["output_tokens"].sum())


def _dense_steps(steps: pl.DataFrame, begin_s: float, end_s: float) -> tuple[int, int]:
    """Decode steps with a dense pass, and all, of the records that begin in a window."""
    plan = pl.Struct({"modes": pl.List(pl.Int64())})
    decode = steps.filter(
        (pl.col("kind") == "decode") & pl.col("start_s").is_between(begin_s, end_s)
    )
    modes = pl.col("plan_json").str.json_decode(plan).struct.field("modes")
    dense = decode.filter(modes.list.contains(2))
    return int(dense["steps"].sum()), int(decode["steps"].sum())


def _without_fused(params: GpuParams) -> GpuParams:
    fused = params.terms.fused_latency_ns.model_copy(update={"value": _NO_FUSED_NS})
    return params.model_copy(
        update={"terms": params.terms.model_copy(update={"fused_latency_ns": fused})}
    )


def _with_cell(cell: Cell) -> tuple[Cell, Outcome]:
    return cell, run_cell(cell)


def _stream(cells: Sequence[Cell], jobs: int | None) -> Iterator[tuple[Cell, Outcome]]:
    workers = jobs or len(os.sched_getaffinity(0))
    if workers == 1 or len(cells) < 2:
        yield from map(_with_cell, cells)
        return
    parallel = joblib.Parallel(n_jobs=workers, return_as="generator_unordered", batch_size=1)
    # Workers inherit a blocked Ctrl-C: this process alone answers it, and ends them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        results = parallel(joblib.delayed(_with_cell)(cell) for cell in cells)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    yield from results
