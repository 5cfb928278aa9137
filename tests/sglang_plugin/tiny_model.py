"""A language model of two layers, and prompts that it answers clearly."""

import json
from pathlib import Path

import numpy as np

from granikv.validate.random_model import write

SHARED_TOKENS, NESTED_TOKENS, HINTED_TOKENS = 280, 340, 300
VOCABULARY = 512
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float16",
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
# Of seeds below 1000 the one with the clearest answers to `prompts`: the logits of their first four
# tokens are 0.25 or more above the second best, and differ by 0.01 or so between backends.
_SEED = 640


def write_model(folder: Path) -> Path:
    """A Llama whose next token hangs on what attention reads; returns its folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    write(folder, folder, layers=2, vocabulary=VOCABULARY, seed=_SEED)
    return folder


def prompts() -> tuple[list[list[int]], list[list[int]]]:
    """Six prompts: two with a shared prefix, two with a longer one that begins with it, two with
    none. And three with another prefix, to be hinted.
    """
    rng = np.random.default_rng(1)

    def tokens(count: int) -> list[int]:
        drawn: list[int] = rng.integers(3, VOCABULARY, count).tolist()
        return drawn

    shared = tokens(SHARED_TOKENS)
    nested = shared + tokens(NESTED_TOKENS - SHARED_TOKENS)
    hinted = tokens(HINTED_TOKENS)
    heads = ((shared, 9), (shared, 1), (nested, 7), (nested, 3), ([], 20), ([], 33))
    plain = [head + tokens(own) for head, own in heads]
    return plain, [hinted + tokens(own) for own in (4, 7, 9)]
