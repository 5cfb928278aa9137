"""KV capacity against the server's rule worked out by hand."""

import pytest

from granikv.core.errors import ConfigError
from granikv.cost_models.hardware import load_hardware
from granikv.cost_models.memory import graph_rows, kv_capacity_tokens, server_defaults
from granikv.cost_models.models import load_model


def test_h200_llama_by_hand() -> None:
    # reserved = 512 + 8192 * 1.5 + 1024 / 8 + 256 * 2 + 58 * 8 = 13904 MiB
    # fraction = round((143771 - 13904) / 143771, 3) = round(0.90329, 3)
    # kv = int(143771 * 2**20 * 0.903) - 2 * 8030261248 = 120071080050 bytes, / 131072
    capacity = kv_capacity_tokens(load_model("llama-3.1-8b"), load_hardware("h200-sxm"))
    assert capacity.mem_fraction_static == 0.903
    assert capacity.kv_bytes == 120_071_080_050
    assert capacity.size_tokens == 916_069


def test_a100_40gb_llama_by_hand() -> None:
    # reserved = 512 + 4096 * 1.5 + 128 + 32 * 2 + 50 * 8 = 7248; round(33712 / 40960, 3)
    defaults = server_defaults(load_hardware("a100-sxm4-40gb"))
    assert (defaults.chunked_prefill_tokens, defaults.graph_max_rows) == (4096, 32)
    assert defaults.reserved_mib == 7248
    assert defaults.mem_fraction_static == 0.823
    capacity = kv_capacity_tokens(load_model("llama-3.1-8b"), load_hardware("a100-sxm4-40gb"))
    assert capacity.size_tokens == (int(40960 * 2**20 * 0.823) - 16_060_522_496) // 131_072


def test_four_ranks_get_larger_graphs() -> None:
    for gpu, rows in (("a100-sxm4-40gb", 160), ("a100-sxm4-80gb", 512), ("h200-sxm", 512)):
        assert server_defaults(load_hardware(gpu), tp=4).graph_max_rows == rows
        assert server_defaults(load_hardware(gpu), tp=2).graph_max_rows < rows


def test_large_gpus_keep_ten_gib() -> None:
    # 2048 * 1.5 + ... would be below 10 GiB only with small chunks; the H200 default is above it.
    assert server_defaults(load_hardware("h200-sxm")).reserved_mib > 10 * 1024
    small = load_hardware("h200-sxm").model_copy(update={"hbm_mib": 30 * 1024})
    assert server_defaults(small, 1, False).reserved_mib == 512 + 2048 * 1.5 + 128 + 24 * 2


def test_prefill_graphs_take_eight_mib_a_size() -> None:
    hardware = load_hardware("a100-sxm4-40gb")
    # 8 + 14 + 8 + 8 + 12 sizes up to 4096 tokens
    extra = (
        server_defaults(hardware).reserved_mib - server_defaults(hardware, 1, False).reserved_mib
    )
    assert extra == 8 * 50


def test_graph_rows_follow_the_server() -> None:
    assert graph_rows(32) == (1, 2, 4, 8, 12, 16, 24, 32)
    assert graph_rows(512)[-3:] == (480, 496, 512)
    assert graph_rows(576)[-3:] == (512, 544, 576)
    assert graph_rows(100)[-2:] == (96, 100)


@pytest.mark.parametrize(("rows", "padded"), [(1, 1), (3, 4), (9, 12), (250, 256), (300, 300)])
def test_steps_are_padded_to_the_next_graph(rows: int, padded: int) -> None:
    assert server_defaults(load_hardware("h200-sxm")).padded_rows(rows) == padded


def test_given_fraction_wins() -> None:
    model, hardware = load_model("llama-3.1-8b"), load_hardware("h200-sxm")
    half = kv_capacity_tokens(model, hardware, mem_fraction=0.5)
    assert half.size_tokens == (hardware.hbm_bytes // 2 - half.weights_bytes) // 131_072
    with pytest.raises(ValueError, match="mem_fraction must be"):
        kv_capacity_tokens(model, hardware, mem_fraction=1.5)


def test_a_model_that_does_not_fit_names_both_sizes() -> None:
    model, hardware = load_model("qwen2.5-32b"), load_hardware("a100-sxm4-40gb")
    with pytest.raises(ConfigError, match=r"needs 65528014848 bytes .* has \d{11} at"):
        kv_capacity_tokens(model, hardware)
    assert kv_capacity_tokens(model, hardware, tp=4).size_tokens > 0
