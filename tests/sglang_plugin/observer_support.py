"""A scheduler as the observer sees it, on the real tree and with SGLang's own small classes."""

from array import array
from types import SimpleNamespace

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats
from sglang.srt.server_args import ServerArgs

from granikv.core.admission import SharedAdmission
from granikv.core.row_tables import row_tables
from granikv.core.step import Mode, Segment, StepPlan, StepShape
from granikv.sglang_plugin.allocator import HotColdTokenAllocator
from granikv.sglang_plugin.attention import GraniAttnBackend
from granikv.sglang_plugin.radix_cache import GraniRadixCache
from granikv.sglang_plugin.step_plan import PlannedStep

HOT = 40


def make_tree():
    """160 slots, 40 of them HOT; two readers make a prefix of 4 tokens worth a slab."""
    allocator = HotColdTokenAllocator(
        160, torch.int64, "cpu", None, False, hot_tokens=HOT, admission=SharedAdmission(4, 2)
    )
    return GraniRadixCache(CacheInitParams(False, None, allocator, 1))


def share(tree, length, first=1):
    """Two requests hold a cached prompt of that length, which is promoted; its node."""
    key = RadixKey(array("q", range(first * 1000, first * 1000 + length)))
    slots = tree.token_to_kv_pool_allocator.alloc(length)
    tree.insert(InsertParams(key=key, value=slots))
    node = tree.match_prefix(MatchPrefixParams(key=key)).last_device_node
    for _ in range(2):
        tree.inc_lock_ref(node)
        tree.count_use(SimpleNamespace(last_node=node))
    tree.promote(node)
    return node


def planned(modes=(Mode.CASCADE,), rows=2, private_tokens=7, variant="stream"):
    """A decode step with a segment for each mode."""
    segments = tuple(Segment(1 + 10 * i, 10, rows) for i in range(len(modes)))
    shape = StepShape(rows, rows, private_tokens, private_tokens, segments, 8, 2, 64)
    return PlannedStep(shape, StepPlan(tuple(modes)), variant, row_tables([], lambda _: ()))


def decode(iteration, rows=2):
    """A decode batch."""
    lens = torch.full((rows,), 20)
    return batch_of(ForwardMode.DECODE, iteration, rows, seq_lens_cpu=lens)


def extend(iteration, *requests):
    """A prefill batch of (new tokens, prefix tokens)."""
    new, prefix = ([pair[i] for pair in requests] for i in (0, 1))
    return batch_of(
        ForwardMode.EXTEND, iteration, len(requests), extend_lens=new, prefix_lens=prefix
    )  # fmt: skip


def batch_of(mode, iteration, rows, **more):
    """What `run_batch` gets."""
    return SimpleNamespace(
        forward_mode=mode, forward_iter=iteration, reqs=[None] * rows, **more
    )  # fmt: skip


def request(rid, node, output_tokens=3, is_aborted=False):
    """A request that has ended, on a path of the tree."""
    times = SchedulerReqTimeStats()
    times.scheduler_recv_time, times.prefill_finished_time = 0.0, 0.0
    times.set_scheduler_recv_time()
    if output_tokens:
        times.set_prefill_finished_time()
    return SimpleNamespace(
        rid=rid,
        time_stats=times,
        origin_input_ids=array("q", range(12)),
        output_ids=array("q", range(output_tokens)),
        cached_tokens=10,
        last_node=node,
        finished_reason=FINISH_ABORT() if is_aborted else FINISH_LENGTH(output_tokens),
    )


def make_backend(step=None, failures=None):
    """GraniKV's attention backend without kernels: it has planned `step`."""
    backend = object.__new__(GraniAttnBackend)
    check = None if failures is None else SimpleNamespace(failures=failures)
    backend.decode_backend = SimpleNamespace(
        last_step=step, check=check, planned_steps=0, planned_ns=0
    )
    return backend


def make_scheduler(tree, backend=None, collector=None, **more):
    """A scheduler on a CPU, right after its `__init__`."""
    args = object.__new__(ServerArgs)
    for name, field in ServerArgs.__dataclass_fields__.items():
        object.__setattr__(args, name, field.default)
    args.model_path, args.served_model_name = "org/model", "model"
    defaults = {
        "tree_cache": tree,
        "server_args": args,
        "device": "cpu",
        "max_running_requests": 64,
        "ps": SimpleNamespace(tp_rank=0, dp_rank=None),
        "tp_worker": SimpleNamespace(
            model_runner=SimpleNamespace(attn_backend=backend or make_backend())
        ),
        "metrics_collector_context": SimpleNamespace(
            collector=collector, current_scheduler_metrics_enabled=collector is not None
        ),
    }
    return SimpleNamespace(**defaults | more)
