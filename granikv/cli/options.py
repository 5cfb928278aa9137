"""Options that commands have in common: of processes, and groups of a server, its service levels
and its replicas, with what they build.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from granikv.cli.checked import checked
from granikv.core.errors import ConfigError

# Models and simulation are imported where they are used: `granikv --help` must not wait for them.
if TYPE_CHECKING:
    from granikv.cost_models.hardware import Hardware
    from granikv.cost_models.models import ModelShape
    from granikv.cost_models.params import GpuParams
    from granikv.sim.config import ServerConfig
    from granikv.sim.metrics import Slo

_SERVER = "Server"

JobsOption = Annotated[int | None, typer.Option(min=1, help="Processes; all cores by default.")]


@dataclass(frozen=True, slots=True)
class SloGroup:
    """What a request must meet to count as goodput."""

    slo_ttft_ms: Annotated[
        float | None, typer.Option(help="Longest time to first token.", rich_help_panel=_SERVER)
    ] = None
    slo_tpot_ms: Annotated[
        float | None,
        typer.Option(help="Longest mean time per output token.", rich_help_panel=_SERVER),
    ] = None

    def slo(self) -> "Slo":
        """The metrics' own form.

        Raises:
            ConfigError: a limit is not positive.
        """
        from granikv.sim.metrics import Slo

        for flag, value in (
            ("--slo-ttft-ms", self.slo_ttft_ms),
            ("--slo-tpot-ms", self.slo_tpot_ms),
        ):
            if value is not None and not value > 0:
                raise ConfigError(f"{flag} must be positive, got {value:g}.")
        return Slo(
            *(None if ms is None else ms / 1e3 for ms in (self.slo_ttft_ms, self.slo_tpot_ms))
        )


@dataclass(frozen=True, slots=True)
class ServerGroup:
    """The server to simulate; what is not given is what SGLang 0.5.17 would choose."""

    model: Annotated[
        str,
        typer.Option(
            help="Model: a shipped name, a YAML file, or a Hugging Face config.json.",
            rich_help_panel=_SERVER,
        ),
    ]
    gpu: Annotated[
        str, typer.Option(help="GPU: a shipped name or a YAML file.", rich_help_panel=_SERVER)
    ]
    tp: Annotated[int, typer.Option(help="Tensor-parallel degree.", rich_help_panel=_SERVER)] = 1
    params: Annotated[
        str | None,
        typer.Option(
            help="Cost-model parameter file; the GPU's own by default.", rich_help_panel=_SERVER
        ),
    ] = None
    size_tokens: Annotated[
        int | None,
        typer.Option(
            help="KV capacity from a server's log (max_total_num_tokens); computed when not given.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    mem_fraction_static: Annotated[
        float | None,
        typer.Option(help="Share of GPU memory for weights and KV.", rich_help_panel=_SERVER),
    ] = None
    max_running_requests: Annotated[
        int | None, typer.Option(help="Most requests in the batch.", rich_help_panel=_SERVER)
    ] = None
    chunked_prefill_size: Annotated[
        int | None,
        typer.Option(help="Most new tokens of one extend step.", rich_help_panel=_SERVER),
    ] = None
    schedule_policy: Annotated[
        str, typer.Option(help="Order of the waiting queue: fcfs or lpm.", rich_help_panel=_SERVER)
    ] = "fcfs"
    admission: Annotated[
        str,
        typer.Option(
            help="Which prefixes get a HOT slab: value, shared or paper.", rich_help_panel=_SERVER
        ),
    ] = "value"
    dispatch: Annotated[
        str,
        typer.Option(
            help="Kernel choice: cost, threshold, paged, cascade or dense.", rich_help_panel=_SERVER
        ),
    ] = "cost"
    row_split: Annotated[
        str,
        typer.Option(
            help="Tensor-parallel steps as a burst and a follow-on: auto (when predicted to be"
            " faster), off or always (to see what it costs).",
            rich_help_panel=_SERVER,
        ),
    ] = "auto"
    repartition: Annotated[
        str,
        typer.Option(
            help="Policy that moves the HOT/COLD boundary: static, watermark, marginal, or your own"
            " as path/to/file.py:Name.",
            rich_help_panel=_SERVER,
        ),
    ] = "static"
    router: Annotated[
        str,
        typer.Option(
            help="Where requests go: round_robin, least_loaded or prefix_affinity.",
            rich_help_panel=_SERVER,
        ),
    ] = "round_robin"

    def build(self, **settings: Any) -> "BuiltServer":
        """Load the model, the GPU and its cost model, and fill in the server's defaults.

        `settings` are further fields of `ServerConfig`.

        Raises:
            ConfigError: a name is not known, a value is out of range, or the model does not fit.
        """
        from granikv.core.admission import make_admission
        from granikv.core.policies import make_policy
        from granikv.cost_models.hardware import load_hardware
        from granikv.cost_models.memory import server_defaults
        from granikv.cost_models.models import load_model
        from granikv.cost_models.params import load_params
        from granikv.sim.config import ServerConfig
        from granikv.sim.router import make_router

        model, hardware = load_model(self.model), load_hardware(self.gpu)
        params = load_params(self.params or hardware.name)
        size_tokens, capacity = self._capacity(model, hardware)
        defaults = server_defaults(hardware, self.tp)
        # Names are looked up here, so that a misspelt one ends the command before any work.
        make_admission(self.admission)
        make_policy(self.repartition)
        make_router(self.router)
        server = checked(
            ServerConfig,
            size_tokens=size_tokens,
            max_running_requests=_or(self.max_running_requests, _running(size_tokens, model)),
            chunked_prefill_size=_or(self.chunked_prefill_size, defaults.chunked_prefill_tokens),
            graph_batch_sizes=defaults.graph_rows,
            schedule_policy=self.schedule_policy,
            admission=self.admission,
            dispatch=self.dispatch,
            row_split=self.row_split,
            repartition=self.repartition,
            **settings,
        )
        return BuiltServer(model, hardware, params, self.tp, server, self.router, capacity)

    def _capacity(self, model: "ModelShape", hardware: "Hardware") -> tuple[int, str]:
        """KV tokens, and in words where the number comes from."""
        from granikv.cost_models.memory import kv_capacity_tokens

        if self.size_tokens is not None:
            if self.size_tokens < 2:
                raise ConfigError(f"--size-tokens must be at least 2, got {self.size_tokens}.")
            model.kv_heads_per_rank(self.tp)
            return self.size_tokens, f"{self.size_tokens:,} tokens, given with --size-tokens"
        if self.mem_fraction_static is not None and not 0 < self.mem_fraction_static <= 1:
            raise ConfigError(
                f"--mem-fraction-static must be in (0, 1], got {self.mem_fraction_static:g}."
            )
        found = kv_capacity_tokens(model, hardware, self.tp, self.mem_fraction_static)
        note = (
            f"{found.size_tokens:,} tokens, by SGLang's memory rule at mem_fraction_static "
            f"{found.mem_fraction_static:g} (give --size-tokens where a server's log is at hand)"
        )
        return found.size_tokens, note


@dataclass(frozen=True, slots=True)
class BuiltServer:
    """What `ServerGroup` stands for; `capacity` says in words where the KV capacity comes from."""

    model: "ModelShape"
    hardware: "Hardware"
    params: "GpuParams"
    tp: int
    server: "ServerConfig"
    router: str
    capacity: str


def parse_replicas(text: str) -> int | None:
    """A positive number, or None for `auto`.

    Raises:
        ConfigError: neither.
    """
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--replicas must be auto or a positive number, got {text}.")
    return int(text)


def _running(size_tokens: int, model: "ModelShape") -> int:
    """Source: SGLang 0.5.17, kv_cache_configurator, the default of max_running_requests."""
    return min(max(int(size_tokens / model.context_len * 512), 2048), 4096)


def _or(given: int | None, default: int) -> int:
    return default if given is None else given
