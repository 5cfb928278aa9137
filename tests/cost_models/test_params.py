"""Parameter files: complete, sourced, reproducible draws."""

import json
from pathlib import Path

import numpy as np
import pytest

from granikv.core.errors import ConfigError
from granikv.cost_models.catalog import shipped_names
from granikv.cost_models.params import FittedSurface, GpuParams, Parameter, load_params

ALL = [load_params(name) for name in shipped_names("params", ".json")]
FITTED = ("gemm", "paged", "extend", "all_reduce")


@pytest.mark.parametrize("params", ALL, ids=lambda params: params.gpu)
def test_assumptions_are_marked_and_have_an_error(params: GpuParams) -> None:
    for name, item in params.terms.items():
        if "assumption" in item.source:
            assert item.provenance in ("stated", "paper"), name
            assert item.rows_used == 0, name
        if name != "m_sat":
            assert item.rel_error > 0, name
        if item.provenance == "fitted":
            assert item.rows_used > 0, name
            assert item.residual is not None, name


@pytest.mark.parametrize("gpu", ["h200-sxm", "a100-sxm4-80gb"])
def test_fitted_surfaces_say_how_far_off_they_are_on_unseen_shapes(gpu: str) -> None:
    terms = load_params(gpu).terms
    goals = {"gemm": (0.08, 0.20), "paged": (0.08, 0.20), "extend": (0.08, 0.20)}
    goals["all_reduce"] = (0.10, 0.25)
    for name in FITTED:
        held_out = getattr(terms, name).held_out
        assert held_out.median <= goals[name][0], name
        assert held_out.p90 <= goals[name][1], name
        assert held_out.median_interval[0] <= held_out.median <= held_out.median_interval[1]
        assert getattr(terms, name).rel_error >= held_out.median


def test_shared_pages_meet_their_goal() -> None:
    held_out = load_params("h200-sxm").terms.shared_page_cost.held_out
    assert held_out is not None
    assert held_out.median <= 0.06
    assert held_out.p90 <= 0.12


def test_a100_shared_prefix_terms_are_the_papers() -> None:
    for gpu in ("a100-sxm4-40gb", "a100-sxm4-80gb"):
        terms = load_params(gpu).terms
        for item in (terms.dense, terms.cascade_compute_efficiency, terms.shared_page_cost):
            assert item.provenance == "paper"
    assert terms.m_sat is not None
    assert terms.m_sat.value == 1024


def test_borrowed_files_say_so() -> None:
    assert load_params("a100-sxm4-40gb").derived_from == "a100-sxm4-80gb"
    h100, h200 = load_params("h100-sxm"), load_params("h200-sxm")
    assert h100.derived_from == "h200-sxm"
    for (name, borrowed), (_, own) in zip(h100.terms.items(), h200.terms.items(), strict=True):
        assert borrowed.summary == own.summary, name
        assert borrowed.rel_error > own.rel_error, name
        assert borrowed.provenance != "fitted", name
        assert borrowed.rows_used == 0, name


def test_draw_is_reproducible_and_leaves_the_file_alone() -> None:
    params = load_params("h200-sxm")
    before = params.model_dump_json()
    first = params.draw(np.random.default_rng(7))
    assert first == params.draw(np.random.default_rng(7))
    assert first != params.draw(np.random.default_rng(8))
    assert params.model_dump_json() == before


def test_draw_has_the_stated_spread_and_no_fraction_above_one() -> None:
    terms = load_params("h200-sxm").terms
    rng = np.random.default_rng(0)
    draws = [terms.host_decode_ns.draw(rng).value for _ in range(2000)]
    latency = np.log(draws)
    assert abs(latency.std() / terms.host_decode_ns.rel_error - 1) < 0.06
    assert abs(latency.mean() - np.log(terms.host_decode_ns.value)) < 0.04
    surface = terms.all_reduce
    drawn = np.array([surface.draw(rng).efficiency for _ in range(1500)])
    assert drawn.max() <= 1.0
    place = int(np.argmin(surface.efficiency))  # far from 1, so that no draw is cut off
    spread = np.log(drawn[:, place] / surface.efficiency[place]).std()
    assert abs(spread / surface.rel_error - 1) < 0.07


def test_a_drawn_surface_moves_as_a_whole() -> None:
    surface = load_params("a100-sxm4-80gb").terms.all_reduce
    drawn = surface.draw(np.random.default_rng(3))
    ratios = np.array(drawn.efficiency) / np.array(surface.efficiency)
    kept = np.array(drawn.efficiency) < 1.0
    assert np.ptp(ratios[kept]) < 1e-9


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    ALL[0].save(path)
    assert load_params(str(path)) == ALL[0]


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("merge_latency_ns", None, "merge_latency_ns"),
        ("merge_memory_efficiency", {"value": 1.2}, "fraction must be"),
        ("fused_exposed_share", None, "fused_exposed_share"),
        ("fused_exposed_share", {"value": 1.2}, r"a share must be in \[0, 1\], got 1.2"),
        ("fused_exposed_share", {"unit": "fraction"}, "fused_exposed_share must have unit share"),
        ("merge_latency_ns", {"unit": "bytes/s"}, "merge_latency_ns must have unit ns"),
        ("merge_latency_ns", {"value": -1.0}, "greater than or equal to 0"),
        ("reread_bytes_per_s", {"value": 0.0}, "must be positive"),
        ("merge_latency_ns", {"provenance": "guess"}, "provenance"),
        ("gemm", {"efficiency": [0.5]}, "efficiency must have 2160 values"),
        ("dense", {"axes": {"rows": [1.0]}, "efficiency": [0.5]}, "dense must have axes"),
        ("dense", {"axes": {"tile_rows": [2.0, 1.0]}}, "ascending positive knots"),
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
    assert zero.summary == "0 ns"


def test_a_share_may_be_zero_and_no_draw_passes_one() -> None:
    share = load_params("a100-sxm4-80gb").terms.fused_exposed_share
    rng = np.random.default_rng(2)
    wide = share.model_copy(update={"value": 0.9})
    drawn = [wide.draw(rng).value for _ in range(50)]
    assert max(drawn) == 1.0
    assert min(drawn) < 0.9
    assert Parameter.model_validate(share.model_dump() | {"value": 0.0}).draw(rng).value == 0.0


def test_summaries_name_what_a_surface_depends_on() -> None:
    gemm = load_params("h200-sxm").terms.gemm
    assert gemm.summary.endswith("of the ideal rate over m, n, k")
    one = FittedSurface(
        provenance="stated",
        source="test",
        rows_used=0,
        rel_error=0.1,
        latency_ns=0,
        axes={"m": (1.0,)},
        efficiency=(0.25,),
    )
    assert one.summary == "0.25 of the ideal rate"
