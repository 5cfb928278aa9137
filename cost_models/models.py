"""ModelShape: the sizes of a dense decoder that decide its time and memory."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from granikv.core.errors import ConfigError
from granikv.core.validation import explain
from granikv.cost_models.catalog import data_file

# Dense decoders with grouped-query attention and a gated SiLU MLP, and whether q, k, v have a
# bias when the config does not say.
_HF_TYPES = {"llama": False, "mistral": False, "qwen2": True, "qwen3": False}
_VOCAB_PAD = 64  # SGLang pads the vocabulary to a multiple of this before it shards it


class Gemm(NamedTuple):
    """One matrix product `[m, k] x [k, n]`; `m` is the number of tokens."""

    name: str
    n: int
    k: int


class ModelShape(BaseModel):
    """Shape of one dense decoder with grouped-query attention and a gated MLP.

    Attributes:
        context_len: longest sequence that the model accepts, in tokens.
        dtype_bytes: bytes of one weight and of one KV element (2 for bf16 and fp16).
        source: where the numbers come from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    layers: PositiveInt
    hidden: PositiveInt
    intermediate: PositiveInt
    q_heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    vocab: PositiveInt
    tied_embeddings: bool = False
    qkv_bias: bool = False
    context_len: PositiveInt
    dtype_bytes: PositiveInt = 2
    source: str

    def q_heads_per_rank(self, tp: int) -> int:
        """Query heads of one tensor-parallel rank.

        Raises:
            ConfigError: the heads, or the MLP, cannot be split evenly over `tp` ranks.
        """
        for field, value in (("q_heads", self.q_heads), ("intermediate", self.intermediate)):
            if tp < 1 or value % tp:
                raise ConfigError(
                    f"{self.name}: {field} {value} does not divide by tp {tp}; choose another tp."
                )
        return self.q_heads // tp

    def kv_heads_per_rank(self, tp: int) -> int:
        """KV heads of one rank; with more ranks than heads, several ranks hold the same head.

        Raises:
            ConfigError: neither number divides the other.
        """
        self.q_heads_per_rank(tp)
        if max(self.kv_heads, tp) % min(self.kv_heads, tp):
            raise ConfigError(
                f"{self.name}: kv_heads {self.kv_heads} does not fit tp {tp}; choose another tp."
            )
        return max(1, self.kv_heads // tp)

    def kv_replicas(self, tp: int) -> int:
        """How many ranks hold the same KV head: 1, or more once `tp` exceeds `kv_heads`."""
        return tp * self.kv_heads_per_rank(tp) // self.kv_heads

    def kv_bytes_per_token(self, tp: int) -> int:
        """Bytes of K and V of one token over all layers, on one rank."""
        return self.layers * self.kv_bytes_per_token_layer(tp)

    def kv_bytes_per_token_layer(self, tp: int) -> int:
        """Bytes of K and V of one token in one layer, on one rank."""
        return 2 * self.kv_heads_per_rank(tp) * self.head_dim * self.dtype_bytes

    def vocab_per_rank(self, tp: int) -> int:
        """Rows of the embedding and of the output head on one rank, padding included."""
        padded = -(-self.vocab // _VOCAB_PAD) * _VOCAB_PAD if tp > 1 else self.vocab
        return -(-padded // tp)

    def gemms(self, tp: int) -> tuple[Gemm, ...]:
        """Matrix products of one layer on one rank: qkv, attention output, gate and up, down."""
        q_width = self.q_heads_per_rank(tp) * self.head_dim
        kv_width = self.kv_heads_per_rank(tp) * self.head_dim
        return (
            Gemm("qkv", q_width + 2 * kv_width, self.hidden),
            Gemm("attention_out", self.hidden, q_width),
            Gemm("gate_up", 2 * self.intermediate // tp, self.hidden),
            Gemm("down", self.hidden, self.intermediate // tp),
        )

    def lm_head(self, tp: int) -> Gemm:
        """The output head on one rank; runs once a step, on the rows that sample."""
        return Gemm("lm_head", self.vocab_per_rank(tp), self.hidden)

    def weights_bytes(self, tp: int) -> int:
        """Bytes of all weights on one rank."""
        gemms = self.gemms(tp)
        layer = sum(gemm.n * gemm.k for gemm in gemms) + 2 * self.hidden
        if self.qkv_bias:
            layer += gemms[0].n
        tables = 1 if self.tied_embeddings else 2
        total = self.layers * layer + tables * self.vocab_per_rank(tp) * self.hidden + self.hidden
        return total * self.dtype_bytes


def load_model(name_or_path: str) -> ModelShape:
    """A shipped model, a YAML file of the same fields, or a Hugging Face config (file or folder).

    Raises:
        ConfigError: unknown name, unreadable file, or a model that the cost model does not cover.
    """
    path = data_file("models", ".yaml", name_or_path)
    if path.is_dir():
        path /= "config.json"
    try:
        if path.suffix == ".json":
            return from_hf_config(json.loads(path.read_text()), _hf_name(path), str(path))
        return ModelShape.model_validate(yaml.safe_load(path.read_text()))
    except ValidationError as error:
        problem = explain(error, ModelShape)
        raise ConfigError(f"{path} is not a model description: {problem}.") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not a model description: {error}") from None


def from_hf_config(config: dict[str, Any], name: str, source: str) -> ModelShape:
    """The shape that a Hugging Face `config.json` describes.

    Raises:
        ConfigError: a field that the cost model does not cover, or a field that is missing.
    """
    _refuse_unsupported(config, name)
    try:
        heads = config["num_attention_heads"]
        return ModelShape(
            name=name,
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            q_heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            tied_embeddings=config.get("tie_word_embeddings", False),
            qkv_bias=config.get("attention_bias") or _HF_TYPES[config["model_type"]],
            context_len=config["max_position_embeddings"],
            source=source,
        )
    except KeyError as error:
        raise ConfigError(f"{name}: config.json has no {error.args[0]}; it is needed.") from None


def _hf_name(path: Path) -> str:
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def _refuse_unsupported(config: dict[str, Any], name: str) -> None:
    reasons = (
        ("text_config", "multimodal models are not covered"),
        ("kv_lora_rank", "latent attention (MLA) is not covered"),
        ("num_experts", "mixture-of-experts models are not covered"),
        ("num_local_experts", "mixture-of-experts models are not covered"),
        ("n_routed_experts", "mixture-of-experts models are not covered"),
        ("quantization_config", "quantised weights are not covered"),
    )
    for field, reason in reasons:
        if config.get(field):
            raise ConfigError(f"{name}: config.json sets {field}, and {reason}.")
    # Qwen2 names a window and switches it off in another field.
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise ConfigError(
            f"{name}: config.json sets sliding_window, and windowed attention is not covered."
        )
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ConfigError(
            f"{name}: config.json sets layer_types, and only full_attention layers are covered."
        )
    model_type = config.get("model_type")
    if model_type not in _HF_TYPES:
        raise ConfigError(
            f"{name}: config.json has model_type {model_type}; covered are {', '.join(_HF_TYPES)}."
        )
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if dtype not in ("bfloat16", "float16"):
        raise ConfigError(f"{name}: config.json has dtype {dtype}; use bfloat16 or float16.")
