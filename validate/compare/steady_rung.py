"""The steady rung: decode rates of the serving benchmark's batches, simulated beside measured."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import polars as pl

from granikv.cost_models.hardware import hardware_name
from granikv.cost_models.params import GpuParams
from granikv.sim.config import ServerConfig
from granikv.traces.request import Request, Run
from granikv.validate.compare.error_measures import spread
from granikv.validate.compare.live_run import server_config, tp_of
from granikv.validate.compare.replay import cost_of, simulated

_APART_S = 100.0
_TAIL_STEPS = 8


@dataclass(frozen=True, slots=True)
class SteadyComparison:
    """One batch on one server.

    Attributes:
        engine, settings: what its engine and its pools were told, as JSON.
        live, simulated: output tokens per second; live is the median of the repeats.
        spread: of the repeats, None for one.
    """

    model: str
    cell: str
    variant: str
    engine: str
    settings: str
    live: float
    simulated: float
    spread: float | None

    @property
    def error(self) -> float:
        """Signed relative error."""
        return self.simulated / self.live - 1


def compare_steady(
    results: Iterable[Mapping[str, Any]], params: GpuParams | None = None
) -> list[SteadyComparison]:
    """Simulate each steady cell of results of `granikv bench serve`, servers that can be.

    Raises:
        ConfigError: a model or GPU is not known.
    """
    found: dict[tuple[str, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in results:
        if row["status"] == "complete" and "own_tokens" in row:
            key = (row["model"], row["cell"], row["variant"])
            found[*key, row.get("engine", "{}"), row.get("settings", "{}")].append(row)
    return [_compare(key, rows, params) for key, rows in found.items() if _is_simulated(rows[0])]


def _is_simulated(row: Mapping[str, Any]) -> bool:
    """FA3's pair in our server, pages of 64 and other backends have no cost model."""
    return row["variant"] not in ("granikv-fa3", "stock-page64", "stock-triton")


def _compare(
    key: tuple[str, ...], rows: list[Mapping[str, Any]], params: GpuParams | None
) -> SteadyComparison:
    row = rows[0]
    # As run records have it.
    flags = {name: row.get(name) for name in ("variables", "settings", "scheduler")}
    flags["engine"] = row["flags"]
    config = server_config(flags, row["variant"], row["size_tokens"])
    cost = cost_of(row["model"], hardware_name(row["gpu"]), tp_of(flags), params)
    shared = [(int(length), int(count)) for length, count in row["shared"]]
    step_s = simulated_step_s(shared, row["own_tokens"], row["steps"], config, cost)
    rates = [float(one["tokens_per_s"]) for one in rows]
    return SteadyComparison(*key, median(rates), row["rows"] / step_s, spread(rates))


def simulated_step_s(
    shared: list[tuple[int, int]], own_tokens: int, steps: int, config: ServerConfig, cost: Any
) -> float:
    """Seconds of a decode step of the batch that `granikv.validate.measure` sends and times.

    Prefixes alone, all prompts twice, then all prompts for the long answer; `shared` is (prefix
    tokens, rows) of each prefix.
    """
    prompts = [
        (Run(place, length), Run(1000 + 1000 * place + row, own_tokens))
        if length
        else (Run(1000 + 1000 * place + row, own_tokens),)
        for place, (length, rows) in enumerate(shared)
        for row in range(rows)
    ]
    cached = [(Run(place, length),) for place, (length, _) in enumerate(shared) if length]
    interval = steps // 2
    trace = [
        Request(message * len(prompts) + number, message * _APART_S, prompt, tokens)
        for message, tokens in enumerate((1, interval + _TAIL_STEPS, 3 * interval + _TAIL_STEPS))
        for number, prompt in enumerate(prompts)
    ]
    done = simulated(trace, cached, config.model_copy(update={"exact": True}), cost)
    last = done.requests.filter(pl.col("id") >= 2 * len(prompts))
    begin_s = last["first_token_s"].max()
    decode = done.steps.filter(
        (pl.col("kind") == "decode")
        & (pl.col("start_s") >= begin_s - 1e-9)
        & (pl.col("rows") == len(prompts))
    )
    return float(decode["gpu_us"].sum() / decode["steps"].sum() / 1e6)
