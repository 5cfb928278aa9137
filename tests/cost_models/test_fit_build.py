"""The fit from shipped rows gives the shipped parameters; its parts recover known values."""

import numpy as np
import polars as pl
import pytest

from granikv.core.errors import ConfigError
from granikv.cost_models.fit.build import build_params, fit_term
from granikv.cost_models.fit.dense import fit_dense
from granikv.cost_models.fit.figures import HEADERS, figure_rows
from granikv.cost_models.fit.shared_pages import (
    IN_FLIGHT,
    SharedRows,
    fit_shared_pages,
    shared_samples,
)
from granikv.cost_models.fit.terms import collect, fitted_terms
from granikv.cost_models.fit.traffic import fit_traffic
from granikv.cost_models.hardware import load_hardware
from granikv.cost_models.ideal import Peaks
from granikv.cost_models.params import load_params
from granikv.cost_models.readers.own import read_own
from granikv.cost_models.readers.public import read_public

A100 = load_hardware("a100-sxm4-80gb")
H200 = load_hardware("h200-sxm")
RNG = np.random.default_rng(5)


@pytest.mark.parametrize("name", ["paged", "extend", "all_reduce"])
def test_shipped_rows_give_the_shipped_parameters(name: str) -> None:
    term = next(term for term in fitted_terms(A100.name) if term.name == name)
    samples = collect(term, read_public(A100.name, name), read_own([]))
    assert samples is not None
    fit = fit_term(term, samples, Peaks.of(A100), "rows")
    shipped = getattr(load_params(A100.name).terms, name)
    assert np.allclose(fit.fitted.efficiency, shipped.efficiency, rtol=1e-3)
    assert fit.fitted.held_out is not None
    assert fit.fitted.held_out.median == pytest.approx(shipped.held_out.median, abs=2e-3)
    assert fit.meets_goal
    assert len(figure_rows(A100.name, [fit])[0]) == len(HEADERS)


def test_public_attention_times_come_down_to_our_level_where_both_exist() -> None:
    term = next(term for term in fitted_terms("h200-sxm") if term.name == "paged")
    public = read_public("h200-sxm", "paged")
    assert public is not None
    alone = collect(term, public, read_own([]))
    sizes = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "rows": 1, "page_size": 1}
    own = pl.DataFrame(
        sizes
        | {
            "op": "decode_attention",
            "backend": "fa3",
            "prefixes": 0,
            "tokens": 64.0,
            "time_us": 7.0,
        }
    )
    both = collect(term, public, own)
    assert alone is not None
    assert both is not None
    assert both.time_ns[0] == pytest.approx(alone.time_ns[0] - 2200)
    assert both.weight[-1] > both.weight[0]
    assert both.shape[-1] == "32x8x128"


def test_an_unknown_gpu_is_refused() -> None:
    other = H200.model_copy(update={"name": "b300"})
    with pytest.raises(ConfigError, match=r"b300 has no stated values.*h100-sxm"):
        build_params(other, read_own([]))


def test_traffic_recovers_rate_and_latency() -> None:
    moved = np.geomspace(1e4, 1e9, 40)
    times = (moved / (0.6 * 4800) + 3000) * np.exp(0.01 * RNG.standard_normal(40)) / 1e3
    found = fit_traffic(pl.DataFrame({"bytes": moved, "time_us": times}), 4800.0)
    assert found.efficiency == pytest.approx(0.6, rel=0.03)
    assert found.latency_ns == pytest.approx(3000, rel=0.03)
    assert found.residual < 0.02


def test_dense_recovers_a_constant_efficiency() -> None:
    rows, length, kv = (
        RNG.choice(values, 400)
        for values in ((1, 8, 32, 64, 256, 512), (512, 2048, 8192, 32768), (1, 2, 4, 8))
    )
    peaks = Peaks.of(H200)
    compute = 4 * 128 * kv * length * np.maximum(4 * rows, 128) / peaks.flops
    work = np.maximum(compute, 4 * 128 * kv * length / peaks.hbm_bytes)
    frame = pl.DataFrame(
        {
            "num_q_heads": 4 * kv,
            "num_kv_heads": kv,
            "head_dim": 128,
            "rows": rows,
            "length": length,
            "time_us": (6000 + work / 0.6) / 1e3,
        }
    )
    fit = fit_dense(frame, peaks)
    assert fit.latency_ns == pytest.approx(6000, rel=0.1)
    error = np.abs(fit.predicted_ns / fit.samples.time_ns - 1)
    assert np.median(error) < 0.02
    assert fit.surface.efficiency(1024, 16384, 8) == pytest.approx(0.6, rel=0.05)


def _shared_rows() -> SharedRows:
    """Rows of three head sets whose shared tokens cost 0.5, or 1 where readers take turns."""
    frame = pl.DataFrame(
        [
            {
                "num_q_heads": 4 * kv,
                "num_kv_heads": kv,
                "head_dim": 128,
                "rows": rows,
                "tokens": 256.0,
                "length": length,
                "sharers": rows // prefixes,
                "time_us": 1.0,
            }
            for kv in (2, 4, 8)
            for rows in (16, 64, 256)
            for prefixes in (1, 4, 16)
            for length in (2048, 8192, 32768)
        ]
    )
    paged = load_params("h200-sxm").terms.paged
    return shared_samples(frame, paged, Peaks.of(H200), H200.sm_count)


def test_shared_pages_recover_their_cost() -> None:
    rows = _shared_rows()
    truth = fit_shared_pages(rows)
    known = np.where(np.array(IN_FLIGHT)[:, None, None] >= 2, np.log(0.5), 0.0)
    surface = type(truth)(truth.log2_knots, np.broadcast_to(known, truth.log_efficiency.shape))
    measured = rows.predict(surface)
    again = fit_shared_pages(
        SharedRows(
            rows.lines,
            rows.floor_ns,
            rows.private,
            rows.reads,
            rows.in_flight,
            rows.waves,
            rows.length,
            measured,
            rows.shape,
        )
    )
    assert np.median(np.abs(rows.predict(again) / measured - 1)) < 0.02
    assert again.efficiency(8.0, 1.0, 8192.0) == pytest.approx(0.5, rel=0.05)
    assert (np.diff(again.log_efficiency, axis=0) <= 1e-12).all()
    assert (np.diff(again.log_efficiency, axis=1) >= -1e-12).all()
    assert (again.log_efficiency[0] == 0).all()
