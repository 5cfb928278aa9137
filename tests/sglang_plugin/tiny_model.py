"""A language model of two layers, and prompts that it answers clearly."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

VOCABULARY = 512
_LAYERS, _HIDDEN, _INNER, _Q_HEADS, _KV_HEADS, _HEAD_DIM = 2, 256, 64, 4, 2, 64
# Of seeds below 1000 the one whose answers to `prompts` are clearest: four tokens, each ahead of the
# second best by 0.17 or more in its logit, of which backends differ by less than 0.01.
_SEED = 165


def write_model(folder: Path) -> Path:
    """A Llama in float16 whose next token hangs on what attention reads; returns its folder.

    Weights are random. Attention scores spread by 3 or so, so that few tokens count, and what they
    say weighs more than the last token itself. With SGLang's dummy weights all tokens count alike,
    for next to nothing: a wrong slot would not show.
    """
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _Q_HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(np.random.default_rng(_SEED)), folder / "model.safetensors")
    return folder


def _weights(rng: np.random.Generator) -> dict[str, torch.Tensor]:
    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        values = rng.standard_normal((rows, columns)) * gain / columns**0.5
        return torch.from_numpy(values.astype(np.float16))

    ones = torch.ones(_HIDDEN, dtype=torch.float16)
    made = {
        "model.embed_tokens.weight": matrix(VOCABULARY, _HIDDEN, _HIDDEN**0.5),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(VOCABULARY, _HIDDEN, 3),
    }
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}."
        made |= {
            f"{name}self_attn.q_proj.weight": matrix(_Q_HEADS * _HEAD_DIM, _HIDDEN, 1.7),
            f"{name}self_attn.k_proj.weight": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN, 1.7),
            f"{name}self_attn.v_proj.weight": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{name}self_attn.o_proj.weight": matrix(_HIDDEN, _Q_HEADS * _HEAD_DIM, 2),
            f"{name}mlp.gate_proj.weight": matrix(_INNER, _HIDDEN),
            f"{name}mlp.up_proj.weight": matrix(_INNER, _HIDDEN),
            f"{name}mlp.down_proj.weight": matrix(_HIDDEN, _INNER),
            f"{name}input_layernorm.weight": ones.clone(),
            f"{name}post_attention_layernorm.weight": ones.clone(),
        }
    return made


def prompts() -> tuple[list[list[int]], list[list[int]]]:
    """Seven prompts, three with a prefix of 280 tokens, two with 60 more, two with none; and three
    with another prefix, of 300 tokens.
    """
    rng = np.random.default_rng(1)

    def tokens(count: int) -> list[int]:
        drawn: list[int] = rng.integers(3, VOCABULARY, count).tolist()
        return drawn

    shared = tokens(280)
    nested = shared + tokens(60)
    hinted = tokens(300)
    heads = ((shared, 9), (shared, 5), (nested, 7), (nested, 3), (shared, 1), ([], 20), ([], 33))
    plain = [head + tokens(own) for head, own in heads]
    return plain, [hinted + tokens(own) for own in (4, 7, 9)]
