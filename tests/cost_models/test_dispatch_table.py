"""The cost table holds the same terms as StepCost."""

from pathlib import Path

import numpy as np
import pytest

from granikv.core.cost_table import CostTable
from granikv.core.step import Launch, Mode, Segment, StepPlan, StepShape
from granikv.cost_models.dispatch_table import (
    GRID_LENGTHS,
    GRID_ROWS,
    build_cost_table,
    saturation_rows,
)
from granikv.cost_models.models import load_model
from granikv.cost_models.params import load_params
from granikv.cost_models.step import StepCost

H200 = StepCost(load_params("h200-sxm"), load_model("llama-3.1-8b"))
TP2 = StepCost(load_params("a100-sxm4-40gb"), load_model("qwen2.5-14b"), tp=2)


def _layer_ns(table: CostTable, mode: Mode, launch: Launch, i: int, j: int, tokens: int) -> float:
    """One layer's attention as the dispatcher composes it from the table."""
    prefix = float(table.prefix_ns[mode, i, j])
    private = float(table.private_ns[mode, i, j]) + tokens * float(table.private_ns_per_token[j])
    if mode is Mode.PAGED:
        return prefix + private + table.private_latency_ns
    if launch is Launch.FUSED:
        assert table.fused_latency_ns is not None
        if mode is Mode.DENSE:
            prefix += float(table.pass_latency_ns[mode])
        overlapped = max(prefix, private) + table.fused_exposed_share * min(prefix, private)
        return overlapped + table.fused_latency_ns
    alone = prefix + private + table.private_latency_ns + float(table.merge_ns[j])
    return alone + float(table.pass_latency_ns[mode])


@pytest.mark.parametrize("cost", [H200, TP2], ids=["h200", "a100-tp2"])
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("launch", list(Launch))
@pytest.mark.parametrize("length", [512, 8192, 32768])
def test_table_is_near_the_step(cost: StepCost, mode: Mode, launch: Launch, length: int) -> None:
    """Its private part is a line where the cost model bends: near, not equal."""
    table = build_cost_table(cost)
    rows, private_tokens = 64, 64 * 400
    i, j = GRID_LENGTHS.index(length), GRID_ROWS.index(rows)
    layer = _layer_ns(table, mode, launch, i, j, private_tokens)
    expected = table.gemm_ns[j] + table.collective_ns[j] + table.num_layers * layer
    shape = StepShape(rows, rows, private_tokens, 400, (Segment(1, length, rows),), *cost.heads[:3])
    got = cost.step_ns(shape, StepPlan((mode,), launch)) - cost.host_ns(rows)
    assert got == pytest.approx(expected, rel=0.1)


def test_table_never_falls_along_its_grid() -> None:
    table = build_cost_table(H200)
    alone = table.prefix_ns + table.private_ns
    assert (np.diff(alone, axis=1) >= -1e-6).all()
    # A PAGED segment is told without the launch, which more rows make a little longer.
    assert (np.diff(alone, axis=2) >= -300).all()
    for line in (table.gemm_ns, table.merge_ns, build_cost_table(TP2).collective_ns):
        assert (np.diff(line) >= 0).all()


def _with(**terms: object) -> StepCost:
    """The H200 with some terms replaced."""
    changed = H200.params.terms.model_copy(update=terms)
    return StepCost(H200.params.model_copy(update={"terms": changed}), H200.model)


def test_m_sat_is_the_papers_on_a100_and_fitted_on_h200() -> None:
    assert saturation_rows(TP2) == 1024
    fitted = H200.params.terms.m_sat
    assert fitted is not None
    assert fitted.provenance == "fitted"
    assert fitted.rows_used > 0
    assert build_cost_table(H200).m_sat == saturation_rows(H200) == fitted.value


def test_m_sat_is_the_crossover_where_no_rows_gave_one() -> None:
    terms = H200.params.terms
    quick = terms.cascade_compute_efficiency.model_copy(update={"value": 0.35})
    reread = terms.reread_bytes_per_s.model_copy(update={"value": 5.5e12})
    cost = _with(m_sat=None, cascade_compute_efficiency=quick, reread_bytes_per_s=reread)
    table = build_cost_table(cost)
    assert table.group == 4
    assert table.m_sat % 4 == 0
    i = GRID_LENGTHS.index(8192)

    def beats(rows: int) -> bool:
        j = GRID_ROWS.index(rows)
        # Of a segment in two calls one part is its pass, the other nothing: a cascade rides in the
        # private pass of a fused launch only.
        dense, cascade = (
            max(table.prefix_ns[mode, i, j], table.private_ns[mode, i, j])
            + table.pass_latency_ns[mode]
            for mode in (Mode.DENSE, Mode.CASCADE)
        )
        return bool(dense < cascade)

    below = max(rows for rows in GRID_ROWS if rows * 4 < table.m_sat)
    above = min(rows for rows in GRID_ROWS if rows * 4 >= table.m_sat)
    assert not beats(below)
    assert beats(above)


def test_m_sat_when_dense_never_wins() -> None:
    slow = H200.params.terms.dense.model_copy(update={"latency_ns": 1e9})
    assert saturation_rows(_with(dense=slow, m_sat=None)) == GRID_ROWS[-1] * 4


def test_table_survives_its_file(tmp_path: Path) -> None:
    table = build_cost_table(TP2)
    path = tmp_path / "table.json"
    table.save(path)
    back = CostTable.load(path)
    assert np.array_equal(back.prefix_ns, table.prefix_ns)
    assert back.meta == table.meta
    assert back.meta["derived_from"] == "a100-sxm4-80gb"
    assert back.meta["provenance"]["dense"] == "paper"
