"""Roofline terms against measured anchors, and properties that hold for every argument."""

import csv
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from granikv.core.step import Mode
from granikv.cost_models import roofline
from granikv.cost_models.catalog import DATA, shipped_names
from granikv.cost_models.hardware import load_hardware
from granikv.cost_models.params import load_params
from granikv.cost_models.roofline import Heads, Rates

LLAMA = Heads(q=32, kv=8, head_dim=128, kv_bytes=4096)
RATES = {
    gpu: roofline.rates_of(load_params(gpu), load_hardware(gpu))
    for gpu in shipped_names("params", ".json")
}
H200 = RATES["h200-sxm"]

gpus = st.sampled_from(sorted(RATES))
modes = st.sampled_from(list(Mode))
row_counts = st.integers(1, 1024)
lengths = st.integers(0, 131_072)


def _anchors() -> list[dict[str, float]]:
    with (DATA / "rows" / "fa3_shared_prefix.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def _prefix_us(row: dict[str, float]) -> float:
    part = roofline.shared_pass(H200, LLAMA, Mode.DENSE, row["prefix_tokens"], row["rows"])
    return (max(part) + H200.dense_latency_ns) / 1e3


def _suffix_us(row: dict[str, float]) -> float:
    tokens = row["rows"] * row["suffix_tokens"]
    part = roofline.private_pass(H200, LLAMA, row["rows"], tokens)
    return (max(part) + H200.private_latency_ns) / 1e3


def _paged_us(row: dict[str, float]) -> float:
    tokens = row["rows"] * row["suffix_tokens"]
    private = roofline.private_pass(H200, LLAMA, row["rows"], tokens)
    shared = roofline.shared_pass(H200, LLAMA, Mode.PAGED, row["prefix_tokens"], row["rows"])
    both = max(private[0] + shared[0], private[1] + shared[1])
    return (both + H200.private_latency_ns) / 1e3


def _pair_us(row: dict[str, float]) -> float:
    return _prefix_us(row) + _suffix_us(row) + roofline.merge_ns(H200, LLAMA, row["rows"]) / 1e3


@pytest.mark.parametrize(
    ("column", "predict", "worst", "median"),
    [
        # Worst cells: 2048 x 64 (a split-KV reduction that is not modelled), 512 x 8 (latency).
        ("fa3_prefix_us", _prefix_us, 0.21, 0.10),
        ("fa3_suffix_us", _suffix_us, 0.18, 0.05),
        ("fa3_paged_us", _paged_us, 0.12, 0.06),
        ("fa3_pair_us", _pair_us, 0.19, 0.06),
    ],
)
def test_h200_shared_prefix_anchors(
    column: str, predict: Callable[[dict[str, float]], float], worst: float, median: float
) -> None:
    errors = [abs(predict(row) / row[column] - 1) for row in _anchors()]
    assert len(errors) == 15
    assert max(errors) < worst
    assert statistics.median(errors) < median


@pytest.mark.parametrize(
    ("rows", "tokens_per_row", "measured_us"),
    [
        # aiconfigurator-core 0.12.0, generation_attention_perf, H200, fa3, 32 q and 8 kv heads.
        (8, 8192, 73.0),
        (32, 4096, 131.0),
        (64, 1024, 77.3),
        (128, 2048, 259.3),
        (256, 1024, 278.5),
    ],
)
def test_h200_private_attention_anchors(rows: int, tokens_per_row: int, measured_us: float) -> None:
    part = roofline.private_pass(H200, LLAMA, rows, rows * tokens_per_row)
    predicted_us = (max(part) + H200.private_latency_ns) / 1e3
    assert predicted_us == pytest.approx(measured_us, rel=0.12)


@pytest.mark.parametrize(
    ("gpu", "m", "n", "k", "measured_us"),
    [
        # aiconfigurator-core 0.12.0, gemm_perf, bf16.
        ("h200-sxm", 64, 6144, 4096, 16.4),
        ("h200-sxm", 1, 16384, 4096, 34.0),
        ("h200-sxm", 1024, 4096, 4096, 46.4),
        ("h200-sxm", 4096, 7168, 5120, 381.9),
        ("a100-sxm4-80gb", 64, 6144, 4096, 38.0),
        ("a100-sxm4-80gb", 4096, 7168, 5120, 1263.9),
    ],
)
def test_gemm_anchors(gpu: str, m: int, n: int, k: int, measured_us: float) -> None:
    assert roofline.gemm_ns(RATES[gpu], m, n, k) / 1e3 == pytest.approx(measured_us, rel=0.15)


@pytest.mark.parametrize(
    ("gpu", "num_bytes", "gpus", "measured_us"),
    [
        # aiconfigurator-core 0.12.0, custom_allreduce_perf, graph rows.
        ("h200-sxm", 2_097_152, 2, 9.1),
        ("h200-sxm", 2_097_152, 4, 14.6),
        ("h200-sxm", 8192, 4, 2.8),
        ("a100-sxm4-80gb", 2_097_152, 2, 15.8),
        ("a100-sxm4-80gb", 67_108_864, 4, 541.6),
    ],
)
def test_all_reduce_anchors(gpu: str, num_bytes: int, gpus: int, measured_us: float) -> None:
    predicted_us = roofline.all_reduce_ns(RATES[gpu], num_bytes, gpus) / 1e3
    assert predicted_us == pytest.approx(measured_us, rel=0.15)


@pytest.mark.parametrize(
    ("gpu", "tokens", "measured_us"),
    [
        # aiconfigurator-core 0.12.0, context_attention_perf, one request, 32 q and 8 kv heads.
        ("h200-sxm", 16384, 3483.1),
        ("h200-sxm", 4096, 265.5),
        ("h200-sxm", 1024, 29.2),
    ],
)
def test_extend_attention_anchors(gpu: str, tokens: int, measured_us: float) -> None:
    predicted_us = roofline.extend_attention_ns(RATES[gpu], LLAMA, [tokens], [0]) / 1e3
    assert predicted_us == pytest.approx(measured_us, rel=0.2)


def test_a100_reproduces_the_papers_prefix_kernels() -> None:
    rates = RATES["a100-sxm4-40gb"]
    dense = max(roofline.shared_pass(rates, LLAMA, Mode.DENSE, 8192, 256)) + rates.dense_latency_ns
    cascade = max(roofline.shared_pass(rates, LLAMA, Mode.CASCADE, 8192, 256))
    cascade += rates.cascade_latency_ns
    assert dense == pytest.approx(442e3, rel=0.01)
    assert cascade / dense == pytest.approx(3.66, rel=0.01)


@pytest.mark.parametrize("rows", [64, 128, 256])
def test_h200_shared_plateau(rows: int) -> None:
    """The slope over prefix length is 7 TB/s of effective reads, above the HBM peak."""
    short = roofline.shared_pass(H200, LLAMA, Mode.PAGED, 8192, rows)[1]
    long = roofline.shared_pass(H200, LLAMA, Mode.PAGED, 32768, rows)[1]
    assert rows * 24576 * 4096 / (long - short) == pytest.approx(7000, rel=0.02)


@settings(deadline=None)
@given(gpus, modes, lengths, row_counts, st.integers(0, 5000), st.integers(0, 500))
def test_shared_pass_never_falls(
    gpu: str, mode: Mode, length: int, rows: int, more_length: int, more_rows: int
) -> None:
    for contiguous in (True, False):
        less = roofline.shared_pass(RATES[gpu], LLAMA, mode, length, rows, contiguous)
        more = roofline.shared_pass(
            RATES[gpu], LLAMA, mode, length + more_length, rows + more_rows, contiguous
        )
        assert more[0] >= less[0] >= 0
        assert more[1] >= less[1] >= 0


@settings(deadline=None)
@given(gpus, modes, st.integers(1, 131_072), row_counts)
def test_shared_pass_is_continuous(gpu: str, mode: Mode, length: int, rows: int) -> None:
    """One more token or row changes a pass by no more than its share, tile padding included."""
    here = roofline.shared_pass(RATES[gpu], LLAMA, mode, length, rows)
    longer = roofline.shared_pass(RATES[gpu], LLAMA, mode, length + 1, rows)
    wider = roofline.shared_pass(RATES[gpu], LLAMA, mode, length, rows + 1)
    for axis in (0, 1):
        assert longer[axis] <= here[axis] * (1 + 1 / length) * (1 + 1e-9)
        assert wider[axis] <= here[axis] * (1 + 1 / rows) * (1 + 1e-9)


@settings(deadline=None)
@given(gpus, lengths, row_counts)
def test_shared_pages_are_never_slower_than_private_ones(gpu: str, length: int, rows: int) -> None:
    rates = RATES[gpu]
    shared = roofline.shared_pass(rates, LLAMA, Mode.PAGED, length, rows)
    private = rows * length * roofline.private_memory_ns_per_token(rates, LLAMA)
    assert shared[1] <= private * (1 + 1e-12)
    # One read of the segment from HBM is the least.
    assert shared[1] >= length * 4096 / rates.private_bytes_per_ns * (1 - 1e-12)


@settings(deadline=None)
@given(gpus, lengths, row_counts)
def test_scattered_cascade_is_never_faster_than_contiguous(
    gpu: str, length: int, rows: int
) -> None:
    scattered = roofline.shared_pass(RATES[gpu], LLAMA, Mode.CASCADE, length, rows, False)
    contiguous = roofline.shared_pass(RATES[gpu], LLAMA, Mode.CASCADE, length, rows, True)
    assert scattered[0] == contiguous[0]
    assert scattered[1] >= contiguous[1]


def test_scattered_cascade_pays_the_gather_rate() -> None:
    rates = RATES["a100-sxm4-40gb"]
    scattered = roofline.shared_pass(rates, LLAMA, Mode.CASCADE, 8192, 4, False)
    assert scattered[1] == pytest.approx(8192 * 4096 / rates.private_bytes_per_ns)
    assert rates.private_bytes_per_ns < rates.contiguous_bytes_per_ns


@settings(deadline=None)
@given(gpus, st.integers(1, 8192), st.integers(1, 8192), st.integers(1, 8192), st.integers(0, 64))
def test_gemm_never_falls(gpu: str, m: int, n: int, k: int, more: int) -> None:
    rates = RATES[gpu]
    here = roofline.gemm_ns(rates, m, n, k)
    assert here > rates.gemm_latency_ns
    assert roofline.gemm_ns(rates, m + more, n, k) >= here
    assert roofline.gemm_ns(rates, m, n + more, k) >= here
    assert roofline.gemm_ns(rates, m, n, k + more) >= here


@settings(deadline=None)
@given(gpus, st.integers(1, 16384), st.integers(0, 65536), st.integers(0, 100))
def test_extend_attention_never_falls(gpu: str, new: int, cached: int, more: int) -> None:
    rates = RATES[gpu]
    here = roofline.extend_attention_ns(rates, LLAMA, [new], [cached])
    assert roofline.extend_attention_ns(rates, LLAMA, [new + more], [cached]) >= here
    assert roofline.extend_attention_ns(rates, LLAMA, [new], [cached + more]) >= here
    assert roofline.extend_attention_ns(rates, LLAMA, [new, 1], [cached, 0]) > here


def test_chunks_of_a_prompt_do_the_same_attention_work() -> None:
    """Two chunks over their own prefix cover the same query-key pairs as one extend."""
    rates = H200
    whole = roofline.extend_attention_ns(rates, LLAMA, [8192], [0]) - rates.extend_latency_ns
    chunks = [
        roofline.extend_attention_ns(rates, LLAMA, [4096], [cached]) - rates.extend_latency_ns
        for cached in (0, 4096)
    ]
    assert sum(chunks) == pytest.approx(whole, rel=1e-6)


def _assert_not_falling(term: Callable[[Rates, float], float], low: float, high: float) -> None:
    for rates in RATES.values():
        assert 0 < term(rates, low) < term(rates, high)


def test_other_terms_grow() -> None:
    _assert_not_falling(lambda rates, x: roofline.merge_ns(rates, LLAMA, x), 1, 256)
    _assert_not_falling(lambda rates, x: roofline.copy_ns(rates, x), 1, 2**30)
    _assert_not_falling(lambda rates, x: roofline.elementwise_ns(rates, x), 1, 2**20)
    for gpus_in_group in roofline.COLLECTIVE_GPUS:
        _assert_not_falling(
            lambda rates, x, n=gpus_in_group: roofline.all_reduce_ns(rates, x, n), 1, 2**20
        )


def test_nothing_to_do_costs_nothing() -> None:
    assert roofline.copy_ns(H200, 0) == 0
    assert roofline.all_reduce_ns(H200, 2**20, 1) == 0
