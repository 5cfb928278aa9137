"""Whole engines of SGLang 0.5.17 with the plugin, on a CPU: what it answers, records and refuses.

Our kernels run in Triton's interpreter, and all of SGLang but its kernels is real: tokenizer manager,
scheduler with overlap, memory pools, radix tree, model.
"""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("sglang.srt.mem_cache.radix_cache", reason="needs sglang 0.5.17")

from engine_support import ON_CPU, OURS, STOCK, Engines, prompts, write_model  # noqa: E402

PROMPTS, HINTED, HINTED_TOKENS = prompts()
OUT = 4
GREEDY = {"max_new_tokens": OUT, "temperature": 0, "ignore_eos": True}
ROUND = {"prompts": PROMPTS, "sampling": GREEDY}
HINTS = {"custom_params": {"granikv_prefix_tokens": HINTED_TOKENS}}
HINTED_ROUND = {"prompts": HINTED, "sampling": GREEDY | HINTS}
DENSE = {"configure": {"dispatch": "dense", "admission": "paper", "hot_fraction": 0.4}}
COLD = {"configure": {"hot_fraction": 0.00001}}
SIZE = {"max_total_tokens": 2500}
SOAK_SIZES = {
    "pool_tokens": 1200,
    "prefix_tokens": 150,
    "own_tokens": 20,
    "output_tokens": 5,
    "at_once": 12,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All engines, the longest first; each test waits for its own."""
    folder = tmp_path_factory.mktemp("engines")
    engines = Engines(folder, write_model(folder / "model"))
    ours, stock = OURS | SIZE, STOCK | SIZE
    try:
        yield {
            "soak": engines.run("soak", _soak(engines)),
            "ours": engines.ask(
                "ours",
                ours,
                [ROUND] * 3 + [DENSE] + [ROUND] * 2 + [DENSE, HINTED_ROUND],
                GRANIKV_CHECK_STEPS="3",
            ),
            "deterministic": engines.ask(
                "deterministic",
                ours,
                [ROUND] * 2 + [COLD] + [ROUND] * 2,
                GRANIKV_DETERMINISTIC="1",
                GRANIKV_ADMISSION="paper",
            ),
            "stock": engines.ask("stock", stock, [ROUND] * 3 + [HINTED_ROUND]),
            "alone": engines.ask("alone", ours | {"radix_cache_backend": None}),
            "pages": engines.ask("pages", ours | {"page_size": 16}),
            "variable": engines.ask("variable", ours, GRANIKV_HOT_FRACTOIN="0.3"),
        }
    finally:
        engines.close()


def _soak(engines):
    return [
        *("-m", "granikv.validate.soak", str(engines.model)),
        *("--requests", "60", "--vocabulary", "500"),
        *("--sizes", json.dumps(SOAK_SIZES)),
        *("--engine", json.dumps({**ON_CPU, "chunked_prefill_size": 64})),
    ]

# --- experiments
def test_x(runs):
    import time
    t=time.time()
    for k,v in runs.items():
        r=v.result(); print(k, r.code, time.time()-t, flush=True)
