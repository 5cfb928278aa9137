"""Terms without surfaces: properties that hold for every argument."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from granikv.cost_models import roofline
from granikv.cost_models.catalog import shipped_names
from granikv.cost_models.hardware import load_hardware
from granikv.cost_models.params import load_params
from granikv.cost_models.roofline import Heads, Rates

LLAMA = Heads(q=32, kv=8, head_dim=128, kv_bytes=4096)
RATES = {
    gpu: roofline.rates_of(load_params(gpu), load_hardware(gpu))
    for gpu in shipped_names("params", ".json")
}

gpus = st.sampled_from(sorted(RATES))
row_counts = st.integers(1, 1024)
lengths = st.integers(0, 131_072)


@settings(deadline=None)
@given(gpus, lengths, row_counts, st.integers(0, 5000), st.integers(0, 500), st.booleans())
def test_cascade_never_falls(
    gpu: str, length: int, rows: int, more_length: int, more_rows: int, contiguous: bool
) -> None:
    less = roofline.cascade_pass(RATES[gpu], LLAMA, length, rows, contiguous)
    more = roofline.cascade_pass(
        RATES[gpu], LLAMA, length + more_length, rows + more_rows, contiguous
    )
    assert more[0] >= less[0] >= 0
    assert more[1] >= less[1] >= 0


@settings(deadline=None)
@given(gpus, st.integers(1, 131_072), row_counts)
def test_cascade_is_continuous(gpu: str, length: int, rows: int) -> None:
    """One more token or row changes a pass by no more than its share, tile padding included."""
    here = roofline.cascade_pass(RATES[gpu], LLAMA, length, rows)
    longer = roofline.cascade_pass(RATES[gpu], LLAMA, length + 1, rows)
    wider = roofline.cascade_pass(RATES[gpu], LLAMA, length, rows + 1)
    for axis in (0, 1):
        assert longer[axis] <= here[axis] * (1 + 1 / length) * (1 + 1e-9)
        assert wider[axis] <= here[axis] * (1 + 1 / rows) * (1 + 1e-9)


@settings(deadline=None)
@given(gpus, lengths, row_counts)
def test_scattered_cascade_is_never_faster_than_contiguous(
    gpu: str, length: int, rows: int
) -> None:
    scattered = roofline.cascade_pass(RATES[gpu], LLAMA, length, rows, False)
    contiguous = roofline.cascade_pass(RATES[gpu], LLAMA, length, rows, True)
    assert scattered[0] == contiguous[0]
    assert scattered[1] >= contiguous[1]


def test_scattered_cascade_pays_the_gather_rate() -> None:
    rates = RATES["a100-sxm4-40gb"]
    scattered = roofline.cascade_pass(rates, LLAMA, 8192, 4, False)
    assert scattered[1] == pytest.approx(8192 * 4096 / rates.gather_bytes_per_ns)
    assert rates.gather_bytes_per_ns < rates.contiguous_bytes_per_ns


def _assert_not_falling(term: Callable[[Rates, float], float], low: float, high: float) -> None:
    for rates in RATES.values():
        assert 0 < term(rates, low) < term(rates, high)


def test_other_terms_grow() -> None:
    _assert_not_falling(lambda rates, x: roofline.merge_ns(rates, LLAMA, x), 1, 256)
    _assert_not_falling(lambda rates, x: roofline.copy_ns(rates, x), 1, 2**30)
    _assert_not_falling(lambda rates, x: roofline.elementwise_ns(rates, x), 1, 2**20)


def test_nothing_to_copy_costs_nothing() -> None:
    assert roofline.copy_ns(RATES["h200-sxm"], 0) == 0
