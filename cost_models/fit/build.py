"""build_params: the parameter file of one GPU from measured rows, stated values and its base."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import yaml

from granikv.core.errors import ConfigError
from granikv.cost_models.catalog import data_file
from granikv.cost_models.fit import own_rows
from granikv.cost_models.fit.dense import GRID as DENSE_GRID
from granikv.cost_models.fit.dense import fit_dense
from granikv.cost_models.fit.held_out import predict_held_out
from granikv.cost_models.fit.host import LaunchFit, RowFit, fit_launch, fit_stock_row
from granikv.cost_models.fit.operator_terms import operator_items
from granikv.cost_models.fit.result import FitParts, TermFit, make_result, rounded
from granikv.cost_models.fit.shared_pages import (
    IN_FLIGHT,
    TOKENS,
    WAVES,
    fit_shared_pages,
    hold_out_shared_pages,
    shared_samples,
)
from granikv.cost_models.fit.surface_fit import Samples, fit_surface
from granikv.cost_models.fit.terms import Term, collect, fitted_terms, latency_of
from granikv.cost_models.fit.traffic import Traffic, fit_traffic
from granikv.cost_models.hardware import Hardware, load_hardware
from granikv.cost_models.ideal import Peaks
from granikv.cost_models.params import FittedSurface, GpuParams, Terms, load_params
from granikv.cost_models.readers.own import read_own, shipped_paths, steps_path
from granikv.cost_models.readers.public import TABLE_SOURCE, read_public
from granikv.cost_models.rows import read_rows

_ALL_REDUCE_FOLDS = 64  # every message size is held out alone
_LEAST_TRAFFIC_ROWS = 8
_TITLES = {
    "gemm": "GEMM bf16, m <= 16384",
    "paged": "decode, private pages",
    "extend": "prefill attention",
    "all_reduce": "all-reduce, 2-8 GPUs",
}

# GPUs without rows of their own: whose fit they take, what is added to each error, and why.
DERIVED = {
    "a100-sxm4-40gb": (
        "a100-sxm4-80gb",
        0.0,
        "The 80 GB A100's efficiencies applied to this GPU's own bandwidth and capacity.",
    ),
    "h100-sxm": (
        "h200-sxm",
        0.05,
        "No H100 row is behind this file: the H200's efficiencies (same compute dies) applied to "
        "the H100's datasheet bandwidth, with every error widened by 5 points.",
    ),
}
_NOTES = {
    "a100-sxm4-80gb": "GEMM, extend, private decode and all-reduce are fitted to rows of this GPU; "
    "everything that concerns a shared prefix is the published GraniKV figures (A100-SXM4-40GB) "
    "or an assumption, not a measurement of ours.",
    "h200-sxm": "All terms are fitted to rows of this GPU but host time of a decode step and of "
    "an extend batch and GraniKV's private pass: assumptions where no recorded step is given (as "
    "are cascade and fused launch where no row of the whole operator is).",
}


@dataclass(frozen=True, slots=True)
class FitResult:
    """The parameters of one GPU and the fits behind them (of its base, when it has one).

    A GPU with a base takes the values of its base's shipped file, so that it has what recorded
    steps have added to that.
    """

    params: GpuParams
    fits: list[TermFit]


def build_params(
    hardware: Hardware,
    own: pl.DataFrame | None = None,
    on_term: Callable[[str], None] = lambda _: None,
) -> FitResult:
    """Fit every term that rows cover; take the rest from stated values or from the GPU's base.

    Args:
        hardware: a GPU that the project has stated values or a base for.
        own: rows of `read_own`, of this GPU; the shipped ones when None.
        on_term: called with the name of each term before it is fitted.

    Raises:
        ConfigError: nothing is known of this GPU, or rows are of another one.
    """
    name = hardware.name
    if own is None:
        own = read_own(shipped_paths(name))
    _check_gpu(own, name)
    base = DERIVED.get(name)
    if base is None and name not in _NOTES:
        known = ", ".join(sorted([*_NOTES, *DERIVED]))
        raise ConfigError(f"{name} has no stated values and no base to fit on; known: {known}.")
    fits = _fit_all(hardware, own, on_term)
    items = {fit.name: fit.fitted for fit in fits} | _fit_traffic_terms(own, hardware)
    if base is None:
        return FitResult(_own_params(hardware, items, own), fits)
    base_name, extra_error, note = base
    lent = build_params(load_hardware(base_name), None, on_term)
    base_terms = load_params(base_name).terms
    borrowed = dict(_borrowed(base_terms, base_name, extra_error).items())
    terms = Terms.model_validate(borrowed | items)
    note = f"{note} {_NOTES[base_name]}"
    params = GpuParams(gpu=name, derived_from=base_name, note=note, terms=terms)
    return FitResult(params, fits or lent.fits)


def _own_params(hardware: Hardware, items: dict[str, Any], own: pl.DataFrame) -> GpuParams:
    """Fitted and stated terms together; what whole steps leave over last."""
    name = hardware.name
    body = stated_terms(name) | items
    params = GpuParams(gpu=name, note=_NOTES[name], terms=Terms.model_validate(body))
    body |= operator_items(own, params, hardware)
    path = steps_path(name)
    if path.exists():
        params = params.model_copy(update={"terms": Terms.model_validate(body)})
        rows = read_rows(path)
        steps = rows.filter(pl.col("backend") == "sglang_fa3_decode")
        body["stock_row_ns"] = _row_item(fit_stock_row(steps, params, hardware), steps)
        answers = rows.filter(pl.col("backend") == "sglang_fa3_extend")
        fit = fit_launch(answers, params, hardware)
        body["host_extend_layer_ns"] = _launch_item(fit, answers)
    return params.model_copy(update={"terms": Terms.model_validate(body)})


def _row_item(fit: RowFit, steps: pl.DataFrame) -> dict[str, Any]:
    return {
        "value": round(fit.row_ns, 1),
        "unit": "ns",
        "provenance": "fitted",
        "source": f"live SGLang 0.5.17 decode steps of {steps['date'][0]} ({steps.height} rows): "
        "what whole steps of a stock engine take beyond the kernels, per row of the batch; each "
        f"predicted from the others is off by {np.median(fit.held_out):.1%} in the median, "
        f"{fit.held_out[-1]:.1%} at most",
        "rows_used": steps.height,
        "rel_error": 0.3,
        "residual": rounded(fit.residual),
        "valid_range": {"rows": (1.0, 256.0)},
    }


def _launch_item(fit: LaunchFit, answers: pl.DataFrame) -> dict[str, Any]:
    return {
        "value": round(fit.layer_ns, 1),
        "unit": "ns",
        "provenance": "fitted",
        "source": f"live SGLang 0.5.17 answers of one token, {answers['date'][0]} "
        f"({answers.height} rows, prefill graphs on): short prompts wait for the host to launch "
        f"their layers; besides, an answer takes {fit.round_trip_ns / 1e6:.1f} ms between "
        "processes, which is no part of a step",
        "rows_used": answers.height,
        "rel_error": 0.3,
        "residual": rounded(fit.residual),
        "valid_range": {"new_tokens": (16.0, 8192.0)},
    }


def stated_terms(gpu: str) -> dict[str, Any]:
    """Values that no row gives, as the parameter file holds them."""
    body: dict[str, Any] = yaml.safe_load(data_file("stated", ".yaml", gpu).read_text())
    return body


def _check_gpu(own: pl.DataFrame, name: str) -> None:
    others = sorted(set(own["gpu"].unique()) - {name})
    if others:
        raise ConfigError(f"The rows are of {', '.join(others)}; give --hardware {others[0]}.")


def _fit_all(
    hardware: Hardware, own: pl.DataFrame, on_term: Callable[[str], None]
) -> list[TermFit]:
    peaks = Peaks.of(hardware)
    fits = []
    for term in fitted_terms(hardware.name):
        samples = collect(term, read_public(hardware.name, term.name), own)
        if samples is not None:
            on_term(_TITLES[term.name])
            fits.append(fit_term(term, samples, peaks, _source(term, hardware.name, own)))
    dense = own_rows.dense_rows(own)
    if dense.height:
        on_term("prefix pass")
        source = f"{own_rows.source_of(own)}, {own_rows.dense_source(dense)}"
        fits.append(_fit_dense_term(dense, peaks, source))
    shared = own_rows.shared_rows(own)
    paged = next((fit.fitted for fit in fits if fit.name == "paged"), None)
    if shared.height and paged is not None:
        on_term("shared pages")
        kernels = f"FA3 over shared and private pages ({shared.height} rows)"
        source = f"{own_rows.source_of(own)}, {kernels}"
        fits.append(_fit_shared_term(shared, paged, hardware, source))
    return fits


def _source(term: Term, gpu: str, own: pl.DataFrame) -> str:
    parts = []
    if read_public(gpu, term.name) is not None:
        parts.append(f"{TABLE_SOURCE}, SGLang's default kernel, bf16")
    if term.own_of is not None and term.own_of(own).height:
        parts.append(f"{own_rows.source_of(own)} ({term.own_of(own).height} rows)")
    return "; ".join(parts)


def fit_term(term: Term, samples: Samples, peaks: Peaks, source: str) -> TermFit:
    """Fit one term to all rows, and judge the method on shapes held out."""
    latency_ns = latency_of(samples)
    ideal = term.ideal(peaks, latency_ns)
    surface = fit_surface(term.grid, samples, ideal)
    folds = {"folds": _ALL_REDUCE_FOLDS} if term.name == "all_reduce" else {}
    columns = samples.sizes.T
    return make_result(
        FitParts(
            name=term.name,
            title=_TITLES[term.name],
            surface=surface,
            axes=dict(zip(term.grid.names, term.grid.knots, strict=True)),
            latency_ns=latency_ns,
            sizes=dict(zip(term.grid.names, columns, strict=True)),
            measured_ns=samples.time_ns,
            predicted_ns=ideal(*columns) / surface.efficiency(*columns),
            held_out_ns=predict_held_out(term.grid, samples, ideal, **folds),
            shape=samples.shape,
            shape_kind=term.unit,
            source=source,
            goal=term.goal,
        )
    )


def _fit_dense_term(frame: pl.DataFrame, peaks: Peaks, source: str) -> TermFit:
    fit = fit_dense(frame, peaks)
    names = DENSE_GRID.names
    return make_result(
        FitParts(
            name="dense",
            title="prefix pass, contiguous",
            surface=fit.surface,
            axes=dict(zip(names, DENSE_GRID.knots, strict=True)),
            latency_ns=fit.latency_ns,
            sizes=dict(zip(names, fit.samples.sizes.T, strict=True)),
            measured_ns=fit.samples.time_ns,
            predicted_ns=fit.predicted_ns,
            held_out_ns=fit.held_out_ns,
            shape=fit.samples.shape,
            shape_kind="sets of heads",
            source=source,
            goal=None,
        )
    )


def _fit_shared_term(
    frame: pl.DataFrame, paged: FittedSurface, hardware: Hardware, source: str
) -> TermFit:
    rows = shared_samples(frame, paged, Peaks.of(hardware), hardware.sm_count)
    surface = fit_shared_pages(rows)
    return make_result(
        FitParts(
            name="shared_page_cost",
            title="FA3 over shared pages",
            surface=surface,
            axes={"in_flight": IN_FLIGHT, "waves": WAVES, "tokens": TOKENS},
            latency_ns=0.0,
            sizes={"in_flight": rows.in_flight, "waves": rows.waves, "tokens": rows.length},
            measured_ns=rows.time_ns,
            predicted_ns=rows.predict(surface),
            held_out_ns=hold_out_shared_pages(rows, fit_shared_pages),
            shape=rows.shape,
            shape_kind="sets of heads",
            source=source,
            goal=(0.06, 0.12),
        )
    )


def _fit_traffic_terms(own: pl.DataFrame, hardware: Hardware) -> dict[str, Any]:
    """Merge, copy and element-wise kernels, where our own rows have them."""
    hbm = hardware.hbm_bytes_per_s * 1e-9
    kernels = {
        "merge": ("merge", "sgl_merge_state_v2"),
        "copy": ("copy", "torch_gather"),
        "norm": ("fused_add_rmsnorm", "sgl_kernel"),
        "silu": ("silu_and_mul", "sgl_kernel"),
    }
    found: dict[str, Traffic] = {}
    for name, (op, backend) in kernels.items():
        frame = own_rows.traffic_rows(own, op, backend)
        if frame.height >= _LEAST_TRAFFIC_ROWS:
            found[name] = fit_traffic(frame, hbm)
    items: dict[str, Any] = {}
    if not found:
        return items
    source = own_rows.source_of(own)
    if "merge" in found:
        items |= _traffic_items("merge", found["merge"], f"{source}: SGLang's merge_state_v2")
    if "copy" in found:
        text = "K and V of one layer from random slots into a slab; one launch is assumed for all"
        items |= _traffic_items("copy", found["copy"], f"{source}: {text}")
    if "norm" in found and "silu" in found:
        norm, silu = found["norm"], found["silu"]
        layer = Traffic(
            norm.efficiency,
            4 * norm.latency_ns + silu.latency_ns,
            max(norm.residual, silu.residual),
            norm.rows + silu.rows,
        )
        text = "two norms and the activation; rotary embedding and KV write taken for two norms"
        items |= _traffic_items("elementwise", layer, f"{source}: {text}")
    return items


def _traffic_items(name: str, traffic: Traffic, source: str) -> dict[str, Any]:
    common = {
        "provenance": "fitted",
        "source": source,
        "rows_used": traffic.rows,
        "rel_error": rounded(max(0.05, 1.4826 * traffic.residual)),
        "residual": rounded(traffic.residual),
    }
    return {
        f"{name}_memory_efficiency": common | {"value": traffic.efficiency, "unit": "fraction"},
        f"{name}_latency_ns": common | {"value": traffic.latency_ns, "unit": "ns"},
    }


def _borrowed(terms: Terms, base: str, extra_error: float) -> Terms:
    changed = {
        name: item.model_copy(
            update={
                "source": f"as on {base}: {item.source}",
                "rows_used": 0,
                "rel_error": rounded(item.rel_error + extra_error),
                "provenance": "stated" if item.provenance == "fitted" else item.provenance,
                "held_out": None,
                "residual": None,
            }
        )
        for name, item in terms.items()
    }
    return terms.model_copy(update=changed)
