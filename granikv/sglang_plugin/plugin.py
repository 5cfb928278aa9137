"""What SGLang's plugin loader calls: names our backends and hooks into the scheduler.

SGLang logs and swallows whatever a plugin raises while it loads, so nothing is decided here: the
server chooses GraniKV with `--attention-backend granikv --radix-cache-backend granikv`, and what is
built then raises for itself, also where a hook has not taken hold.
"""

from collections.abc import Callable
from typing import Any

import sglang
from sglang.srt.environ import envs
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, register_radix_cache_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import (
    add_attention_backend_choices,
    add_deterministic_attention_backend_choices,
    add_radix_supported_deterministic_attention_backend_choices,
)

from granikv.core.admission import make_admission
from granikv.core.errors import ConfigError
from granikv.sglang_plugin.admin import READS_CLOCK, set_internal_state
from granikv.sglang_plugin.allocator import HotColdTokenAllocator
from granikv.sglang_plugin.config import BACKEND, SGLANG_VERSION, VARIABLES, LiveConfig
from granikv.sglang_plugin.graphs import decode_runner_class
from granikv.sglang_plugin.hooks import Hook, check_in_place
from granikv.sglang_plugin.observer import Observer
from granikv.sglang_plugin.prefill import alloc_for_extend
from granikv.sglang_plugin.radix_cache import GraniRadixCache
from granikv.sglang_plugin.repartition import HOOKS as MOVES
from granikv.sglang_plugin.server import build_attention, check_server, plan_step
from granikv.sglang_plugin.stock_observer import StockObserver
from granikv.sglang_plugin.watch import SCHEDULER

_SIZED_LATE = envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING  # resizes a pool that is in use


def register() -> None:
    """Entry point `sglang.srt.plugins`; does nothing until a server asks for the backend.

    With `GRANIKV_OBSERVE` nothing is hooked but what records a stock server.

    Raises:
        ConfigError: another version of SGLang is installed.
    """
    if sglang.__version__ != SGLANG_VERSION:
        raise ConfigError(
            f"GraniKV serves with SGLang {SGLANG_VERSION}, found {sglang.__version__}; "
            f"pip install sglang=={SGLANG_VERSION}"
        )
    register_radix_cache_backend(BACKEND, build_tree)
    register_attention_backend(BACKEND)(build_attention)
    add_attention_backend_choices([BACKEND])
    add_deterministic_attention_backend_choices([BACKEND])
    add_radix_supported_deterministic_attention_backend_choices([BACKEND])
    # Names are known either way, so that asking for both ends in our sentence.
    for target, hook, kind in _STOCK_HOOKS if LiveConfig.is_observing() else _HOOKS:
        HookRegistry.register(target, hook, kind)


def build_tree(context: TreeCacheBuildContext) -> GraniRadixCache:
    """The radix cache of a scheduler process.

    Raises:
        ConfigError: the server runs with something that HOT slabs do not go with, a `GRANIKV_*`
            variable is wrong or of a stock server, or a hook has not taken hold.
        TypeError: the allocator is not ours.
    """
    settings = LiveConfig.of_backend()
    if problems := unsupported(context.server_args, context):
        raise ConfigError(
            f"--radix-cache-backend {BACKEND} does not go with {', '.join(problems)}; "
            "leave that out, or the backend"
        )
    check_in_place(_HOOKS)
    admission = settings.admission
    if context.tp_size > 1 and admission == READS_CLOCK:
        raise ConfigError(
            f"{VARIABLES}ADMISSION={READS_CLOCK} weighs seconds, which differ between "
            "tensor-parallel ranks, so they might place different prefixes; set "
            f"{VARIABLES}ADMISSION=shared"
        )
    return GraniRadixCache(context.params)


def build_allocator(original: Callable[..., Any], configurator: Any, **arguments: Any) -> Any:
    """Around SGLang's builder: its allocator, or ours of the same size where ours is asked for.

    Raises:
        ConfigError: a `GRANIKV_*` variable is wrong, or SGLang builds an allocator that ours
            cannot replace.
    """
    built = original(configurator, **arguments)
    is_shared = arguments["token_to_kv_pool_allocator"] is not None
    if configurator.server_args.radix_cache_backend != BACKEND or is_shared:
        return built
    if type(built) is not TokenToKVPoolAllocator:
        raise ConfigError(
            f"--radix-cache-backend {BACKEND} needs --page-size 1 and a model with one kind of "
            f"attention, but SGLang has built a {type(built).__name__}"
        )
    settings = LiveConfig.from_environment()
    return HotColdTokenAllocator(
        built.size,
        built.dtype,
        built.device,
        arguments["token_to_kv_pool"],
        built.need_sort,
        hot_tokens=settings.hot_tokens_of(built.size),
        admission=make_admission(settings.admission),
    )


def unsupported(server_args: Any, context: TreeCacheBuildContext) -> list[str]:
    """What of a server's flags and model HOT slabs do not go with, as the user wrote it."""
    found = {
        "--disable-radix-cache": context.disable_radix_cache,
        "--enable-hierarchical-cache": context.enable_hierarchical_cache,
        f"--page-size {server_args.page_size}": server_args.page_size not in (None, 1),
        "speculative decoding": server_args.speculative_algorithm is not None,
        "--pp-size above 1": server_args.pp_size > 1,
        "--enable-dp-attention": server_args.enable_dp_attention,
        "--enable-lora": bool(server_args.enable_lora),
        "--enable-two-batch-overlap": server_args.enable_two_batch_overlap,
        "--enable-pdmux": server_args.enable_pdmux,
        "--enable-streaming-session": server_args.enable_streaming_session,
        f"{_SIZED_LATE.name}=1": _SIZED_LATE.get(),
        "disaggregated prefill": server_args.disaggregation_mode not in (None, "null"),
        f"--kv-cache-dtype {server_args.kv_cache_dtype}": server_args.kv_cache_dtype
        not in ("auto", "bfloat16", "bf16"),
        "sliding windows": context.is_hybrid_swa,
        "state-space layers": context.is_hybrid_ssm,
    }
    return [name for name, is_there in found.items() if is_there]


_OBSERVER = Observer()
_STOCK_HOOKS = StockObserver().hooks()
_HOOKS: tuple[Hook, ...] = (
    (
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
        "._build_token_to_kv_pool_allocator",
        build_allocator,
        HookType.AROUND,
    ),
    ("sglang.srt.mem_cache.allocation.alloc_for_extend", alloc_for_extend, HookType.AROUND),
    (
        "sglang.srt.model_executor.model_runner.ModelRunner._decode_cuda_graph_runner_cls",
        decode_runner_class,
        HookType.AROUND,
    ),
    (f"{SCHEDULER}.__init__", check_server, HookType.AFTER),
    # Inside of what plans a step, so that planning is not in its GPU time.
    *_OBSERVER.hooks(),
    *MOVES,
    (f"{SCHEDULER}.run_batch", plan_step, HookType.BEFORE),
    (f"{SCHEDULER}.set_internal_state", set_internal_state, HookType.AROUND),
)
