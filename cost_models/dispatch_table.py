"""The dispatcher's cost table: the roofline terms sampled on a grid that core can read."""

import numpy as np

from granikv.core.cost_table import CostTable, FloatArray
from granikv.core.step import Mode
from granikv.cost_models import roofline
from granikv.cost_models.piecewise import piece_at
from granikv.cost_models.step import StepCost

GRID_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
GRID_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 24576, 32768, 65536)
_M_SAT_LENGTH = 8192  # the prefix length at which the paper measured its M_sat
_PRIVATE_LENGTH = 1024  # private tokens a row at which the table's linear rate is exact


def build_cost_table(step_cost: StepCost) -> CostTable:
    """Sample one model, GPU and tensor-parallel degree for `granikv.core`.

    Segments are taken as contiguous. The fixed tile time of private rows is the same for every plan
    and is left out.
    """
    rates, heads = step_cost.rates, step_cost.heads
    prefix = np.empty((len(Mode), len(GRID_LENGTHS), len(GRID_ROWS)))
    private = np.empty_like(prefix)
    for mode in Mode:
        for i, length in enumerate(GRID_LENGTHS):
            for j, rows in enumerate(GRID_ROWS):
                part = step_cost.attention.shared_pass(mode, length, rows)
                prefix[mode, i, j], private[mode, i, j] = part
    return CostTable(
        rows=np.array(GRID_ROWS, np.int64),
        lengths=np.array(GRID_LENGTHS, np.int64),
        prefix_ns=prefix,
        private_ns=private,
        pass_latency_ns=np.array([step_cost.attention.pass_latency_ns(mode) for mode in Mode]),
        private_ns_per_token=_private_ns_per_token(step_cost),
        private_latency_ns=step_cost.attention.pass_latency_ns(Mode.PAGED),
        fused_latency_ns=rates.fused_latency_ns,
        fused_exposed_share=rates.fused_exposed_share,
        merge_ns=_per_rows([roofline.merge_ns(rates, heads, rows) for rows in GRID_ROWS]),
        gemm_ns=_per_rows([step_cost.products.decode_ns(rows) for rows in GRID_ROWS]),
        collective_ns=_per_rows([step_cost.products.collective_ns(rows) for rows in GRID_ROWS]),
        num_layers=step_cost.model.layers,
        group=heads.q // heads.kv,
        m_sat=saturation_rows(step_cost),
        meta=_meta(step_cost),
    )


def saturation_rows(step_cost: StepCost) -> int:
    """`M_sat`: effective rows (`rows * group`) from which the dense pass wins.

    Taken from the parameter file where it states one (A100, the paper's). Otherwise the least
    multiple of the group at which the dense pass over 8K tokens beats a cascade, and the grid's
    largest when it never does.
    """
    stated = step_cost.params.terms.m_sat
    if stated is not None:
        return int(stated.value)
    group = step_cost.heads.q // step_cost.heads.kv
    most = GRID_ROWS[-1]
    return group * (step_cost.attention.dense_wins_from(_M_SAT_LENGTH, most) or most)


def _private_ns_per_token(step_cost: StepCost) -> FloatArray:
    """One rate for each batch size: what the table's line needs to meet the true time at 1K."""
    rates = []
    for rows in GRID_ROWS:
        line, tokens = step_cost.attention.paged.line(rows), rows * _PRIVATE_LENGTH
        _, a, b = line[piece_at(line, tokens)]
        rates.append((a + b * tokens - step_cost.attention.pass_latency_ns(Mode.PAGED)) / tokens)
    return np.array(rates)


def _per_rows(values: list[float]) -> FloatArray:
    return np.array(values, np.float64)


def _meta(step_cost: StepCost) -> dict[str, object]:
    params = step_cost.params
    return {
        "gpu": params.gpu,
        "model": step_cost.model.name,
        "tp": step_cost.tp,
        "derived_from": params.derived_from,
        "note": params.note,
        "provenance": {name: parameter.provenance for name, parameter in params.terms.items()},
        "not_in_table": "the fixed tile time of private rows, equal for every plan; host time",
    }
