"""operator_items: what rows of GraniKV's whole operator say, in the form of the parameter file."""

from typing import Any

import polars as pl

from granikv.cost_models.fit import own_rows
from granikv.cost_models.fit.fused import (
    CELL,
    FusedFit,
    ShareFit,
    fit_cascade,
    fit_fused,
    slowed,
)
from granikv.cost_models.fit.rereads import fit_rereads
from granikv.cost_models.fit.result import held_out_error, rounded
from granikv.cost_models.fit.saturation import Saturation, fit_saturation
from granikv.cost_models.hardware import Hardware
from granikv.cost_models.params import GpuParams, Terms

_LEAST_FUSED_CALLS = 8
_PRIVATE_PASS = "granikv_stream_paged"


def operator_items(own: pl.DataFrame, params: GpuParams, hardware: Hardware) -> dict[str, Any]:
    """The fused launch and `M_sat`, where rows of GraniKV's whole operator have them.

    `params` has every other term that attention takes.
    """
    rows = own_rows.operator_rows(own)
    dense = rows.filter(pl.col("mode") == "dense")
    cells = dense.filter("is_overlapped").n_unique(CELL)
    items: dict[str, Any] = {}
    if cells >= _LEAST_FUSED_CALLS:
        items |= _fused_items(dense, params, hardware)
        cascades = rows.filter((pl.col("mode") == "cascade") & pl.col("is_overlapped"))
        if cascades.n_unique(CELL) >= _LEAST_FUSED_CALLS:
            terms = Terms.model_validate(dict(params.terms.items()) | items)
            params = params.model_copy(update={"terms": terms})
            items |= _cascade_items(cascades, params, hardware)
    paged = rows.filter(pl.col("backend") == _PRIVATE_PASS)
    if paged.n_unique(CELL) >= _LEAST_FUSED_CALLS:
        items["private_reread_share"] = _reread_item(paged)
    found = fit_saturation(rows)
    if found is not None:
        items["m_sat"] = _saturation_item(found, own_rows.source_of(rows))
    return items


def _fused_items(dense: pl.DataFrame, params: GpuParams, hardware: Hardware) -> dict[str, Any]:
    fit = fit_fused(dense, params, hardware)
    error = fit.error
    common = {
        "provenance": "fitted",
        "source": f"{own_rows.source_of(dense)}: the fastest overlapped call of GraniKV's whole "
        f"operator (one launch, or two passes side by side) on each of {fit.rows} batches, all "
        "dense: its launch, and of the shorter of its passes over prefixes and its private pass "
        "what it does not hide, fitted together. It is the error of "
        f"whole calls that is given: {fit.residual:.1%} in the median; {error.median:.1%} "
        f"(p90 {error.p90:.1%}) without a batch's heads and length",
        "valid_range": {"rows": _range(dense["rows"]), "tokens": _range(dense["length"])},
        **_errors(fit),
    }
    share_error = max(0.05, 1.4826 * error.median / max(fit.exposed_share, 0.05))
    return {
        "fused_latency_ns": common
        | {
            "value": round(fit.latency_ns, 1),
            "unit": "ns",
            "rel_error": rounded(min(1.0, max(0.05, fit.spread))),
        },
        "fused_exposed_share": common
        | {
            "value": round(fit.exposed_share, 3),
            "unit": "share",
            "rel_error": rounded(min(1.0, share_error)),
        },
    }


def _cascade_items(cascades: pl.DataFrame, params: GpuParams, hardware: Hardware) -> dict[str, Any]:
    fit = fit_cascade(cascades, params, hardware)
    terms = slowed(params, fit.share).terms
    common = {
        "provenance": "fitted",
        "source": f"{own_rows.source_of(cascades)}: {fit.rows} batches by GraniKV's operator, all "
        f"cascade, in one launch: {fit.share:.2f} of the rates once assumed (0.35 of the peak, 5.5 "
        "TB/s from L2), one factor for both. It is the error of whole calls that is given",
        "rel_error": rounded(max(0.05, 1.4826 * fit.error.median)),
        **_errors(fit),
    }
    compute, reread = terms.cascade_compute_efficiency, terms.reread_bytes_per_s
    return {
        "cascade_compute_efficiency": common
        | {"value": rounded(compute.value), "unit": "fraction"},
        "reread_bytes_per_s": common | {"value": float(f"{reread.value:.4g}"), "unit": "bytes/s"},
    }


def _reread_item(paged: pl.DataFrame) -> dict[str, Any]:
    fit = fit_rereads(paged)
    return {
        "value": round(fit.share, 3),
        "unit": "share",
        "provenance": "fitted",
        "source": f"{own_rows.source_of(paged)}: {fit.rows} batches by GraniKV's private pass "
        "alone, whose rows have tokens in common: what a read of those costs, of a private one. "
        "It is the error of whole calls that is given",
        "rel_error": rounded(max(0.05, 1.4826 * fit.error.median)),
        "valid_range": {"rows": _range(paged["rows"]), "tokens": _range(paged["length"])},
        **_errors(fit),
    }


def _errors(fit: FusedFit | ShareFit) -> dict[str, Any]:
    """Of whole calls."""
    return {
        "rows_used": fit.rows,
        "residual": rounded(fit.residual),
        "held_out": held_out_error(fit.error, "sets of heads and prefix length"),
    }


def _saturation_item(found: Saturation, source: str) -> dict[str, Any]:
    shortest, longest = found.lengths
    below = "dense was fastest at every size measured"
    if found.below is not None:
        below = f"it was not at {found.below}, the next smaller size measured"
    without = "some do not give one without one of their prefix lengths"
    if found.without_a_length is not None:
        low, high = found.without_a_length
        without = f"without one prefix length they give {low} to {high}"
    return {
        "value": float(found.m_sat),
        "unit": "rows",
        "provenance": "fitted",
        "source": f"{source}: from this rows x group on, the best dense call of GraniKV's whole "
        "operator took at most as long as the best cascade or paged one (stock FA3 counts), in the "
        f"median over prefixes of {shortest:,} to {longest:,} tokens and private lengths; {below}; "
        f"{without}. Obeying it costs {found.median_loss:.1%} in the median of {found.cells} "
        f"batches and {found.worst_loss:.1%} at most",
        "rows_used": found.rows,
        "rel_error": 0.0,
        "residual": rounded(found.median_loss),
        "valid_range": {
            "tile_rows": (float(found.least), float(found.most)),
            "tokens": (float(shortest), float(longest)),
        },
    }


def _range(values: pl.Series) -> tuple[float, float]:
    sizes = values.cast(pl.Float64).to_numpy()
    return float(sizes.min()), float(sizes.max())
