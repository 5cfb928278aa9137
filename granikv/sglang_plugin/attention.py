"""Attention backend `granikv`: decode by GraniKV's kernels, everything else by the stock backend.

A step is planned on the host before it is launched (`plan_step`), its tables are brought to the
device before a graph is replayed, and the kernels read them inside the graph. A graph therefore
holds for any prefixes, lengths and slabs; only the variant has a graph of its own.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from granikv.core.errors import ConfigError
from granikv.kernels.decode import SharedPrefixDecode
from granikv.sglang_plugin.fa3_pair import Fa3Pair
from granikv.sglang_plugin.radix_cache import GraniRadixCache
from granikv.sglang_plugin.step_check import StepCheck
from granikv.sglang_plugin.step_plan import PlannedStep, StepPlanner, Variant
from granikv.sglang_plugin.step_tables import StepTables


class GraniDecodeBackend(AttentionBackend):
    """Decode attention over shared segments and the rest of each row.

    Args:
        pool: SGLang's KV pool.
        planner: of the server's steps.
        operator: with room for every batch.
        tables: likewise.
        pair: FlashAttention-3's, where the planner asks for it.
        check: of sampled steps, or None.

    Attributes:
        last_step: the one that was planned last.
        planned_steps: how many were planned so far.
        planned_ns: host time that took.
        variant: whose kernels `forward_decode` launches; a graph is captured for each.
    """

    needs_cpu_seq_lens = True

    def __init__(
        self,
        pool: Any,
        planner: StepPlanner,
        operator: SharedPrefixDecode,
        tables: StepTables,
        pair: Fa3Pair | None = None,
        check: StepCheck | None = None,
    ) -> None:
        self.token_to_kv_pool = pool
        self.planner = planner
        self.check = check
        self.last_step: PlannedStep | None = None
        self.planned_steps = 0
        self.planned_ns = 0
        self.variant: Variant = "stream"
        self._operator = operator
        self._heads = operator.limits.heads
        self._tables = tables
        self._pair = pair
        self._rows = 0
        self._fitting: set[int] = set()

    # ------------------------------------------------------------------ a step

    def plan_step(self, tree: GraniRadixCache, reqs: Sequence[Any], seq_lens: Any) -> None:
        """Decide how the next decode step runs.

        Args:
            tree: that the requests' paths are in.
            reqs: of the batch, by row.
            seq_lens: int64 `[rows]` on the host.
        """
        begin_ns = time.perf_counter_ns()
        self.last_step = self.planner.plan(tree, reqs, np.asarray(seq_lens))
        self.variant = self.last_step.variant
        self.planned_steps += 1
        self.planned_ns += time.perf_counter_ns() - begin_ns
        if self.check is not None:
            self.check.begin_step()

    @property
    def runs_eagerly(self) -> bool:
        """Whether the planned step must not be replayed from a graph."""
        return self.check is not None and self.check.is_due

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing to make: buffers have room for every batch."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Tokens of a padding row."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Bring the planned step to the device; none while a graph is captured."""
        step = None if in_capture else self.last_step
        if step is None or step.shape.rows > forward_batch.batch_size:
            self._tables.load(None, ())
        else:
            shape = replace(step.shape, padded_rows=forward_batch.batch_size)
            self.last_step = replace(step, shape=shape)
            self._tables.load(step.tables, step.plan.modes)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Make the step's work lists."""
        rows = self._rows = forward_batch.batch_size
        self._tables.fill_rows(rows, forward_batch.req_pool_indices, forward_batch.seq_lens)
        view = self._tables.view(rows)
        if self.variant == "fa3":
            assert self._pair is not None
            self._pair.plan(view)
        elif self.variant == "stream":
            self._operator.plan(view, "serial", "none")
        else:
            self._operator.plan(view, self.variant)

    # ------------------------------------------------------------------ a layer

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **unsupported: Any,
    ) -> torch.Tensor:
        """Attention of one layer, `[rows, heads * head_dim]`.

        Raises:
            ConfigError: the layer has something that the kernels do not compute.
        """
        if layer.layer_id not in self._fitting:
            self._check_layer(layer, unsupported)
        pool, heads = self.token_to_kv_pool, self._heads
        if save_kv_cache and k is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, None)
            pool.set_kv_buffer(layer, location, k, v, layer.k_scale, layer.v_scale)
        keys, values = pool.get_kv_buffer(layer.layer_id)
        queries = q.view(-1, heads.q, heads.dim)
        view = self._tables.view(self._rows)
        if self.variant == "fa3":
            assert self._pair is not None
            out = self._pair.run(queries, keys, values, view)
        else:
            out = q.new_empty(len(queries), heads.q, heads.dim)
            self._operator.run(queries, keys, values, view, out)
        if self.check is not None and self.check.is_due:
            self.check.compare(queries, keys, values, view, out, layer.layer_id)
        return out.view(-1, heads.q * heads.dim)

    def _check_layer(self, layer: Any, unsupported: dict[str, Any]) -> None:
        window = layer.sliding_window_size
        problems = {
            "a logit cap": bool(layer.logit_cap),
            "a sliding window": window is not None and window > -1,
            "cross attention": layer.is_cross_attention,
            "another softmax scale": abs(layer.scaling - self._heads.dim**-0.5) > 1e-6,
            "values of another size": layer.v_head_dim != self._heads.dim,
            **{name: value is not None for name, value in unsupported.items()},
        }
        found = [name for name, is_there in problems.items() if is_there]
        if found:
            raise ConfigError(
                f"GraniKV's kernels have no {', '.join(found)}, which layer {layer.layer_id} of "
                "this model asks for; serve it without --attention-backend granikv"
            )
        self._fitting.add(layer.layer_id)


class GraniAttnBackend(HybridAttnBackend):  # type: ignore[misc,unused-ignore]
    """SGLang's own division by forward mode, with `GraniDecodeBackend` for decode."""

    decode_backend: GraniDecodeBackend

    def plan_step(self, tree: GraniRadixCache, reqs: Sequence[Any], seq_lens: Any) -> None:
        """See `GraniDecodeBackend.plan_step`."""
        self.decode_backend.plan_step(tree, reqs, seq_lens)

    @property
    def last_step(self) -> PlannedStep | None:
        """The decode step that was planned last."""
        return self.decode_backend.last_step
