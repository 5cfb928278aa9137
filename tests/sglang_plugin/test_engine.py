"""Whole engines of SGLang 0.5.17 with the plugin, on a CPU: what it answers, records and refuses.

Our kernels run in Triton's interpreter. All of SGLang but its kernels is there: the processes, the
scheduler with overlap, the pools, the model.
"""

import json
import math
import re
import shutil
from collections import Counter
from importlib.util import find_spec
from itertools import pairwise

import pytest

pytest.importorskip("torch")
pytest.importorskip("sglang.srt.mem_cache.radix_cache", reason="needs sglang 0.5.17")
if find_spec("sgl_kernel"):
    pytest.skip("needs SGLang without its kernels for cards", allow_module_level=True)

from engine_support import ON_CPU, OURS, STOCK, Engines
from tiny_model import (
    HINTED_TOKENS,
    NESTED_TOKENS,
    SHARED_TOKENS,
    VOCABULARY,
    prompts,
    write_model,
)

from granikv.core.step import Mode
from granikv.sim.metrics import summarise
from granikv.traces.live_records import convert
from granikv.traces.records import read_run
from granikv.validate import flip_policy

PROMPTS, HINTED = prompts()
SHARING = 4  # of the prompts
OUT = 4
GREEDY = {"max_new_tokens": OUT, "temperature": 0, "ignore_eos": True}
ROUND = {"prompts": PROMPTS, "sampling": GREEDY}
HINTS = {"custom_params": {"granikv_prefix_tokens": HINTED_TOKENS}}
HINTED_ROUND = {"prompts": HINTED, "sampling": GREEDY | HINTS}
STOCK_ROUNDS = [ROUND] * 3 + [HINTED_ROUND]
DENSE = {"configure": {"dispatch": "dense", "admission": "paper", "hot_fraction": 0.4}}
COLD = {"configure": {"hot_fraction": 0.00001}}
SIZE = {"max_total_tokens": 2500}
LONG_ROUND = {"prompts": PROMPTS, "sampling": GREEDY | {"max_new_tokens": 24}}
SOAK_SIZES = {
    "pool_tokens": 1800,
    "prefix_tokens": 450,
    "own_tokens": 20,
    "output_tokens": 5,
    "at_once": 8,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All engines, the longest first; each test waits for its own."""
    folder = tmp_path_factory.mktemp("engines")
    engines = Engines(folder, write_model(folder / "model"))
    same_bits = {"GRANIKV_DETERMINISTIC": "1", "GRANIKV_ADMISSION": "paper"}
    ours, stock = OURS | SIZE, STOCK | SIZE
    try:
        yield {
            "soak": engines.run("soak", _soak(engines)),
            "ours": engines.ask(
                "ours",
                ours,
                [*[ROUND] * 3, DENSE, ROUND, DENSE, HINTED_ROUND],
                GRANIKV_CHECK_STEPS="3",
                SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY="1",  # a lost slot ends the engine
            ),
            "deterministic": engines.ask(
                "deterministic", ours, [ROUND] * 2 + [COLD] + [ROUND] * 2, **same_bits
            ),
            "still": engines.ask(
                "still", ours, [LONG_ROUND] * 3, GRANIKV_HOT_FRACTION="0.3", **same_bits
            ),
            "moving": engines.ask(
                "moving",
                ours,
                [LONG_ROUND] * 3,
                GRANIKV_HOT_FRACTION="0.3",
                GRANIKV_REPARTITION=f"{flip_policy.__file__}:FlipPolicy",
                GRANIKV_POLICY_INTERVAL_S="0.001",
                GRANIKV_MOVE_TOKENS_PER_STEP="16",
                SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY="1",
                **same_bits,
            ),
            "stock": engines.ask("stock", stock, STOCK_ROUNDS),
            "observed": engines.ask("observed", stock, STOCK_ROUNDS, record=True),
            "alone": engines.ask("alone", ours | {"radix_cache_backend": None}),
            "pages": engines.ask("pages", ours | {"page_size": 16}),
            "variable": engines.ask("variable", ours, GRANIKV_HOT_FRACTOIN="0.3"),
            "both": engines.ask("both", ours, GRANIKV_OBSERVE=str(folder / "both")),
        }
    finally:
        engines.close()


def _soak(engines):
    return [
        *("-m", "granikv.validate.soak", str(engines.model)),
        *("--requests", "60", "--vocabulary", str(VOCABULARY)),
        *("--sizes", json.dumps(SOAK_SIZES)),
        *("--engine", json.dumps({**ON_CPU, "chunked_prefill_size": 64})),
    ]


def _ended_well(runs, name):
    ended = runs[name].result()
    assert ended.code == 0, ended.log[-4000:]
    return ended


def _refused(runs, name):
    ended = runs[name].result()
    assert ended.code != 0
    assert ended.answers == []
    return ended.log


def _tokens(answers):
    return [one["tokens"] for one in answers]


def _phases(ended):
    """Records of requests and steps for each list of prompts; lists are asked one by one."""
    requests, steps = ended.requests(), ended.steps()
    of_phase = [
        [request for request in requests if request["rid"] in {one["rid"] for one in answers}]
        for answers in ended.answers
    ]
    begins_s = [min(request["arrival_s"] for request in some) for some in of_phase] + [math.inf]
    return [
        (some, [step for step in steps if begin_s <= step["start_s"] < end_s])
        for some, (begin_s, end_s) in zip(of_phase, pairwise(begins_s), strict=True)
    ]


def _decodes(steps):
    return [step for step in steps if step["kind"] == "decode"]


def _total(records, column):
    return sum(record[column] for record in records)


# ---------------------------------------------------------------------- what it answers


def test_tokens_are_those_of_stock_sglang(runs):
    """Uncached, cached and promoted, by the dispatcher's choice and by the dense pass."""
    ours, stock = _ended_well(runs, "ours"), _ended_well(runs, "stock")
    *plain, hinted = stock.answers
    for answers in [*plain, *ours.answers[:-1]]:
        assert _tokens(answers) == _tokens(plain[0])
    assert _tokens(ours.answers[-1]) == _tokens(hinted)
    for answers, same in zip(ours.answers, [*plain, plain[0], hinted], strict=True):
        for one, other in zip(answers, same, strict=True):
            assert one["logprobs"] == pytest.approx(other["logprobs"], abs=0.02)


def test_prompts_are_cached_from_the_second_round_on(runs):
    ours = _ended_well(runs, "ours")
    for number in (1, 2):
        cached = [one["cached_tokens"] for one in ours.answers[number]]
        assert cached == [len(prompt) - 1 for prompt in PROMPTS]


def test_deterministic_answers_are_the_same_bits_with_and_without_slabs(runs):
    ended = _ended_well(runs, "deterministic")
    # Of each kind the round in which all prompts are cached: chunks of prefill are not our subject.
    _, hot, _, cold = ended.answers
    assert _tokens(hot) == _tokens(_ended_well(runs, "stock").answers[0])
    assert [one["logprobs"] for one in hot] == [one["logprobs"] for one in cold]
    in_hot = [_total(requests, "hot_tokens") for requests, _ in _phases(ended)]
    assert in_hot[1] >= SHARING * SHARED_TOKENS
    assert in_hot[2:] == [0, 0]


def test_answers_are_the_same_bits_while_the_boundary_moves(runs):
    still, moving = _ended_well(runs, "still"), _ended_well(runs, "moving")
    # In the first round what is prefilled together hangs on the clock.
    for answers, same in zip(moving.answers[1:], still.answers[1:], strict=True):
        assert _tokens(answers) == _tokens(same)
        assert [one["logprobs"] for one in answers] == [one["logprobs"] for one in same]
    sizes = [int(size) for size in re.findall(r"HOT has (\d+) tokens now", moving.log)]
    assert {750, 1500} <= set(sizes)
    assert len(sizes) >= 6
    moved = _total(moving.steps(), "migrated_tokens") - _total(still.steps(), "migrated_tokens")
    assert moved > 0
    assert max(step["migrated_tokens"] for step in moving.steps() if step["kind"] == "decode") > 0
    for ended in (still, moving):
        assert _total(_phases(ended)[2][0], "hot_tokens") >= SHARING * SHARED_TOKENS


def test_checked_steps_find_no_difference(runs):
    log = _ended_well(runs, "ours").log
    found = re.findall(r"GraniKV check: (\d+) steps compared with paged, (\d+) layers failed", log)
    steps, failures = map(int, found[-1])
    assert steps >= len(_decodes(_ended_well(runs, "ours").steps())) // 3 - 1
    assert failures == 0


def test_a_stock_server_answers_the_same_when_it_is_observed(runs):
    observed, stock = _ended_well(runs, "observed"), _ended_well(runs, "stock")
    assert [_tokens(one) for one in observed.answers] == [_tokens(one) for one in stock.answers]
    assert not stock.recording.exists()
    assert "granikv" not in stock.log.lower().replace("skipping plugin granikv", "")


# ---------------------------------------------------------------------- what it records


def test_a_stock_server_is_recorded_as_what_it_is(runs, tmp_path):
    folder = shutil.copytree(_ended_well(runs, "observed").recording, tmp_path / "copy")
    convert(folder)
    found = read_run(folder)
    assert (found.header.size_tokens, found.header.hot_tokens) == (SIZE["max_total_tokens"], 0)
    assert found.header.flags["attention_backend"] == STOCK["attention_backend"]
    steps = found.steps.collect()
    assert set(steps["kind"]) == {"extend", "decode"}
    assert set(steps["segments_json"]) == {"[]"}
    for column in ("hot_used", "hot_misses", "migrated_tokens"):
        assert set(steps[column]) == {0}
    assert (steps["gpu_us"] > 0).all()
    # Prompts and answers stay in the tree; nothing else takes slots.
    assert steps["cold_free"][0] > steps["cold_free"][-1] > 0
    decodes = steps.filter(steps["kind"] == "decode").height
    assert summarise(found.requests, found.steps).decode_steps_by_mode == {"paged": decodes}


@pytest.mark.parametrize("name", ["ours", "deterministic", "observed"])
def test_every_request_is_recorded_once(runs, name):
    ended = _ended_well(runs, name)
    asked = [one for answers in ended.answers for one in answers]
    records = {record["rid"]: record for record in ended.requests()}
    assert len(ended.requests()) == len(records) == len(asked)
    for answer in asked:
        record = records[answer["rid"]]
        assert record["status"] == "finished"
        assert record["output_tokens"] == OUT
        assert record["cached_tokens"] == answer["cached_tokens"]
        assert record["arrival_s"] < record["first_token_s"] < record["finish_s"]


@pytest.mark.parametrize("name", ["ours", "deterministic", "observed"])
def test_steps_compute_and_read_what_requests_need(runs, name):
    """A row decodes once for each token of its output: the last time, overlap scheduling does not
    know yet that it has ended.
    """
    for requests, steps in _phases(_ended_well(runs, name)):
        decodes = _decodes(steps)
        uncached = sum(request["prompt_tokens"] - request["cached_tokens"] for request in requests)
        assert _total(steps, "prefill_tokens") == uncached
        assert _total(decodes, "rows") == OUT * len(requests)
        shared = sum(length * rows for step in decodes for _, length, rows in step["segments"])
        assert _total(decodes, "private_tokens") + shared == sum(
            request["prompt_tokens"] + produced
            for request in requests
            for produced in range(1, OUT + 1)
        )
        assert _total(steps, "retractions") == _total(steps, "evictions") == 0


@pytest.mark.parametrize("name", ["ours", "deterministic", "observed", "soak"])
def test_extends_say_what_each_request_computes(runs, name):
    for step in _ended_well(runs, name).steps():
        assert len(step["extend"]) == (step["rows"] if step["kind"] == "extend" else 0)
        assert sum(new for new, _ in step["extend"]) == step["prefill_tokens"]
        assert all(new > 0 and prefix >= 0 for new, prefix in step["extend"])


@pytest.mark.parametrize("name", ["ours", "deterministic", "observed"])
def test_prompts_are_extended_chunk_by_chunk(runs, name):
    """The first chunk begins behind what was cached, the next where the one before has ended."""
    for requests, steps in _phases(_ended_well(runs, name)):
        ends = Counter(new + prefix for step in steps for new, prefix in step["extend"])
        begins = Counter(prefix for step in steps for _, prefix in step["extend"])
        prompts_end = Counter(request["prompt_tokens"] for request in requests)
        cached = Counter(request["cached_tokens"] for request in requests)
        assert ends + cached == begins + prompts_end


@pytest.mark.parametrize("name", ["ours", "deterministic", "observed", "soak"])
def test_steps_run_one_after_the_other(runs, name):
    steps = _ended_well(runs, name).steps()
    for step, following in pairwise(steps):
        assert step["iter"] < following["iter"]
        # Both are rounded to 0.1 us or less.
        assert step["start_s"] + step["gpu_us"] * 1e-6 <= following["start_s"] + 2e-7


def test_prefixes_that_requests_share_are_promoted_and_read_once(runs):
    uncached, *cached, dense, _ = _phases(_ended_well(runs, "ours"))
    # 60 tokens more are too few for a slab, until another policy wants them.
    for (_, steps), tokens in ((uncached, SHARED_TOKENS), (dense, NESTED_TOKENS)):
        assert _total(steps, "migrated_tokens") == steps[-1]["hot_used"] == tokens
    for _, steps in cached:
        assert _total(steps, "migrated_tokens") == 0
        assert {step["hot_used"] for step in steps} == {SHARED_TOKENS}
    lowest = [Mode.CASCADE] * 3 + [Mode.DENSE]
    for (_, steps), mode in zip((uncached, *cached, dense), lowest, strict=True):
        for step in _decodes(steps):
            assert step["segments"][0][1:] == [SHARED_TOKENS, SHARING]
            assert min(step["modes"]) >= mode


def test_a_hinted_prefix_is_prefilled_in_place(runs):
    """In chunks; it lies in HOT at once, and nothing is ever copied."""
    requests, steps = _phases(_ended_well(runs, "ours"))[-1]
    extends = [step for step in steps if step["kind"] == "extend"]
    assert len(extends) >= 3
    assert {step["hot_used"] for step in steps} == {HINTED_TOKENS}
    assert _total(steps, "migrated_tokens") == 0
    assert [request["hot_tokens"] for request in requests] == [HINTED_TOKENS] * len(HINTED)
    *_, last = _decodes(steps)
    assert [segment[1:] for segment in last["segments"]] == [[HINTED_TOKENS, len(HINTED)]]


# ---------------------------------------------------------------------- under load, and refusals


def test_a_soak_ends_clean(runs):
    """On pools that are too small, with aborted requests and every admission and dispatch."""
    steps = _ended_well(runs, "soak").steps()
    assert _total(steps, "evictions") > 0
    assert _total(steps, "migrated_tokens") > 0


def test_the_attention_backend_alone_is_refused(runs):
    assert "--attention-backend granikv needs --radix-cache-backend granikv" in _refused(
        runs, "alone"
    )


def test_pages_are_refused(runs):
    assert "--radix-cache-backend granikv needs --page-size 1" in _refused(runs, "pages")


def test_our_server_is_not_recorded_as_a_stock_one(runs):
    assert "GRANIKV_OBSERVE records a server with SGLang's own backends" in _refused(runs, "both")


def test_a_wrong_variable_is_named(runs):
    log = _refused(runs, "variable")
    assert "unknown key hot_fractoin, did you mean hot_fraction?" in log
