"""What SGLang's plugin loader calls: names our radix cache, hooks in the allocator and promotions.

SGLang logs and swallows whatever a plugin raises while it loads, so nothing is decided here: the
server chooses GraniKV with `--radix-cache-backend granikv`, and what is built then raises for
itself.
"""

import os
from collections.abc import Callable
from typing import Any

import sglang
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, register_radix_cache_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from granikv.core.admission import make_admission
from granikv.core.config import PoolConfig
from granikv.core.errors import ConfigError
from granikv.sglang_plugin.allocator import HotColdTokenAllocator
from granikv.sglang_plugin.promotion import promote_ready
from granikv.sglang_plugin.radix_cache import GraniRadixCache

BACKEND = "granikv"
SGLANG_VERSION = "0.5.17"
VARIABLES = "GRANIKV_"  # prefix of the options: SGLang's flags have no room for others
_ALLOCATOR_BUILDER = (
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
    "._build_token_to_kv_pool_allocator"
)
_STEP = "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run"


def register() -> None:
    """Entry point `sglang.srt.plugins`; does nothing until a server asks for the backend.

    Raises:
        ConfigError: another version of SGLang is installed.
    """
    if sglang.__version__ != SGLANG_VERSION:
        raise ConfigError(
            f"GraniKV serves with SGLang {SGLANG_VERSION}, found {sglang.__version__}; "
            f"pip install sglang=={SGLANG_VERSION}"
        )
    register_radix_cache_backend(BACKEND, build_tree)
    HookRegistry.register(_ALLOCATOR_BUILDER, build_allocator, HookType.AROUND)
    HookRegistry.register(_STEP, promote_ready, HookType.BEFORE)


def build_tree(context: TreeCacheBuildContext) -> GraniRadixCache:
    """The radix cache of a scheduler process.

    Raises:
        ConfigError: the server runs with something that HOT slabs do not go with.
        TypeError: the allocator is not ours.
    """
    if problems := unsupported(context.server_args, context):
        raise ConfigError(
            f"--radix-cache-backend {BACKEND} does not go with {', '.join(problems)}; "
            "leave that out, or the backend"
        )
    admission = PoolConfig.from_variables(os.environ, VARIABLES).admission
    if context.tp_size > 1 and admission == "value":
        raise ConfigError(
            f"{VARIABLES}ADMISSION=value weighs seconds, which differ between tensor-parallel "
            f"ranks, so they might place different prefixes; set {VARIABLES}ADMISSION=shared"
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
    settings = PoolConfig.from_variables(os.environ, VARIABLES)
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
        "disaggregated prefill": server_args.disaggregation_mode not in (None, "null"),
        f"--kv-cache-dtype {server_args.kv_cache_dtype}": server_args.kv_cache_dtype
        not in ("auto", "bfloat16", "bf16"),
        "sliding windows": context.is_hybrid_swa,
        "state-space layers": context.is_hybrid_ssm,
    }
    return [name for name, is_there in found.items() if is_there]
