"""LiveRun: run records of a live server with all that a simulation of the same run needs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from granikv.core.errors import ConfigError, TraceFormatError
from granikv.cost_models.hardware import hardware_name
from granikv.cost_models.memory import prefill_graph_tokens
from granikv.sim.config import ServerConfig
from granikv.traces.records import RunHeader, read_run
from granikv.traces.request import Request, Run
from granikv.traces.source import open_trace
from granikv.validate.servers import COMMON

_TRACE = "trace.jsonl"
_CHUNK = 8192  # tokens of a prefill step where nothing is said: SGLang's default on a large GPU
_PREFIX = "GRANIKV_"
_POOL_FIELDS = ("hot_fraction", "admission", "dispatch")
_POOL_FIELDS += ("repartition", "policy_interval_s", "move_tokens_per_step")
_LIVE_ADMISSION = "shared"  # what a server of ours has where nothing else is said
_SIMULATED = ("stock", "granikv", "granikv-global", "granikv-cold", "granikv-cascade")


@dataclass(frozen=True, slots=True)
class LiveRun:
    """Run records of a live server.

    Attributes:
        trace: the requests as runs of segments, None where the folder holds none.
        cached: prompts that were answered before the run's clock began.
    """

    folder: Path
    header: RunHeader
    requests: pl.DataFrame
    steps: pl.DataFrame
    trace: list[Request] | None
    cached: tuple[tuple[Run, ...], ...]

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def variant(self) -> str:
        """Which server it was."""
        return str(self.header.flags.get("variant", "granikv"))

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""
        return self.header.tp

    @property
    def is_stock(self) -> bool:
        """Whether it was SGLang without GraniKV."""
        return self.variant.startswith("stock")

    @property
    def gpu(self) -> str:
        """Name of the hardware file."""
        return hardware_name(self.header.gpu)

    @property
    def settings(self) -> dict[str, Any]:
        """Hot fraction, admission and dispatch of a server of ours; nothing of others."""
        return settings_of(self.header.flags, self.variant)

    @property
    def knows_hot(self) -> bool:
        """Whether every request that finished says what it read from HOT."""
        return int(str(self.header.flags.get("hot_tokens_known", 0))) > 0

    @property
    def prefill_graph_tokens(self) -> tuple[int, ...]:
        """Sizes of extend steps that a CUDA graph runs."""
        told = _told(self.header.flags)
        if not _has_prefill_graphs(told):
            return ()
        return prefill_graph_tokens(int(told.get("chunked_prefill_size") or _CHUNK))

    @property
    def identity(self) -> tuple[str, ...]:
        """What repeats of one measurement have in common."""
        chosen = json.dumps([self.header.flags.get("engine"), self.settings], sort_keys=True)
        return self.header.model, self.gpu, self.header.trace, self.variant, chosen


def read_live(folder: Path) -> LiveRun:
    """Read a folder of run records, with its trace if there is one.

    Raises:
        TraceFormatError: it holds no run, or a file of it cannot be read.
        ConfigError: the run is a simulated one, or of a GPU without parameters.
    """
    run = read_run(folder)
    if run.header.kind != "live":
        raise ConfigError(f"{folder} is a {run.header.kind} run; name runs of a live server.")
    hardware_name(run.header.gpu)
    path = folder / _TRACE
    prompts = run.header.flags.get("cached_prompts") or []
    if not isinstance(prompts, list):
        raise TraceFormatError(f"{folder}: cached_prompts is no list; record the run again.")
    return LiveRun(
        folder,
        run.header,
        run.requests.collect().sort("id"),
        run.steps.collect().sort("start_s"),
        list(open_trace(path)) if path.exists() else None,
        tuple(tuple(Run(*part) for part in prompt) for prompt in prompts),
    )


def tp_of(flags: Mapping[str, Any]) -> int:
    """Tensor-parallel degree, from a recorder's flags or a driver's."""
    engine = flags.get("engine") or {}
    return int(engine.get("tp_size") or flags.get("tp_size") or 1)


def settings_of(flags: Mapping[str, Any], variant: str) -> dict[str, Any]:
    """What a server of ours was told about its pools."""
    if variant.startswith("stock"):
        return {}
    told = {**flags, **(flags.get("variables") or {})}
    chosen: dict[str, Any] = {"admission": _LIVE_ADMISSION}
    for field in _POOL_FIELDS:
        if (value := told.get(_PREFIX + field.upper())) is not None:
            chosen[field] = value
    swept = flags.get("settings") or {}
    return chosen | (json.loads(swept) if isinstance(swept, str) else dict(swept))


def words_of(settings: Mapping[str, Any]) -> str:
    """Settings for people, without what every live server has where nothing else is said."""
    told = {**settings}
    if told.get("admission") == _LIVE_ADMISSION:
        del told["admission"]
    return ", ".join(f"{name}={value}" for name, value in sorted(told.items()))


def server_config(
    flags: Mapping[str, Any], variant: str, size_tokens: int, *, exact: bool = False
) -> ServerConfig:
    """The simulated server that stands for a live one.

    The KV capacity is the live server's own; scheduler settings that the flags do not say are
    SGLang's defaults on a large GPU, which are the simulator's.

    Raises:
        ConfigError: the simulator has no such server.
    """
    if variant not in _SIMULATED:
        raise ConfigError(
            f"There is no simulation of a {variant} server, only of {', '.join(_SIMULATED)}."
        )
    told = _told(flags)
    if told.get("disable_radix_cache") or int(told.get("page_size") or 1) > 1:
        raise ConfigError(
            "There is no simulation of a server without prefix cache or with pages of several "
            "tokens; leave that run out."
        )
    fields = ("chunked_prefill_size", "max_prefill_tokens", "max_running_requests")
    fields += ("schedule_policy", "schedule_conservativeness")
    scheduler = {name: told[name] for name in fields if told.get(name) is not None}
    if graphs := told.get("decode_graph_rows"):
        scheduler["graph_batch_sizes"] = tuple(graphs)
    return ServerConfig(
        system="sglang" if variant == "stock" else "granikv",
        size_tokens=size_tokens,
        prefill_graphs=_has_prefill_graphs(told),
        overlap_schedule=not told.get("disable_overlap_schedule", False),
        row_split="off",
        exact=exact,
        **scheduler,
        **settings_of(flags, variant),
    )


def _told(flags: Mapping[str, Any]) -> dict[str, Any]:
    """What the server resolved goes before what it was given."""
    return {**flags, **(flags.get("engine") or {}), **(flags.get("scheduler") or {})}


def _has_prefill_graphs(told: Mapping[str, Any]) -> bool:
    """What is not said is as `granikv bench serve` starts its servers; without any graph there are
    none of prefill.
    """
    flag = "disable_prefill_cuda_graph"
    return not (told.get("disable_cuda_graph") or told.get(flag, COMMON[flag]))
