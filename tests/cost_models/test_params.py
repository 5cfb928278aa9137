"""Parameter files: complete, sourced, reproducible draws."""

import json
from pathlib import Path

import numpy as np
import pytest

from granikv.core.errors import ConfigError
from granikv.cost_models.catalog import shipped_names
from granikv.cost_models.params import GpuParams, Parameter, load_params

ALL = [load_params(name) for name in shipped_names("params", ".json")]


@pytest.mark.parametrize("params", ALL, ids=lambda params: params.gpu)
def test_assumptions_are_marked_and_have_an_error(params: GpuParams) -> None:
    for name, parameter in params.terms.items():
        if "assumption" in parameter.source:
            assert parameter.provenance == "stated", name
            assert parameter.rows_used == 0, name
            assert parameter.rel_error > 0, name
        if parameter.rows_used:
            assert parameter.valid_range, name


def test_a100_shared_prefix_terms_are_the_papers() -> None:
    for gpu in ("a100-sxm4-40gb", "a100-sxm4-80gb"):
        terms = load_params(gpu).terms
        for parameter in (
            terms.dense_compute_efficiency,
            terms.cascade_compute_efficiency,
            terms.paged_shared_bytes_per_s,
        ):
            assert parameter.provenance == "paper"
    assert terms.m_sat is not None
    assert terms.m_sat.value == 1024


def test_borrowed_files_say_so() -> None:
    assert load_params("a100-sxm4-40gb").derived_from == "a100-sxm4-80gb"
    h100, h200 = load_params("h100-sxm"), load_params("h200-sxm")
    assert h100.derived_from == "h200-sxm"
    for (name, borrowed), (_, own) in zip(h100.terms.items(), h200.terms.items(), strict=True):
        assert borrowed.value == own.value, name
        assert borrowed.rel_error > own.rel_error, name


def test_draw_is_reproducible_and_leaves_the_file_alone() -> None:
    params = load_params("h200-sxm")
    before = params.model_dump_json()
    first = params.draw(np.random.default_rng(7))
    assert first == params.draw(np.random.default_rng(7))
    assert first != params.draw(np.random.default_rng(8))
    assert params.model_dump_json() == before


def test_draw_has_the_stated_spread_and_no_fraction_above_one() -> None:
    params = load_params("h200-sxm")
    rng = np.random.default_rng(0)
    draws = [params.draw(rng).terms for _ in range(2000)]
    latency = np.log([draw.host_decode_ns.value for draw in draws])
    expected = params.terms.host_decode_ns
    assert abs(latency.std() / expected.rel_error - 1) < 0.06
    assert abs(latency.mean() - np.log(expected.value)) < 0.04
    efficiency = [draw.private_memory_efficiency.value for draw in draws]
    assert max(efficiency) == 1.0
    # Terms are independent: the sample correlation of two of them is noise.
    other = np.log([draw.gemm_latency_ns.value for draw in draws])
    assert abs(np.corrcoef(latency, other)[0, 1]) < 0.08


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    ALL[0].save(path)
    assert load_params(str(path)) == ALL[0]


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("gemm_latency_ns", None, "gemm_latency_ns"),
        ("gemm_memory_efficiency", {"value": 1.2}, "fraction must be"),
        ("gemm_latency_ns", {"unit": "bytes/s"}, "gemm_latency_ns must have unit ns"),
        ("gemm_latency_ns", {"value": -1.0}, "greater than or equal to 0"),
        ("reread_bytes_per_s", {"value": 0.0}, "must be positive"),
        ("gemm_latency_ns", {"provenance": "guess"}, "provenance"),
    ],
)
def test_broken_files_are_refused(
    tmp_path: Path, field: str, change: dict[str, object] | None, message: str
) -> None:
    body = json.loads(ALL[0].model_dump_json(exclude_none=True))
    if change is None:
        del body["terms"][field]
    else:
        body["terms"][field] |= change
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(body))
    with pytest.raises(ConfigError, match=message):
        load_params(str(path))


def test_a_zero_latency_is_allowed() -> None:
    zero = Parameter(
        value=0, unit="ns", provenance="stated", source="test", rows_used=0, rel_error=0.5
    )
    assert zero.draw(np.random.default_rng(0)).value == 0
