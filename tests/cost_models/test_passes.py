"""The fitted terms of the shipped files: near measured rows, monotone, continuous."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from granikv.cost_models.catalog import shipped_names
from granikv.cost_models.fit import own_rows
from granikv.cost_models.hardware import load_hardware
from granikv.cost_models.ideal import Peaks
from granikv.cost_models.models import Gemm
from granikv.cost_models.params import load_params
from granikv.cost_models.passes import (
    AllReduceTime,
    DensePass,
    ExtendTime,
    GemmTime,
    PagedTime,
    PrivatePass,
    ShareCost,
)
from granikv.cost_models.piecewise import piece_at
from granikv.cost_models.readers.own import own_path, read_own
from granikv.cost_models.readers.public import read_public
from granikv.cost_models.roofline import Heads, rates_of

GPUS = shipped_names("params", ".json")
HEADS = [Heads(q, kv, 128, 4 * kv * 128) for q, kv in ((32, 8), (20, 4), (10, 2), (8, 1), (8, 8))]

gpus = st.sampled_from(GPUS)
head_sets = st.sampled_from(HEADS)


def _terms(gpu: str):  # type: ignore[no-untyped-def]
    return load_params(gpu).terms, Peaks.of(load_hardware(gpu))


PAGED = {
    (gpu, heads): PagedTime(_terms(gpu)[0].paged, _terms(gpu)[1], heads)
    for gpu in GPUS
    for heads in HEADS
}
EXTEND = {
    (gpu, heads): ExtendTime(_terms(gpu)[0].extend, _terms(gpu)[1], heads)
    for gpu in GPUS
    for heads in HEADS
}
DENSE = {
    (gpu, heads): DensePass(_terms(gpu)[0].dense, _terms(gpu)[1], heads)
    for gpu in GPUS
    for heads in HEADS
}
SHARES = {
    (gpu, heads): ShareCost(_terms(gpu)[0].shared_page_cost, heads, load_hardware(gpu).sm_count)
    for gpu in GPUS
    for heads in HEADS
}


def _at(line, tokens: float) -> float:  # type: ignore[no-untyped-def]
    _, a, b = line[piece_at(line, tokens)]
    return a + b * tokens


@pytest.mark.parametrize("gpu", ["h200-sxm", "a100-sxm4-80gb"])
def test_gemm_is_near_every_public_column_of_common_sizes(gpu: str) -> None:
    terms, peaks = _terms(gpu)
    frame = read_public(gpu, "gemm")
    assert frame is not None
    frame = frame.filter(pl.col("m") <= 16384)
    errors = []
    for n, k in ((4096, 4096), (6144, 4096), (5120, 5120), (16384, 5120), (7168, 10240)):
        column = frame.filter((pl.col("n") == n) & (pl.col("k") == k))
        time = GemmTime(terms.gemm, peaks, Gemm("", n, k))
        predicted = np.array([time.ns(m) for m in column["m"]])
        errors.append(np.abs(predicted / (column["time_us"].to_numpy() * 1e3) - 1))
    error = np.concatenate(errors)
    assert np.median(error) < 0.07
    assert np.quantile(error, 0.9) < 0.2


def test_our_own_h200_rows_are_met() -> None:
    own = read_own([own_path("h200-sxm")])
    frame = own_rows.paged_rows(own).filter(pl.col("head_dim") == 128)
    errors = []
    for (q, kv), rows in frame.group_by("num_q_heads", "num_kv_heads"):
        time = PagedTime(*_first(_terms("h200-sxm"), "paged"), Heads(q, kv, 128, 512 * kv))
        sizes = rows.select("rows", "tokens").iter_rows()
        predicted = np.array([_at(time.line(batch), batch * tokens) for batch, tokens in sizes])
        errors.append(np.abs(predicted / (rows["time_us"].to_numpy() * 1e3) - 1))
    error = np.concatenate(errors)
    assert np.median(error) < 0.04
    assert np.quantile(error, 0.9) < 0.12


def _first(terms, name: str):  # type: ignore[no-untyped-def]
    return getattr(terms[0], name), terms[1]


@settings(deadline=None)
@given(gpus, head_sets, st.integers(1, 2048), st.integers(1, 131_072), st.integers(0, 20_000))
def test_paged_never_falls_and_its_forms_agree(
    gpu: str, heads: Heads, rows: int, tokens: int, more: int
) -> None:
    time = PAGED[gpu, heads]
    here = _at(time.line(rows), rows * tokens)
    assert here <= _at(time.line(rows), rows * (tokens + more)) * (1 + 1e-9)
    larger = rows + more % 7
    assert here <= _at(time.line(larger), larger * tokens) * (1 + 1e-9)
    assert time.alone_ns(tokens) == pytest.approx(_at(time.line(1), tokens), rel=1e-9)
    knots = load_params(gpu).terms.paged.axes["tokens"]
    if tokens <= knots[-1]:
        between = np.interp(tokens, knots, time.knots_ns(rows)[0])
        assert here == pytest.approx(float(between), rel=1e-9)


@settings(deadline=None)
@given(gpus, head_sets, st.integers(1, 2048), st.integers(0, 10**7), st.integers(0, 20_000))
def test_private_never_falls_nor_reads_faster_than_memory(
    gpu: str, heads: Heads, rows: int, tokens: int, more: int
) -> None:
    hardware = load_hardware(gpu)
    time = PrivatePass(rates_of(load_params(gpu), hardware), heads)
    here = _at(time.line(rows), tokens)
    assert here >= tokens * heads.kv_bytes / hardware.hbm_bytes_per_s * 1e9
    assert here <= _at(time.line(rows), tokens + more)
    assert here <= _at(time.line(rows + more), tokens)
    assert time.alone_ns(tokens) == pytest.approx(_at(time.line(1), tokens), rel=1e-9)


@settings(deadline=None)
@given(gpus, head_sets, st.integers(1, 1024), st.floats(1, 5e7))
def test_paged_is_continuous(gpu: str, heads: Heads, rows: int, tokens: float) -> None:
    line = PAGED[gpu, heads].line(rows)
    assert _at(line, tokens * (1 + 1e-9)) == pytest.approx(_at(line, tokens), rel=1e-6)


@settings(deadline=None)
@given(
    gpus, st.integers(1, 30_000), st.integers(32, 70_000), st.integers(32, 70_000), st.floats(1, 3)
)
def test_gemm_never_falls(gpu: str, m: int, n: int, k: int, times: float) -> None:
    terms, peaks = _terms(gpu)
    here = GemmTime(terms.gemm, peaks, Gemm("", n, k))
    bigger = [Gemm("", int(n * times), k), Gemm("", n, int(k * times))]
    assert here.ns(m) <= here.ns(m * times) * (1 + 1e-9)
    for gemm in bigger:
        assert here.ns(m) <= GemmTime(terms.gemm, peaks, gemm).ns(m) * (1 + 1e-9)


@settings(deadline=None)
@given(
    gpus,
    head_sets,
    st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 65_536)), min_size=1, max_size=6),
    st.integers(0, 2000),
)
def test_extend_never_falls(
    gpu: str, heads: Heads, requests: list[tuple[int, int]], more: int
) -> None:
    time = EXTEND[gpu, heads]
    new, cached = (list(values) for values in zip(*requests, strict=True))
    here = time.ns(new, cached)
    assert time.ns([*new, 1], [*cached, 0]) >= here * (1 - 1e-9)
    for place in range(len(requests)):
        longer = [value + more * (i == place) for i, value in enumerate(new)]
        deeper = [value + more * (i == place) for i, value in enumerate(cached)]
        # One of unlike requests that grows changes what the others amount to: exact but for that.
        assert time.ns(longer, cached) >= here * (1 - 2e-3)
        assert time.ns(new, deeper) >= here * (1 - 2e-3)


@settings(deadline=None)
@given(
    gpus,
    head_sets,
    st.integers(1, 16),
    st.integers(1, 8192),
    st.integers(0, 65_536),
    st.integers(0, 999),
)
def test_uniform_extend_never_falls(
    gpu: str, heads: Heads, batch: int, new: int, cached: int, more: int
) -> None:
    time = EXTEND[gpu, heads]
    here = time.ns([new] * batch, [cached] * batch)
    assert time.ns([new + more] * batch, [cached] * batch) >= here * (1 - 1e-9)
    assert time.ns([new] * batch, [cached + more] * batch) >= here * (1 - 1e-9)
    assert time.ns([new] * (batch + 1), [cached] * (batch + 1)) >= here * (1 - 1e-9)


@given(st.lists(st.tuples(st.integers(1, 900), st.integers(0, 9000)), min_size=1, max_size=24))
def test_many_requests_are_counted_as_few_are(requests: list[tuple[int, int]]) -> None:
    time = EXTEND["h200-sxm", HEADS[0]]
    new, cached = (list(values) for values in zip(*requests, strict=True))
    assert time._many_ns(new, cached) == pytest.approx(time.ns(new, cached), rel=1e-9)


@settings(deadline=None)
@given(gpus, head_sets, st.integers(1, 131_072), st.integers(1, 1024), st.floats(1, 3))
def test_dense_never_falls(gpu: str, heads: Heads, length: int, rows: int, times: float) -> None:
    time = DENSE[gpu, heads]
    here = max(time.ns(length, rows))
    assert max(time.ns(length * times, rows)) >= here * (1 - 1e-9)
    assert max(time.ns(length, rows * times)) >= here * (1 - 1e-9)


@settings(deadline=None)
@given(gpus, head_sets, st.integers(1, 131_072), st.integers(2, 512), st.integers(1, 16))
def test_shared_pages_never_cost_more_than_private_ones(
    gpu: str, heads: Heads, length: int, rows: int, prefixes: int
) -> None:
    share = SHARES[gpu, heads]
    sharers = max(1, rows // prefixes)
    cost = share.of(sharers, rows, length)
    assert 0 < cost <= 1
    # More readers of the same pages pay less each, but not less in all.
    assert share.of(rows, rows, length) <= cost * (1 + 1e-9)
    assert rows * share.of(rows, rows, length) >= sharers * cost * (1 - 1e-9)


def test_sharing_saves_nothing_where_readers_take_turns() -> None:
    """64 rows of 16 prefixes on 8 kv heads: one reader of each prefix runs at a time."""
    share = SHARES["h200-sxm", HEADS[0]]
    assert share.of(4, 64, 8192) > 0.9
    assert share.of(64, 64, 8192) < 0.7


@settings(deadline=None)
@given(gpus, st.sampled_from([2, 4, 8]), st.integers(1, 2**30), st.floats(1, 3))
def test_all_reduce_never_falls(gpu: str, number: int, num_bytes: int, times: float) -> None:
    terms, peaks = _terms(gpu)
    time = AllReduceTime(terms.all_reduce, peaks, number)
    assert time.ns(num_bytes * times) >= time.ns(num_bytes) * (1 - 1e-9)


def test_one_gpu_reduces_nothing() -> None:
    terms, peaks = _terms("h200-sxm")
    assert AllReduceTime(terms.all_reduce, peaks, 1).ns(2**20) == 0
