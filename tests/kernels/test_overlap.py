"""The rule for the overlap, against what was measured on an H200."""

import json
from statistics import mean

import pytest

from granikv.cost_models.catalog import data_file
from granikv.kernels.overlap import choose_overlap

pl = pytest.importorskip("polars")

_BACKENDS = {"split": "granikv_two_call_split_dense", "beside": "granikv_two_call_beside_dense"}
_BATCH = ["num_q_heads", "num_kv_heads", "head_dim", "rows", "segments_json", "private_tokens"]


def _regrets(choose):
    path = data_file("rows", ".parquet", "h200-sxm.kernels")
    rows = pl.read_parquet(path).filter(pl.col("backend").is_in(list(_BACKENDS.values())))
    rows = rows.with_columns(us=pl.col("times_us").list.median())
    regrets = []
    for batch, measured in rows.group_by(_BATCH):
        times = dict(measured.select("backend", "us").iter_rows())
        if len(times) < 2:
            continue
        q_heads, kv_heads, _, count, segments, private = batch
        dense = [(tokens, readers) for _, tokens, readers in json.loads(segments)]
        chosen = choose(count, q_heads // kv_heads, dense, private)
        regrets.append(times[_BACKENDS[chosen]] / min(times.values()))
    return sorted(regrets)


def test_the_rule_costs_little_where_both_were_measured():
    regrets = _regrets(choose_overlap)
    assert len(regrets) > 200
    assert mean(regrets) < 1.035
    assert regrets[int(0.9 * len(regrets))] < 1.13


@pytest.mark.parametrize("fixed", ["split", "beside"])
def test_no_fixed_choice_is_as_good(fixed):
    assert mean(_regrets(lambda *_: fixed)) > 1.05


def test_few_rows_and_batches_of_mostly_dense_work_divide_the_card():
    assert choose_overlap(32, 4, [(8192, 32)], 32 * 256) == "split"
    assert choose_overlap(256, 4, [(16384, 256)], 256 * 256) == "beside"
    assert choose_overlap(256, 4, [(65536, 256)], 256 * 16) == "split"
