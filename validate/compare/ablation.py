"""Ablation: which part of GraniKV a gain comes from, simulated, and live where results say so."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from granikv.core.config import PoolConfig
from granikv.core.errors import ConfigError
from granikv.cost_models.step import StepCost
from granikv.sim.config import ServerConfig
from granikv.validate.compare.live_run import settings_of
from granikv.validate.compare.steady_rung import simulated_step_s
from granikv.validate.serve_cells import SteadyCell, cells
from granikv.validate.servers import VARIANTS

# Each adds one thing to the one before it.
PARTS: Mapping[str, str] = {
    "stock": "stock engine, every row reads its own prefix",
    "granikv-global": "one cascade for what the whole batch shares, in COLD",
    "granikv-cold": "a cascade for each shared prefix, in COLD",
    "granikv-cascade": "the same in HOT slabs",
    "granikv": "full dispatch: cascade or dense, by cost",
}
# CUDA graphs of prefill change no decode step.
_ENGINES = ("{}", '{"disable_prefill_cuda_graph": false}')
CELLS = ("16384x256", "mixed-2k-16k-x256")


@dataclass(frozen=True, slots=True)
class AblationRow:
    """One server on one cell; rates in output tokens per second.

    Attributes:
        live: None where it was not measured.
    """

    cell: str
    server: str
    simulated: float
    live: float | None


def ablate(
    names: Sequence[str],
    server: ServerConfig,
    cost: StepCost,
    results: Iterable[Mapping[str, Any]] = (),
) -> list[AblationRow]:
    """Every server of `PARTS` on every steady cell.

    `server` says what all of them have (KV capacity, scheduler); results of other models count
    nothing.

    Raises:
        ConfigError: a cell is unknown, or has arrivals.
    """
    found = cells(names)
    if others := [cell.name for cell in found if not isinstance(cell, SteadyCell)]:
        raise ConfigError(f"{', '.join(others)}: only steady cells can be taken apart.")
    measured = [
        row for row in results if row["status"] == "complete" and row["model"] == cost.model.name
    ]
    return [
        AblationRow(
            cell.name, name, _simulated(cell, name, server, cost), _live(measured, cell.name, name)
        )
        for cell in found
        if isinstance(cell, SteadyCell)
        for name in PARTS
    ]


def _simulated(cell: SteadyCell, name: str, server: ServerConfig, cost: StepCost) -> float:
    system = "sglang" if name == "stock" else "granikv"
    # Built anew, not copied: variables are text, and the configuration knows what they mean.
    config = ServerConfig(**server.model_dump() | {"system": system} | _told(name))
    step_s = simulated_step_s(list(cell.shared), cell.own_tokens, cell.steps, config, cost)
    return cell.rows / step_s


def _live(results: Sequence[Mapping[str, Any]], cell: str, name: str) -> float | None:
    """Median rate of the servers of that name, and of those of ours that were told the same."""
    rates = [
        row["tokens_per_s"]
        for row in results
        if row["cell"] == cell and row.get("engine", "{}") in _ENGINES and _is_like(row, name)
    ]
    return median(rates) if rates else None


def _told(name: str) -> dict[str, Any]:
    return settings_of({"variables": dict(VARIANTS[name].variables)}, name)


def _is_like(row: Mapping[str, Any], name: str) -> bool:
    if "stock" in (row["variant"], name) or row["variant"] not in PARTS:
        return bool(row["variant"] == name)
    return PoolConfig(**settings_of(row, row["variant"])) == PoolConfig(**_told(name))
