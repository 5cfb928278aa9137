"""What a server's processes build of GraniKV: the attention backend, and the plan of each step."""

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

from granikv.core.errors import ConfigError
from granikv.kernels.decode import SharedPrefixDecode
from granikv.kernels.overlap import Overlap
from granikv.kernels.shapes import Heads
from granikv.sglang_plugin.admin import limit_requests
from granikv.sglang_plugin.attention import GraniAttnBackend, GraniDecodeBackend
from granikv.sglang_plugin.config import BACKEND, LiveConfig
from granikv.sglang_plugin.dispatch import make_dispatcher
from granikv.sglang_plugin.fa3_pair import Fa3Pair
from granikv.sglang_plugin.radix_cache import GraniRadixCache
from granikv.sglang_plugin.step_check import StepCheck
from granikv.sglang_plugin.step_plan import MAX_SEGMENTS, PAIR_TOKENS, StepPlanner
from granikv.sglang_plugin.step_tables import StepTables

# Of a row; bounds parts of a fixed size, of which a server that shares nothing has none.
_SEGMENT_TOKENS = 32_768


def build_attention(runner: Any) -> GraniAttnBackend:
    """Factory of attention backend `granikv`, for SGLang's registry.

    Args:
        runner: SGLang's model runner, whose pools exist.

    Raises:
        ConfigError: a `GRANIKV_*` variable is wrong or of a stock server, the radix cache is not
            ours, or the model has heads or a dtype that no kernel is built for.
    """
    args = runner.server_args
    settings = LiveConfig.of_backend()
    if args.radix_cache_backend != BACKEND:
        raise ConfigError(
            f"--attention-backend {BACKEND} needs --radix-cache-backend {BACKEND}, which tells it "
            "what rows share; give both, or start the server with `granikv serve`"
        )
    if args.enable_deterministic_inference:
        settings = settings.model_copy(update={"deterministic": True})
    heads = _heads_of(runner)
    device = torch.device(runner.device, runner.gpu_id if runner.device == "cuda" else None)
    tables = _tables_of(runner)
    try:
        decode = GraniDecodeBackend(
            runner.token_to_kv_pool,
            _planner(runner, settings, heads, device),
            _operator(runner, settings, heads, tables, device),
            tables,
            _pair(settings, heads, tables, device),
            _check(runner, settings, heads, tables, device),
        )
    except NotImplementedError as missing:
        raise ConfigError(
            f"GraniKV's kernels cannot serve this model here ({missing}); start the server without "
            f"--attention-backend {BACKEND}"
        ) from None
    return GraniAttnBackend(runner, _stock_backend(runner), decode)


def plan_step(scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    """Before `Scheduler.run_batch`: plan a decode step; other batches share nothing."""
    backend = scheduler.tp_worker.model_runner.attn_backend
    if isinstance(backend, GraniAttnBackend) and batch.forward_mode.is_decode():
        backend.plan_step(scheduler.tree_cache, batch.reqs, batch.seq_lens_cpu)


def check_server(_result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    """After `Scheduler.__init__`: what was asked for is what is there.

    Raises:
        ConfigError: the tree or the attention backend is another one.
    """
    args = scheduler.server_args
    backend = scheduler.tp_worker.model_runner.attn_backend
    if args.radix_cache_backend != BACKEND:
        return
    if not isinstance(scheduler.tree_cache, GraniRadixCache):
        raise ConfigError(
            f"--radix-cache-backend {BACKEND} was asked for, but SGLang has built a "
            f"{type(scheduler.tree_cache).__name__}: this model needs a cache of its own kind; "
            "serve it without GraniKV"
        )
    if not isinstance(backend, GraniAttnBackend):
        raise ConfigError(
            f"--radix-cache-backend {BACKEND} needs --attention-backend {BACKEND} for prefill and "
            f"decode, found {' and '.join(args.get_attention_backends())}; give it alone, or start "
            "the server with `granikv serve`"
        )
    limit_requests(scheduler)


def _stock_backend(runner: Any) -> Any:
    """What SGLang would have taken by itself."""
    if runner.device == "cpu":
        return ATTENTION_BACKENDS["torch_native"](runner)
    name = runner.server_args._get_default_attn_backend(runner.use_mla_backend, runner.model_config)
    return ATTENTION_BACKENDS[name](runner)


def _heads_of(runner: Any) -> Heads:
    keys, values = runner.token_to_kv_pool.get_kv_buffer(runner.token_to_kv_pool.start_layer)
    if keys.shape != values.shape:
        raise ConfigError(
            f"GraniKV needs keys and values of one size, got {list(keys.shape)} and "
            f"{list(values.shape)}; serve this model without it"
        )
    ranks = runner.ps.tp_size
    q_heads = runner.model_config.num_attention_heads // ranks
    return Heads(q_heads, keys.shape[1], keys.shape[2])


def _tables_of(runner: Any) -> StepTables:
    slots = runner.req_to_token_pool.req_to_token
    graphs = runner.server_args.cuda_graph_config.decode.max_bs or 1
    return StepTables(max(len(slots), graphs), MAX_SEGMENTS, slots)


def _planner(runner: Any, settings: LiveConfig, heads: Heads, device: Any) -> StepPlanner:
    dispatcher = make_dispatcher(settings, runner.model_config.hf_config, runner.ps.tp_size, device)
    return StepPlanner(
        dispatcher,
        heads,
        overlaps=_overlaps(heads, device),
        kernels=settings.kernels,
        share=not settings.deterministic,
    )


def _overlaps(heads: Heads, device: Any) -> tuple[Overlap, ...]:
    if device.type != "cuda":
        return ("serial",)
    has_beside = torch.cuda.get_device_capability(device)[0] == 9 and heads.dim != 96
    return ("split", "beside") if has_beside else ("split",)


def _operator(
    runner: Any, settings: LiveConfig, heads: Heads, tables: StepTables, device: Any
) -> SharedPrefixDecode:
    width = runner.req_to_token_pool.req_to_token.shape[1]
    return SharedPrefixDecode(
        tables.max_rows,
        heads,
        MAX_SEGMENTS,
        width,
        runner.token_to_kv_pool.dtype,
        device,
        deterministic=settings.deterministic,
        max_segment_tokens=1 if settings.deterministic else _SEGMENT_TOKENS,
    )


def _pair(settings: LiveConfig, heads: Heads, tables: StepTables, device: Any) -> Fa3Pair | None:
    if settings.kernels != "fa3":
        return None
    return Fa3Pair(tables.max_rows, heads, 1 << 17, PAIR_TOKENS, device)


def _check(
    runner: Any, settings: LiveConfig, heads: Heads, tables: StepTables, device: Any
) -> StepCheck | None:
    if not settings.check_steps:
        return None
    operator = _operator(runner, settings, heads, tables, device)
    return StepCheck(settings.check_steps, operator, settings.check_against)
