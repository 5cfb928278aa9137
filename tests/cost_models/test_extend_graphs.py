"""Extend steps by CUDA graphs: which sizes there are, and what a step of one takes."""

import math

import pytest

from granikv.cost_models.memory import padded_tokens, prefill_graph_tokens
from granikv.cost_models.models import load_model
from granikv.cost_models.params import load_params
from granikv.cost_models.step import StepCost

LLAMA = StepCost(load_params("h200-sxm"), load_model("llama-3.1-8b"))
QWEN_TP2 = StepCost(load_params("h200-sxm"), load_model("qwen2.5-14b"), tp=2)
SIZES = prefill_graph_tokens(8192)


def test_sizes_are_the_servers() -> None:
    """SGLang 0.5.17, server_args.py: every 4 to 32, 16 to 256, 32 to 512, 64 to 1,024, 256 to 4,096
    and 512 from there on, up to the chunk.
    """
    assert len(SIZES) == 8 + 14 + 8 + 8 + 12 + 8
    assert SIZES[:10] == (4, 8, 12, 16, 20, 24, 28, 32, 48, 64)
    assert SIZES[21:24] == (256, 288, 320)
    assert SIZES[-9:-6] == (4096, 4608, 5120)
    assert SIZES[-1] == 8192
    assert prefill_graph_tokens(2000)[-2:] == (1536, 1792)
    assert prefill_graph_tokens(16_384)[-1] == 16_384
    assert prefill_graph_tokens(2) == ()


@pytest.mark.parametrize(
    ("tokens", "padded"),
    [(1, 4), (4, 4), (5, 8), (33, 48), (257, 288), (513, 576), (1025, 1280), (4097, 4608)],
)
def test_a_step_runs_at_the_next_size(tokens: int, padded: int) -> None:
    assert padded_tokens(tokens, SIZES) == padded


def test_above_the_largest_size_there_is_no_graph() -> None:
    assert padded_tokens(8192, SIZES) == 8192
    assert padded_tokens(8193, SIZES) == 0
    assert padded_tokens(1900, prefill_graph_tokens(2000)) == 0
    assert padded_tokens(1, ()) == 0


@pytest.mark.parametrize("cost", [LLAMA, QWEN_TP2], ids=["llama", "qwen tp 2"])
def test_products_run_at_the_graphs_size_and_attention_at_its_own(cost: StepCost) -> None:
    graph = cost.extend([200, 60], [4096, 0], 288)
    own, full = cost.extend([200, 60], [4096, 0]), cost.extend([228, 60], [4096, 0])
    assert graph.attention_ns == own.attention_ns
    assert graph.gemm_ns == full.gemm_ns > own.gemm_ns
    assert graph.collective_ns == full.collective_ns
    assert (graph.collective_ns > own.collective_ns) == (cost.tp > 1)
    assert graph.host_ns == cost.params.terms.host_extend_graph_ns.value
    parts = graph.host_ns + graph.gemm_ns + graph.attention_ns + graph.collective_ns
    assert graph.total_ns == math.floor(parts)


def test_a_graph_waits_for_no_launches() -> None:
    """16 tokens take 5 ms and 32 layers 12 ms to launch one by one."""
    terms = LLAMA.params.terms
    eager, graph = LLAMA.extend([16], [0]), LLAMA.extend([16], [0], 16)
    assert eager.gemm_ns == graph.gemm_ns
    launches_ns = 32 * terms.host_extend_layer_ns.value
    assert eager.gemm_ns + eager.attention_ns < launches_ns
    assert eager.total_ns == pytest.approx(terms.host_extend_ns.value + launches_ns, abs=1)
    assert graph.total_ns < launches_ns


def test_a_graph_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="graph of 256 tokens cannot run 260"):
        LLAMA.extend([200, 60], [0, 0], 256)
