"""random_model: a model folder with random weights under which attention matters.

    python -m granikv.validate.random_model CONFIG_FOLDER OUT --layers 8

SGLang's dummy weights are so small that every answer depends on its last token alone: speeds are
real, but answers say nothing about attention. Here every projection keeps the size of what goes
through it, queries and keys are twice as large, so that a row looks at few tokens, and logits
differ by several units.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_SHARP = 2.0  # of queries and keys each
_LOGITS = 4.0  # standard deviation


def write(config: Path, out: Path, layers: int, vocabulary: int, seed: int) -> None:
    """Write `config.json` and `model.safetensors` of a Llama-like model, in bfloat16.

    Args:
        config: folder with a config.json of a Llama or Qwen2.
        out: folder; made.
        layers: in place of the config's.
        vocabulary: likewise.
        seed: of the weights.
    """
    import torch  # type: ignore[import-not-found, unused-ignore]
    from safetensors.torch import save_file  # type: ignore[import-not-found, unused-ignore]

    shape = json.loads((config / "config.json").read_text())
    shape |= {"num_hidden_layers": layers, "vocab_size": vocabulary}
    shape |= {"bos_token_id": 1, "eos_token_id": 2}
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Any] = {}
    for name, rows, columns, gain in _products(shape):
        noise = torch.randn(rows, columns, generator=generator)
        weights[name] = (noise * gain * columns**-0.5).to(torch.bfloat16)
    for name, size, value in _vectors(shape):
        weights[name] = torch.full((size,), value, dtype=torch.bfloat16)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(shape, indent=1))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def _products(shape: dict[str, Any]) -> Iterator[tuple[str, int, int, float]]:
    """(name, rows, columns, gain over 1 / sqrt(columns)) of every matrix."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    q_width = shape["num_attention_heads"] * shape["head_dim"]
    kv_width = shape["num_key_value_heads"] * shape["head_dim"]
    yield "model.embed_tokens.weight", shape["vocab_size"], hidden, hidden**0.5
    yield "lm_head.weight", shape["vocab_size"], hidden, _LOGITS
    for layer in range(shape["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield f"{at}.self_attn.q_proj.weight", q_width, hidden, _SHARP
        yield f"{at}.self_attn.k_proj.weight", kv_width, hidden, _SHARP
        yield f"{at}.self_attn.v_proj.weight", kv_width, hidden, 1.0
        yield f"{at}.self_attn.o_proj.weight", hidden, q_width, 1.0
        yield f"{at}.mlp.gate_proj.weight", inner, hidden, 1.0
        yield f"{at}.mlp.up_proj.weight", inner, hidden, 1.0
        yield f"{at}.mlp.down_proj.weight", hidden, inner, 1.0


def _vectors(shape: dict[str, Any]) -> Iterator[tuple[str, int, float]]:
    """(name, size, value) of norms and biases."""
    hidden = shape["hidden_size"]
    yield "model.norm.weight", hidden, 1.0
    for layer in range(shape["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", hidden, 1.0
        yield f"{at}.post_attention_layernorm.weight", hidden, 1.0
        if shape["model_type"] == "qwen2":
            heads = {
                "q": shape["num_attention_heads"],
                "k": shape["num_key_value_heads"],
                "v": shape["num_key_value_heads"],
            }
            for part, count in heads.items():
                yield f"{at}.self_attn.{part}_proj.bias", count * shape["head_dim"], 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Random weights under which attention matters.")
    parser.add_argument("config", type=Path, help="folder with a config.json")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(argv)
    write(chosen.config, chosen.out, chosen.layers, chosen.vocabulary, chosen.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
