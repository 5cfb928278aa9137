"""What runs, for the header of a recording."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sglang
import torch

from granikv import __version__
from granikv.sglang_plugin.config import LiveConfig

# What changes how fast a server is or what it schedules. By name: others are secrets.
_FLAGS = (
    "model_path", "attention_backend", "tp_size", "dp_size", "dtype", "quantization",
    "kv_cache_dtype", "page_size", "context_length", "mem_fraction_static", "chunked_prefill_size",
    "max_prefill_tokens", "schedule_policy", "schedule_conservativeness", "enable_mixed_chunk",
    "disable_overlap_schedule", "disable_cuda_graph",
    "disable_prefill_cuda_graph", "random_seed",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Fields of `granikv.traces.records.RunHeader`."""

    model: str
    gpu: str
    size_tokens: int
    hot_tokens: int
    versions: Mapping[str, str]
    flags: Mapping[str, Any]


def facts_of(scheduler: Any, hot_tokens: int, settings: LiveConfig) -> ServerFacts:
    """The facts of a scheduler that is about to serve."""
    args = scheduler.server_args
    flags = {name: getattr(args, name) for name in _FLAGS}
    flags["max_running_requests"] = scheduler.max_running_requests
    return ServerFacts(
        model=args.served_model_name or args.model_path,
        gpu=torch.cuda.get_device_name() if scheduler.device == "cuda" else "cpu",
        size_tokens=scheduler.tree_cache.token_to_kv_pool_allocator.size,
        hot_tokens=hot_tokens,
        versions={
            "granikv": __version__,
            "sglang": sglang.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        flags=flags | dict(settings.to_variables()),
    )
