"""Who was in the batch when: by hand, and of simulated runs, which say when each row came back."""

import polars as pl
import pytest
from sim_support import prompt, run, tiny

from granikv.traces.request import Request
from granikv.validate.compare.batch_spans import batch_spans


def _requests(*rows: tuple[int, int, int, float, float | None]) -> pl.DataFrame:
    names = ("id", "prompt_tokens", "output_tokens", "first_token_s", "finish_s")
    return pl.DataFrame(rows, names, orient="row")


def _decodes(count: int, sent_back: dict[int, int]) -> pl.DataFrame:
    """One a second from 1 s on."""
    return pl.DataFrame(
        {
            "kind": ["decode"] * count,
            "steps": [1] * count,
            "gpu_us": [1e6] * count,
            "start_s": [1.0 + step for step in range(count)],
            "retractions": [sent_back.get(step, 0) for step in range(count)],
        }
    )


def test_who_is_never_sent_back_has_one_span() -> None:
    requests = _requests((3, 10, 5, 0.5, 4.5), (4, 10, 5, 2.5, None))
    assert batch_spans(requests, _decodes(6, {})) == {
        3: [(0.5, 4.5)],
        4: [(2.5, float("inf"))],
    }


def test_the_row_that_has_written_least_waits_until_it_can_write_the_rest_by_its_end() -> None:
    # Row 1 has its first token and those of the steps at 1 and 2 s when the step at 3 s sends it
    # back; of its 6 tokens the other 3 are written by the last 3 steps before its end.
    requests = _requests((0, 10, 12, 0.0, 11.5), (1, 10, 6, 0.5, 11.5))
    steps = _decodes(12, {2: 1})
    requests = requests.with_columns(first_token_s=pl.Series([-2.0, 0.5]))
    ahead = _decodes(3, {}).with_columns(pl.col("start_s") - 3)
    found = batch_spans(requests, pl.concat([ahead, steps]))
    assert found[0] == [(-2.0, 11.5)]
    assert found[1] == [(0.5, 3.0), (9.0, 11.5)]


def test_of_rows_that_have_written_as_much_the_one_with_the_longest_prompt_goes() -> None:
    requests = _requests((0, 10, 6, 0.5, 6.5), (1, 30, 6, 0.5, 9.5), (2, 20, 6, 0.5, 6.5))
    found = batch_spans(requests, _decodes(10, {2: 1}))
    assert [len(found[number]) for number in range(3)] == [1, 2, 1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("size_tokens", [2000, 5000])
def test_rows_add_up_in_a_run_that_sends_many_back(size_tokens: int, overlap: bool) -> None:
    requests = [
        Request(i, 1e-6 * i, prompt((i % 3, 200), (100 + i, 20)), 100 + 17 * (i % 11))
        for i in range(120)
    ]
    config = tiny(size_tokens=size_tokens, schedule_conservativeness=0.1, overlap_schedule=overlap)
    found = run(requests, config)
    assert found.steps["retractions"].sum() >= 4
    assert _off(found.requests, found.steps) == 0
    # As if nobody had been sent back, the same rows are far off.
    nobody = found.steps.with_columns(retractions=pl.lit(0))
    assert _off(found.requests, nobody) > 0.7


def _off(requests: pl.DataFrame, steps: pl.DataFrame) -> float:
    """Share of decode steps with more rows, or fewer, than spans say: by more than two."""
    spans = [span for of_one in batch_spans(requests, steps).values() for span in of_one]
    decodes = steps.filter(pl.col("kind") == "decode")
    off = [
        abs(sum(begin_s <= start_s < end_s for begin_s, end_s in spans) - rows) > 2
        for start_s, rows in decodes.select("start_s", "rows").iter_rows()
    ]
    return sum(off) / len(off)
