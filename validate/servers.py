"""servers: the variants of a server that are compared, and an engine of each in this process."""

import gc
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from granikv.core.errors import ConfigError
from granikv.validate.clients import EngineClient
from granikv.validate.driven_cells import LARGEST_BATCH

_OURS_PREFIX = "GRANIKV_"
_RECORD = "GRANIKV_RECORD"
_OBSERVE = "GRANIKV_OBSERVE"  # the same for a stock server
_PLUGINS = "SGLANG_PLUGINS"  # SGLang's list of the plugins that it may load
_FREE_S = 60.0
_FREE_MIB = 1024  # what a GPU may still hold of a server that is gone

# What every variant has; `stream_interval` is left alone, requests carry their own.
COMMON: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.85,
    "cuda_graph_max_bs_decode": LARGEST_BATCH,
    "max_running_requests": LARGEST_BATCH,
    "disable_prefill_cuda_graph": True,
    "decode_log_interval": 40,
}
_SCHEDULER = (
    "chunked_prefill_size",
    "max_prefill_tokens",
    "schedule_policy",
    "schedule_conservativeness",
    "tp_size",
    "page_size",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "attention_backend",
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A server: what its engine is given beside `COMMON`, and its environment variables."""

    name: str
    arguments: Mapping[str, Any]
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        """Whether GraniKV serves."""
        return "radix_cache_backend" in self.arguments

    def given(self, arguments: Mapping[str, Any]) -> "Variant":
        """With more arguments of its engine."""
        return replace(self, arguments={**self.arguments, **arguments})


@dataclass(frozen=True, slots=True)
class Server:
    """A running server.

    Attributes:
        client: sends to it, inside `run`.
        run: runs a coroutine in the loop that the client needs.
        facts: columns of every result: sizes, flags, start time.
    """

    client: Any
    run: Any
    facts: Mapping[str, Any]


_OURS = {"attention_backend": "granikv", "radix_cache_backend": "granikv"}
# SGLang checks at every step that no slot is lost, and ends a server that has lost one.
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
NO_HOT = {"GRANIKV_HOT_FRACTION": "0.00001"}  # room for no prefix worth a slab
_VARIANTS = (
    Variant("stock", {"attention_backend": "fa3"}),
    Variant("granikv", _OURS),
    Variant("granikv-fa3", _OURS, {"GRANIKV_KERNELS": "fa3"}),
    # Where the gain comes from: one common prefix in COLD, all of them, and all of them in HOT.
    Variant("granikv-global", _OURS, {"GRANIKV_DISPATCH": "cascade_global", **NO_HOT}),
    Variant("granikv-cold", _OURS, {"GRANIKV_DISPATCH": "cascade_cold", **NO_HOT}),
    Variant("granikv-cascade", _OURS, {"GRANIKV_DISPATCH": "cascade"}),
    Variant("stock-page64", {"attention_backend": "fa3", "page_size": 64}),
    Variant("stock-triton", {"attention_backend": "triton"}),
)
VARIANTS: Mapping[str, Variant] = {variant.name: variant for variant in _VARIANTS}


def variant_of(name: str) -> Variant:
    """A variant by name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in VARIANTS:
        raise ConfigError(f"There is no variant {name}; choose from {', '.join(VARIANTS)}.")
    return VARIANTS[name]


def variables_of(variant: Variant, record: Path | None) -> dict[str, str]:
    """Environment of a variant; a stock server loads our plugin only to be recorded by it."""
    folder = None if record is None else str(record.absolute())
    if variant.is_ours:
        return {**variant.variables, **({} if folder is None else {_RECORD: folder})}
    if folder is None:
        return {**variant.variables, _PLUGINS: "none"}
    return {**variant.variables, _PLUGINS: "granikv", _OBSERVE: folder}


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for a block; afterwards they are as they were."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def serving(variant: Variant, model: str, record: Path | None = None) -> Iterator[Server]:
    """An `sglang.Engine` of a variant while the block runs.

    A scheduler that dies takes this whole process with it (SGLang answers SIGQUIT so): run each
    variant in a process of its own.
    """
    variables = variables_of(variant, record)
    with environment(variables):
        import sglang  # type: ignore[import-not-found, unused-ignore]

        begin_s = time.perf_counter()
        arguments = COMMON | dict(variant.arguments)
        engine = sglang.Engine(model_path=model, **arguments)
        # Reports of 256 rows at 9.8 ms a step were once read half a second late, and the step seen
        # as 13.9 ms. A full collection over all that SGLang has imported is the likely cause.
        gc.collect()
        gc.freeze()
        try:
            info = engine.get_server_info()
            facts = {
                "flags": arguments,
                "variables": chosen_variables(),
                "versions": versions(),
                "size_tokens": info["max_total_num_tokens"],
                "scheduler": scheduler_settings(info),
                "startup_s": round(time.perf_counter() - begin_s, 1),
            }
            yield Server(EngineClient(engine), engine.loop.run_until_complete, facts)
        finally:
            gc.unfreeze()
            engine.shutdown()


def scheduler_settings(info: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a server of SGLang 0.5.17 has decided on, from its own description.

    Its scheduler's word counts, where there is one: it lowers some of what the engine was given.
    """
    states = info.get("internal_states") or [{}]
    resolved = {**info, **states[0]}
    decode_graphs = (resolved.get("cuda_graph_config") or {}).get("decode") or {}
    return {
        **{name: resolved.get(name) for name in _SCHEDULER},
        "max_running_requests": resolved.get(
            "effective_max_running_requests_per_dp", resolved.get("max_running_requests")
        ),
        "decode_graph_rows": decode_graphs.get("bs"),
        "version": info.get("version"),
    }


def chosen_variables() -> dict[str, str]:
    """GraniKV's variables of this process.

    Not folders for records: paths of this machine, which results have relative to themselves.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_OURS_PREFIX) and name not in (_RECORD, _OBSERVE)
    }


def in_new_process(call: Callable[..., Any], *arguments: Any) -> int:
    """Call in a process of its own, which a dying server may take along; its exit code."""
    process = multiprocessing.get_context("spawn").Process(target=call, args=arguments)
    process.start()
    process.join()
    return process.exitcode or 0


def versions() -> dict[str, str]:
    """Versions of the packages that matter, where they are installed."""
    found = {}
    for name in ("granikv", "sglang", "sglang-kernel", "torch", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def gpu_state() -> dict[str, Any]:
    """Name, clocks and used memory of the first GPU of this process.

    Empty where nvidia-smi does not answer.
    """
    fields = "name,clocks.sm,clocks.mem,memory.used,driver_version"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    # nvidia-smi looks at all GPUs of the host, whatever this process may use.
    if first := os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]:
        query.append(f"--id={first}")
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)
        name, sm_mhz, memory_mhz, used_mib, driver = done.stdout.splitlines()[0].split(", ")
        return {
            "gpu": name,
            "clocks": f"{sm_mhz} MHz, {memory_mhz} MHz",
            "used_mib": int(used_mib),
            "driver": driver,
        }
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return {}


def wait_until_free(before: Mapping[str, Any]) -> bool:
    """Wait until the GPU is about as empty as before a server started; False where it is not."""
    deadline_s = time.monotonic() + _FREE_S
    while (state := gpu_state()) and "used_mib" in before:
        if state["used_mib"] <= before["used_mib"] + _FREE_MIB:
            return True
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.5)
    return True
