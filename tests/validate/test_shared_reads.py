"""What rows share of COLD, on our own servers and stock ones, from the requests that decode."""

import json
from pathlib import Path

import polars as pl
import pytest

from granikv.core.step import Segment
from granikv.traces.records import REQUEST_SCHEMA, STEP_SCHEMA, RunHeader
from granikv.traces.request import Request, Run
from granikv.validate.compare.live_run import LiveRun
from granikv.validate.compare.shared_reads import SharedReads

LONG, SHORT = Run(1, 1000), Run(2, 500)
# Three requests behind the long prefix and two behind the short one; a sixth shares nothing.
PROMPTS = (LONG, LONG, LONG, SHORT, SHORT, Run(9, 700))
EXTEND = {"kind": "extend", "plan_json": '{"extend": [[50, 1000]]}'}


def _step(private_tokens: int, told: tuple[Segment, ...] = (), **values: object) -> dict:
    body = dict.fromkeys(STEP_SCHEMA, 0) | {
        "kind": "decode", "rows": 5, "steps": 1, "start_s": 5.0, "gpu_us": 9000.0,
        "private_tokens": private_tokens, "segments_json": json.dumps([list(s) for s in told]),
        "plan_json": "{}",
    }  # fmt: skip
    return body | values


def _run(*steps: dict, variant: str = "granikv", ends: tuple[float, ...] = (10.0,) * 6) -> LiveRun:
    requests = [
        dict.fromkeys(REQUEST_SCHEMA)
        | {"id": i, "first_token_s": 0.0, "finish_s": end, "status": "finished"}
        for i, end in enumerate(ends)
    ]
    trace = [Request(i, 0.0, (prefix, Run(100 + i, 10)), 100) for i, prefix in enumerate(PROMPTS)]
    header = RunHeader(
        kind="live", model="llama-3.1-8b", gpu="NVIDIA H200", size_tokens=60_000, hot_tokens=0,
        clock_origin="x", trace="made", flags={"variant": variant},
    )  # fmt: skip
    frames = (
        pl.DataFrame(requests, REQUEST_SCHEMA), pl.DataFrame(list(steps), STEP_SCHEMA)
    )  # fmt: skip
    return LiveRun(Path("run"), header, *frames, trace, ())


@pytest.mark.parametrize("variant", ["granikv", "stock"])
def test_prefixes_that_no_segment_tells_are_found(variant: str) -> None:
    """3 x 1,000 and 2 x 500 tokens, and 5 x 10 of their own."""
    found, private = SharedReads.of(_run(variant=variant)).at(_step(4050))
    assert set(found) == {Segment(0, 1000, 3), Segment(0, 500, 2)}
    assert private == 50


def test_a_told_segment_is_what_is_hot_of_its_own_prefix() -> None:
    reads = SharedReads.of(_run())
    # 600 tokens of the long prefix are HOT: its three readers share 400 more in COLD.
    hot = Segment(7, 600, 3)
    found, private = reads.at(_step(3 * 400 + 2 * 500 + 50, (hot,)))
    assert found == (hot, Segment(0, 400, 3), Segment(0, 500, 2))
    assert private == 50
    # Both are long enough for 500 tokens: two readers are nearer to the short one's.
    hot = Segment(7, 500, 2)
    found, private = reads.at(_step(3 * 1000 + 50, (hot,)))
    assert found == (hot, Segment(0, 1000, 3))
    assert private == 50
    # With three readers the same length is the long one's.
    hot = Segment(7, 500, 3)
    found, _ = reads.at(_step(3 * 500 + 2 * 500 + 50, (hot,)))
    assert set(found) == {hot, Segment(0, 500, 3), Segment(0, 500, 2)}
    # 600 tokens do not fit into the short one, whoever reads them.
    hot = Segment(7, 600, 2)
    found, _ = reads.at(_step(3 * 400 + 2 * 500 + 50, (hot,)))
    assert found == (hot, Segment(0, 400, 3), Segment(0, 500, 2))
    # All of it.
    both = (Segment(7, 500, 2), Segment(600, 1000, 3))
    assert reads.at(_step(50, both)) == (both, 50)


def test_readers_are_those_that_decode_at_the_time() -> None:
    reads = SharedReads.of(_run(ends=(10.0, 10.0, 4.0, 3.0, 10.0, 10.0)))
    assert reads.at(_step(3030, rows=3)) == ((Segment(0, 1000, 2),), 1030)
    assert set(reads.at(_step(4050, start_s=2.0))[0]) == {Segment(0, 1000, 3), Segment(0, 500, 2)}


def test_no_more_rows_share_than_there_are() -> None:
    """A row is behind one prefix. Of 4 rows only one is left for the second."""
    reads = SharedReads.of(_run())
    assert reads.at(_step(4040, rows=4)) == ((Segment(0, 1000, 3),), 1040)
    # The HOT prefix's rows are not there for another either.
    hot = Segment(7, 1000, 3)
    assert reads.at(_step(1040, (hot,), rows=4)) == ((hot,), 1040)
    # Nor more tokens than were read.
    assert reads.at(_step(2500)) == ((Segment(0, 1000, 2),), 500)


def test_filled_keeps_what_was_told() -> None:
    hot = Segment(7, 600, 3)
    plan = json.dumps({"modes": [2], "launch": "fused", "row_split": []})
    run = _run(_step(2250, (hot,), plan_json=plan), _step(4050), _step(0, **EXTEND))
    filled = SharedReads.of(run).filled(run.steps)
    first, second, extend = filled.iter_rows(named=True)
    assert json.loads(first["segments_json"]) == [[7, 600, 3], [0, 400, 3], [0, 500, 2]]
    assert json.loads(first["plan_json"]) == {
        "modes": [2, 0, 0],
        "launch": "fused",
        "row_split": [],
    }
    assert json.loads(second["plan_json"]) == {
        "modes": [0, 0],
        "launch": "two_call",
        "row_split": [],
    }
    assert filled["private_tokens"].to_list() == [50, 50, 0]
    assert extend["plan_json"] == EXTEND["plan_json"]


def test_a_run_without_a_trace_says_itself_what_it_shared() -> None:
    hot = Segment(7, 600, 3)
    run = _run(_step(2250, (hot,)))
    alone = LiveRun(run.folder, run.header, run.requests, run.steps, None, ())
    assert SharedReads.of(alone).at(_step(2250, (hot,))) == ((hot,), 2250)
    assert SharedReads.of(alone).filled(run.steps).equals(run.steps)


def test_without_requests_nobody_knows_what_rows_shared_before_a_slab_was_theirs() -> None:
    slab = (Segment(7, 1000, 5),)
    told = [(1, ()), (5, ()), (3, ()), (5, ()), (5, slab), (6, ()), (5, slab), (1, ()), (5, ())]
    steps = [
        _step(5000, segments, rows=rows, iter=number, start_s=float(number))
        for number, (rows, segments) in enumerate(told)
    ]
    steps.insert(3, _step(0, **EXTEND, iter=20, start_s=2.5))
    run = _run(*steps)
    reads = SharedReads.of(LiveRun(run.folder, run.header, run.requests, run.steps, None, ()))
    unknown = [step["iter"] for step in steps if not reads.knows(step)]
    assert unknown == [1, 2, 3]


def test_what_rows_shared_is_not_known_where_rows_do_not_add_up() -> None:
    reads = SharedReads.of(_run())
    assert [rows for rows in range(1, 9) if reads.knows(_step(4050, rows=rows))] == [4, 5, 6, 7, 8]
