"""Model shapes against published sizes, tensor parallelism and refused configs."""

import json
from pathlib import Path
from typing import Any

import pytest

from granikv.core.errors import ConfigError
from granikv.cost_models.models import ModelShape, from_hf_config, load_model

HF_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        # Parameter counts as the model cards' safetensors headers state them.
        ("llama-3.1-8b", 8_030_261_248, 131_072),
        ("qwen2.5-14b", 14_770_033_664, 196_608),
        ("qwen2.5-32b", 32_763_876_352, 262_144),
    ],
)
def test_published_parameter_counts(name: str, parameters: int, kv_bytes: int) -> None:
    model = load_model(name)
    assert model.weights_bytes(1) == 2 * parameters
    assert model.kv_bytes_per_token(1) == kv_bytes


def test_gemms_of_llama_on_two_ranks() -> None:
    model = load_model("llama-3.1-8b")
    assert [(gemm.n, gemm.k) for gemm in model.gemms(2)] == [
        (3072, 4096),
        (4096, 2048),
        (14336, 4096),
        (4096, 7168),
    ]
    assert model.lm_head(2)[1:] == (64128, 4096)


def test_ranks_share_weights_and_kv_evenly() -> None:
    model = load_model("qwen2.5-32b")
    assert model.kv_bytes_per_token(4) * 4 == model.kv_bytes_per_token(1)
    assert (model.q_heads_per_rank(4), model.kv_heads_per_rank(4)) == (10, 2)
    # Norms are on every rank, so four ranks hold a little more than one.
    assert 0 < 4 * model.weights_bytes(4) - model.weights_bytes(1) < 10 * 2**20


def test_more_ranks_than_kv_heads_replicate_them() -> None:
    model = load_model("llama-3.1-8b").model_copy(update={"kv_heads": 2})
    assert model.kv_heads_per_rank(8) == 1
    assert model.kv_replicas(8) == 4
    assert model.kv_replicas(2) == 1


@pytest.mark.parametrize(
    ("update", "tp", "field"),
    [
        ({}, 3, "q_heads"),
        ({"intermediate": 14337}, 2, "intermediate"),
        ({"kv_heads": 3}, 2, "kv_heads"),
    ],
)
def test_uneven_ranks_are_refused(update: dict[str, int], tp: int, field: str) -> None:
    model = load_model("llama-3.1-8b").model_copy(update=update)
    with pytest.raises(ConfigError, match=field):
        model.kv_heads_per_rank(tp)


def test_hf_folder_gives_the_shipped_shape(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HF_LLAMA))
    model = load_model(str(folder))
    assert model.name == "my-llama"
    shipped = load_model("llama-3.1-8b")
    assert model.model_copy(update={"name": shipped.name, "source": shipped.source}) == shipped
    assert load_model(str(folder / "config.json")) == model


def test_hf_tied_embeddings_and_qwen_bias() -> None:
    tied = from_hf_config(HF_LLAMA | {"tie_word_embeddings": True}, "tied", "test")
    plain = from_hf_config(HF_LLAMA, "plain", "test")
    assert plain.weights_bytes(1) - tied.weights_bytes(1) == 2 * 128256 * 4096
    qwen = from_hf_config(HF_LLAMA | {"model_type": "qwen2"}, "qwen", "test")
    assert qwen.weights_bytes(1) - plain.weights_bytes(1) == 2 * 32 * 6144


def test_hf_without_kv_heads_is_multi_head() -> None:
    config = {key: value for key, value in HF_LLAMA.items() if key != "num_key_value_heads"}
    assert from_hf_config(config, "mha", "test").kv_heads == 32


@pytest.mark.parametrize(
    ("update", "field"),
    [
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"n_routed_experts": 64}, "n_routed_experts"),
        ({"num_experts": 64}, "num_experts"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"text_config": {"a": 1}}, "text_config"),
        ({"quantization_config": {"bits": 8}}, "quantization_config"),
        ({"model_type": "mamba"}, "model_type"),
        ({"torch_dtype": "float32"}, "dtype"),
    ],
)
def test_models_that_are_not_covered_are_refused_by_field(
    update: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^m: config.json .*{field}.*\.$"):
        from_hf_config(HF_LLAMA | update, "m", "test")


def test_a_window_that_is_switched_off_is_accepted() -> None:
    config = HF_LLAMA | {"sliding_window": 131072, "use_sliding_window": False}
    assert isinstance(from_hf_config(config, "qwen", "test"), ModelShape)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    config = {key: value for key, value in HF_LLAMA.items() if key != "vocab_size"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="vocab_size"):
        load_model(str(path))
    path.write_text("{")
    with pytest.raises(ConfigError, match="not a model description"):
        load_model(str(path))
