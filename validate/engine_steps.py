"""Step times of a live SGLang engine: `python -m granikv.validate.engine_steps MODEL --out FILE`.

MODEL is a model folder; weights may be missing (`load_format="dummy"`): speeds are real, texts are
noise. Runs on the GPU host and needs `sglang` alone. Each line is a measured row (the columns of
`granikv.cost_models.rows`) of op `step`:

| backend | what one time is |
| --- | --- |
| `sglang_fa3_decode` | mean decode step of a full batch: the time of 144 output tokens less that of 16, over 128. Prompts are cached before, so both hold the same prefill |
| `sglang_fa3_extend` | one request of `m` new tokens over cached ones, one output token: the engine's whole answer time, so an upper bound of the step |

`private_tokens` is summed over rows at the middle of the decode; segments have base 0, since a stock
engine's prefixes lie in scattered slots.
"""  # noqa: E501

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from granikv.validate.servers import COMMON, gpu_state

_SHORT, _LONG = 16, 144
_REPEATS = 3
_EXTEND_REPEATS = 7
_VOCABULARY = (10, 100_000)  # token ids that every model here has


@dataclass(frozen=True, slots=True)
class Batch:
    """`rows` prompts of `own_tokens` behind one common prefix of `shared_tokens`."""

    rows: int
    own_tokens: int
    shared_tokens: int = 0


# The most valuable first: a run may be cut short.
DECODE = (
    Batch(1, 512), Batch(8, 512), Batch(32, 512), Batch(128, 512), Batch(256, 512),
    Batch(32, 256, 8192), Batch(128, 256, 8192), Batch(256, 256, 8192), Batch(128, 256, 16384),
    Batch(256, 256, 16384), Batch(32, 4096), Batch(128, 2048), Batch(256, 2048), Batch(64, 512),
    Batch(8, 4096), Batch(200, 512), Batch(1, 16384), Batch(256, 256, 2048),
)  # fmt: skip
EXTEND = (
    (16, 0), (512, 0), (2048, 0), (8192, 0), (512, 16384), (128, 16384), (2048, 16384), (128, 0),
    (512, 8192), (4096, 4096), (1024, 0), (4096, 0), (128, 4096), (1024, 32768), (8192, 32768),
)  # fmt: skip
PARTS = ("extend", "decode")


def measure(model: str, out: Path, gpu: str, parts: Sequence[str], prefill_graphs: bool) -> None:
    """Start an engine on `model` and append one row per point of `parts` to `out`."""
    import sglang

    arguments = COMMON | {
        "attention_backend": "fa3",
        "disable_prefill_cuda_graph": not prefill_graphs,
    }
    engine = sglang.Engine(model_path=model, **arguments)
    config = json.loads((Path(model) / "config.json").read_text())
    fixed = {
        "op": "step",
        "gpu": gpu,
        "dtype": "bfloat16",
        "num_q_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "page_size": 1,
        "n": None,
        "k": None,
        "num_gpus": 1,
        "bytes": None,
        "versions_json": json.dumps({name: version(name) for name in ("sglang", "torch")}),
        "clocks": gpu_state().get("clocks"),
        "date": datetime.now(UTC).date().isoformat(),
        "source": f"granikv.validate.engine_steps {'graphs ' * prefill_graphs}{Path(model).name}",
    }
    rng = random.Random(0)
    with out.open("a") as file:

        def write(**row: Any) -> None:
            line = fixed | row
            print(line["backend"], line["rows"], line["m"], line["segments_json"], line["times_us"])
            file.write(json.dumps(line) + "\n")
            file.flush()

        for new_tokens, cached_tokens in EXTEND if "extend" in parts else ():
            write(**_extend_row(engine, new_tokens, cached_tokens, rng))
        for batch in DECODE if "decode" in parts else ():
            write(**_decode_row(engine, batch, rng))
    engine.shutdown()


def _decode_row(engine: Any, batch: Batch, rng: random.Random) -> dict[str, Any]:
    shared = _tokens(rng, batch.shared_tokens)
    prompts = [shared + _tokens(rng, batch.own_tokens) for _ in range(batch.rows)]
    if shared:
        _generate(engine, [shared + _tokens(rng, 1)], 1)
    _generate(engine, prompts, 1)
    times = []
    for _ in range(_REPEATS):
        short_s = _seconds(lambda: _generate(engine, prompts, _SHORT))
        long_s = _seconds(lambda: _generate(engine, prompts, _LONG))
        times.append((long_s - short_s) / (_LONG - _SHORT) * 1e6)
    is_shared = batch.shared_tokens and batch.rows > 1
    own = batch.own_tokens + (0 if is_shared else batch.shared_tokens)
    return {
        "backend": "sglang_fa3_decode",
        "rows": batch.rows,
        "segments_json": json.dumps([[0, batch.shared_tokens, batch.rows]] if is_shared else []),
        "private_tokens": batch.rows * (own + (_SHORT + _LONG) // 2),
        "m": batch.rows,
        "times_us": times,
    }


def _extend_row(
    engine: Any, new_tokens: int, cached_tokens: int, rng: random.Random
) -> dict[str, Any]:
    cached = _tokens(rng, cached_tokens)
    if cached:
        _generate(engine, [cached], 1)
    times = []
    for _ in range(_EXTEND_REPEATS):
        prompt = cached + _tokens(rng, new_tokens)
        times.append(_seconds(lambda: _generate(engine, [prompt], 1)) * 1e6)  # noqa: B023
    return {
        "backend": "sglang_fa3_extend",
        "rows": 1,
        "segments_json": "[]",
        "private_tokens": cached_tokens + new_tokens,
        "m": new_tokens,
        "times_us": times,
    }


def _generate(engine: Any, prompts: list[list[int]], tokens: int) -> None:
    engine.generate(
        input_ids=prompts,
        sampling_params={"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
    )


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(*_VOCABULARY) for _ in range(count)]


def _seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Step times of a live SGLang engine.")
    parser.add_argument("model", help="folder with a config.json")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--gpu", default="h200-sxm", help="name of the hardware file")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="what to time")
    parser.add_argument("--prefill-graphs", action="store_true", help="as servers do by default")
    chosen = parser.parse_args()
    measure(chosen.model, chosen.out, chosen.gpu, chosen.part, chosen.prefill_graphs)


if __name__ == "__main__":
    main()
