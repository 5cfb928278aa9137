"""CUDA graphs of decode steps: SGLang's runner, with one graph for each variant of a batch size."""

from collections.abc import Callable
from typing import Any

from granikv.sglang_plugin.attention import GraniAttnBackend


def decode_runner_class(original: Callable[..., type], model_runner: Any) -> type:
    """Around `ModelRunner._decode_cuda_graph_runner_cls`: a runner that knows our variants."""
    found = original(model_runner)
    if not isinstance(model_runner.attn_backend, GraniAttnBackend):
        return found
    return type(f"Grani{found.__name__}", (_WithVariants, found), {})


class _WithVariants:
    """Mixed into SGLang's decode runner, whose graphs have a label that we use for the variant."""

    attn_backend: GraniAttnBackend

    def can_run_graph(self, forward_batch: Any) -> bool:
        """False too for a step that a check wants to see."""
        if self.attn_backend.decode_backend.runs_eagerly:
            return False
        return bool(super().can_run_graph(forward_batch))  # type: ignore[misc]

    def capture_one_shape(
        self,
        size: int,
        forward: Callable[..., Any],
        stream_idx: int | None = None,
        variant_label: str | None = None,
    ) -> None:
        """Capture a batch size once for each variant; SGLang's own label must not be in use."""
        assert variant_label is None
        decode = self.attn_backend.decode_backend
        for variant in decode.planner.variants:
            decode.variant = variant
            super().capture_one_shape(size, forward, stream_idx, variant)  # type: ignore[misc]

    def _resolve_lora_variant(self, _forward_batch: Any) -> str:
        """The label of the graph to replay."""
        return self.attn_backend.decode_backend.variant
