"""agreement: do servers say the same? `python -m granikv.validate.agreement MODEL --out FILE`.

Every variant answers the same prompts twice (so that prefixes are cached, and promoted, before the
answers that count), with the log-probability of each token that it chose. Against stock SGLang
with FlashAttention-3, over the steps up to the first token that differs: by how much they differ,
and how many answers agree to the end. Bits are not expected to agree across kernels: sums are
taken in another order and rounded to bfloat16. MODEL needs weights under which attention matters,
real ones or those of `granikv.validate.random_model`: under SGLang's dummy weights all servers
agree to the bit whatever they attend to.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from granikv.validate.servers import NO_HOT, VARIANTS, Variant, in_new_process, serving

# Log-probabilities of the chosen tokens, and the tokens, of each prompt.
Answers = list[tuple[list[float], list[int]]]

_OURS = VARIANTS["granikv"]
_DETERMINISTIC = {"GRANIKV_DETERMINISTIC": "1"}
_CHOICES: Mapping[str, Variant] = {
    "stock": VARIANTS["stock"],
    "stock-again": VARIANTS["stock"],
    "stock-triton": VARIANTS["stock-triton"],
    "granikv": _OURS,
    "deterministic": replace(_OURS, variables=_DETERMINISTIC),
    # HOT holds nothing, so that nothing is ever promoted.
    "deterministic-cold": replace(_OURS, variables={**_DETERMINISTIC, **NO_HOT}),
}
PAIRS = (
    ("stock", "stock-again"),
    ("stock", "stock-triton"),
    ("stock", "granikv"),
    ("deterministic-cold", "deterministic"),
)


def prompts(count: int, vocabulary: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Prompts on two prefixes, on one of them and more, and on none."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        return list(map(int, rng.integers(10, vocabulary, count)))

    long, short = tokens(longest), tokens(longest // 4)
    heads: tuple[list[int], ...] = (long, short, long + tokens(longest // 8), [])
    return [[*heads[i % 4], *tokens(int(rng.integers(16, 128)))] for i in range(count)]


def answers(variant: Variant, model: str, asked: Sequence[list[int]], tokens: int) -> Answers:
    """What a server says, the second time it is asked."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    with serving(variant, model) as server:
        for _ in range(2):
            said = server.client.generate(list(asked), sampling)
    return [_answer(one["meta_info"]["output_token_logprobs"]) for one in said]


def _answer(chosen: Sequence[Sequence[Any]]) -> tuple[list[float], list[int]]:
    return [float(step[0]) for step in chosen], [int(step[1]) for step in chosen]


def compare(one: Answers, other: Answers) -> dict[str, float]:
    """Differences of log-probabilities over the steps up to the first token that differs."""
    differences, same_answers = [], 0
    for (left, left_tokens), (right, right_tokens) in zip(one, other, strict=True):
        pairs = list(zip(left_tokens, right_tokens, strict=True))
        steps = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        same_answers += steps == len(left_tokens)
        differences += [abs(a - b) for a, b in zip(left[:steps], right[:steps], strict=True)]
    values = np.array(differences or [np.nan])
    return {
        "prompts": len(one),
        "same_answers": same_answers,
        "steps": len(differences),
        "mean": float(values.mean()),
        "p99": float(np.quantile(values, 0.99)),
        "largest": float(values.max()),
    }


def _ask(name: str, engine: Mapping[str, Any], model: str, file: Path, *asked: Any) -> None:
    """Ask one server, and keep what it says."""
    variant = _CHOICES[name].given(engine)
    file.write_text(json.dumps(answers(variant, model, *asked)))


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line; variants whose answers are in the folder are not asked again."""
    parser = argparse.ArgumentParser(description="Compares the answers of servers.")
    parser.add_argument("model", help="folder with a config.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for the answers")
    parser.add_argument("--variants", default=",".join(_CHOICES), help="with commas")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--vocabulary", type=int, default=100_000, help="token ids below it")
    parser.add_argument("--longest", type=int, default=4096, help="tokens of the longest prefix")
    parser.add_argument("--engine", default="{}", help="more arguments of sglang.Engine, as JSON")
    chosen = parser.parse_args(argv)
    chosen.out.mkdir(parents=True, exist_ok=True)
    asked = prompts(chosen.prompts, chosen.vocabulary, chosen.longest)
    for name in chosen.variants.split(","):
        file = chosen.out / f"{name}.json"
        if file.exists():
            continue
        engine = {"load_format": "auto", **json.loads(chosen.engine)}
        in_new_process(_ask, name, engine, chosen.model, file, asked, chosen.tokens)
    found = {p.stem: json.loads(p.read_text()) for p in sorted(chosen.out.glob("*.json"))}
    for one, other in PAIRS:
        if one in found and other in found:
            print(json.dumps({"pair": [one, other], **compare(found[one], found[other])}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
