"""Whole engines of SGLang on a CPU, each in processes of its own, on a model that a test writes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors.torch import save_file

from granikv.sglang_plugin.request_log import REQUEST_COLUMNS
from granikv.sglang_plugin.step_log import STEP_COLUMNS

_FOLDER = Path(__file__).parent / "cpu_engine"
_ENGINE_GB = 3  # of memory, its three processes together
_TIMEOUT_S = 600
VOCABULARY = 512
LAYERS = 2
_Q_HEADS, _KV_HEADS, _HEAD_DIM, _HIDDEN, _INNER = 4, 2, 64, 256, 64
_SEED = 0
OURS = {"attention_backend": "granikv", "radix_cache_backend": "granikv"}
STOCK = {"attention_backend": "torch_native"}
ON_CPU: Mapping[str, Any] = {
    "load_format": "auto",
    "device": "cpu",
    "dtype": "float16",
    "disable_cuda_graph": True,
    "max_running_requests": 8,
    "chunked_prefill_size": 128,
    "log_level": "info",
}


def write_model(folder: Path) -> Path:
    """A Llama of two layers whose next token hangs on what attention reads.

    Weights are random. Scores spread by 3 or so, so that attention picks a few tokens, and what it
    returns weighs more than the token itself. SGLang's dummy weights are so small that all tokens
    count alike, and for nearly nothing: a wrong slot would not show.
    """
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": LAYERS,
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
    for layer in range(LAYERS):
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


def prompts(seed: int = 1) -> tuple[list[list[int]], list[list[int]], int]:
    """Prompts on a prefix, on a longer one that begins with it and on none; then some on another
    prefix, and its length.
    """
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        drawn: list[int] = rng.integers(3, VOCABULARY, count).tolist()
        return drawn

    shared = tokens(280)
    nested = shared + tokens(60)
    hinted = tokens(300)
    heads = ((shared, 9), (shared, 5), (nested, 7), (nested, 3), (shared, 1), ([], 20), ([], 33))
    plain = [head + tokens(own) for head, own in heads]
    return plain, [hinted + tokens(own) for own in (4, 7, 9)], len(hinted)


# ---------------------------------------------------------------------- processes


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended.

    Attributes:
        code: its exit code.
        log: what it and its children printed.
        answers: for each list of prompts, what `cpu_engine/ask.py` tells of each answer.
        recording: folder of its records.
    """

    code: int
    log: str
    answers: list[list[dict[str, Any]]]
    recording: Path

    def requests(self) -> list[dict[str, Any]]:
        """Records of requests."""
        return self._lines("requests", REQUEST_COLUMNS)

    def steps(self) -> list[dict[str, Any]]:
        """Records of steps, with their segments and modes as lists."""
        read = self._lines("steps", STEP_COLUMNS)
        for step in read:
            step["segments"] = json.loads(step.pop("segments_json"))
            step["modes"] = json.loads(step.pop("plan_json")).get("modes", [])
        return read

    def _lines(self, kind: str, columns: Sequence[str]) -> list[dict[str, Any]]:
        lines = (self.recording / f"{kind}-rank0.jsonl").read_text().splitlines()
        return [dict(zip(columns, json.loads(line), strict=True)) for line in lines]


@dataclass
class Engines:
    """Runs engines, as many at once as cores and memory are for.

    A scheduler that fails takes along its parent, all children of that, and nothing else.
    """

    folder: Path
    model: Path
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        room = int(psutil.virtual_memory().available / 1e9 / _ENGINE_GB)
        self._pool = ThreadPoolExecutor(max(1, min(os.cpu_count() or 1, room)))

    def ask(
        self,
        name: str,
        engine: Mapping[str, Any],
        to_do: Sequence[Mapping[str, Any]] = (),
        **variables: str,
    ) -> Future[Ended]:
        """Start an engine and give it things to do (see `cpu_engine/ask.py`)."""
        job = {"model": str(self.model), "engine": {**ON_CPU, **engine}, "to_do": to_do}
        file = self.folder / f"{name}.job.json"
        file.write_text(json.dumps(job))
        command = [str(_FOLDER / "ask.py"), str(file), str(self._answers(name))]
        return self.run(name, command, **variables)

    def run(self, name: str, command: Sequence[str], **variables: str) -> Future[Ended]:
        """Start Python; `variables` join an environment without any of GraniKV or SGLang."""
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("GRANIKV_", "SGLANG_"))}
        paths = filter(None, (str(_FOLDER), os.environ.get("PYTHONPATH")))
        fixed = {
            "PYTHONPATH": os.pathsep.join(paths),
            "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(self.folder),
            "GRANIKV_GPU": "h200-sxm",
            "GRANIKV_RECORD": str(self.folder / name),
        }
        return self._pool.submit(self._run, name, command, plain | fixed | variables)

    def _run(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Ended:
        file = self.folder / f"{name}.log"
        with file.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *command],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append(process)
        try:
            code = process.wait(_TIMEOUT_S)
        finally:
            _kill(process)
        answers = self._answers(name)
        said = json.loads(answers.read_text()) if answers.exists() else []
        return Ended(code, file.read_text(errors="replace"), said, self.folder / name)

    def _answers(self, name: str) -> Path:
        return self.folder / f"{name}.answers.json"

    def close(self) -> None:
        """End everything that still runs."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._running:
            _kill(process)
        self._pool.shutdown()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The whole session, which children that lost their parent are still in."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
