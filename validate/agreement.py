"""agreement: do servers say the same? `python -m granikv.validate.agreement MODEL --out FILE`.

Every variant answers the same prompts twice (so that prefixes are cached, and promoted, before the
answers that count), with the log-probability of each token that it chose. Two by two, over the
steps up to the first token that differs: by how much they differ, and how many answers agree to the
end. Bits are not expected to agree across kernels: sums are taken in another order and rounded to
bfloat16. They are between deterministic servers, whether prefixes are in HOT or not and whether the
boundary moves or not. MODEL needs weights under which attention matters, real ones or those of
`granikv.validate.random_model`: under SGLang's dummy weights all servers agree to the bit whatever
they attend to.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from granikv.validate import flip_policy
from granikv.validate.servers import NO_HOT, STRICT, VARIANTS, Variant, in_new_process, serving

# Log-probabilities of the chosen tokens, and the tokens, of each prompt.
Answers = list[tuple[list[float], list[int]]]

_OURS = VARIANTS["granikv"]
_DETERMINISTIC = {"GRANIKV_DETERMINISTIC": "1", "GRANIKV_HOT_FRACTION": str(flip_policy.SMALL)}
_MOVING = {
    "GRANIKV_REPARTITION": f"{flip_policy.__file__}:{flip_policy.FlipPolicy.__name__}",
    "GRANIKV_POLICY_INTERVAL_S": "0.001",
    "GRANIKV_MOVE_TOKENS_PER_STEP": "512",  # so that most moves take several steps
}
_CHOICES: Mapping[str, Variant] = {
    "stock": VARIANTS["stock"],
    "stock-again": VARIANTS["stock"],
    "stock-triton": VARIANTS["stock-triton"],
    "granikv": _OURS,
    "deterministic": replace(_OURS, variables=_DETERMINISTIC),
    # HOT holds nothing, so that nothing is ever promoted.
    "deterministic-cold": replace(_OURS, variables={**_DETERMINISTIC, **NO_HOT}),
    "deterministic-moves": replace(_OURS, variables={**_DETERMINISTIC, **_MOVING, **STRICT}),
}
PAIRS = (
    ("stock", "stock-again"),
    ("stock", "stock-triton"),
    ("stock", "granikv"),
    ("deterministic-cold", "deterministic"),
    ("deterministic", "deterministic-moves"),
)


def prompts(count: int, vocabulary: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Prompts on two prefixes, on one of them and more, and on none."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        return list(map(int, rng.integers(10, vocabulary, count)))

    long, short = tokens(longest), tokens(longest // 4)
    heads: tuple[list[int], ...] = (long, short, long + tokens(longest // 8), [])
    return [[*heads[i % 4], *tokens(int(rng.integers(16, 128)))] for i in range(count)]


@dataclass(frozen=True, slots=True)
class Said:
    """What a server says the second time it is asked, and how often its boundary moved by then."""

    answers: Answers
    moves: int
    moved_bytes: int


def ask(variant: Variant, model: str, asked: Sequence[list[int]], tokens: int) -> Said:
    """Start a server and ask it twice."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    with serving(variant, model) as server:
        for _ in range(2):
            said = server.client.generate(list(asked), sampling)
        state = server.run(server.client.state())
    answers = [_answer(one["meta_info"]["output_token_logprobs"]) for one in said]
    return Said(answers, int(state.get("moves", 0)), int(state.get("moved_bytes", 0)))


def _answer(chosen: Sequence[Sequence[Any]]) -> tuple[list[float], list[int]]:
    return [float(step[0]) for step in chosen], [int(step[1]) for step in chosen]


def compare(one: Said, other: Said) -> dict[str, float]:
    """Differences of log-probabilities over the steps up to the first token that differs."""
    differences, same_answers = [], 0
    pairs_of_answers = zip(one.answers, other.answers, strict=True)
    for (left, left_tokens), (right, right_tokens) in pairs_of_answers:
        pairs = list(zip(left_tokens, right_tokens, strict=True))
        steps = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        same_answers += steps == len(left_tokens)
        differences += [abs(a - b) for a, b in zip(left[:steps], right[:steps], strict=True)]
    values = np.array(differences or [np.nan])
    return {
        "prompts": len(one.answers),
        "same_answers": same_answers,
        "steps": len(differences),
        "mean": float(values.mean()),
        "p99": float(np.quantile(values, 0.99)),
        "largest": float(values.max()),
        "moves": other.moves,
        "moved_bytes": other.moved_bytes,
    }


def _ask(name: str, engine: Mapping[str, Any], model: str, file: Path, *asked: Any) -> None:
    """Ask one server, and keep what it says."""
    variant = _CHOICES[name].given(engine)
    file.write_text(json.dumps(asdict(ask(variant, model, *asked))))


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
    found = {p.stem: Said(**json.loads(p.read_text())) for p in sorted(chosen.out.glob("*.json"))}
    for one, other in PAIRS:
        if one in found and other in found:
            print(json.dumps({"pair": [one, other], **compare(found[one], found[other])}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
