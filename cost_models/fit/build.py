"""build_params: the parameter file of one GPU from measured rows, stated values and its base."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from granikv.core.errors import ConfigError
from granikv.cost_models.catalog import data_file
from granikv.cost_models.fit.held_out import ErrorSummary, predict_held_out, summarise
from granikv.cost_models.fit.surface_fit import Samples, fit_surface
from granikv.cost_models.fit.terms import Term, latency_of, public_terms
from granikv.cost_models.hardware import Hardware
from granikv.cost_models.ideal import Peaks
from granikv.cost_models.params import FittedSurface, GpuParams, HeldOutError, Terms
from granikv.cost_models.readers.public import TABLE_SOURCE, read_public
from granikv.cost_models.surface import FloatArray, Surface

_DIGITS = 5
# A normal distribution with this median or this 90th percentile of absolute errors has sigma 1.
_SIGMA_OF_MEDIAN, _SIGMA_OF_P90 = 1.4826, 1 / 1.645
_ALL_REDUCE_FOLDS = 64  # every message size is held out alone

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
    "h200-sxm": "GEMM, extend, private decode and all-reduce are fitted to rows of this GPU; "
    "cascade, fused and host terms are assumptions.",
}


@dataclass(frozen=True, slots=True)
class TermFit:
    """One fitted term with what its report shows.

    Attributes:
        fitted: what the parameter file holds.
        samples: measured rows.
        predicted_ns: each row by the final fit.
        held_out_ns: each row by a fit that has not seen its shape.
        error: of `held_out_ns`.
    """

    term: Term
    fitted: FittedSurface
    samples: Samples
    predicted_ns: FloatArray
    held_out_ns: FloatArray
    error: ErrorSummary


def build_params(
    hardware: Hardware, on_term: Callable[[str], None] = lambda _: None
) -> tuple[GpuParams, list[TermFit]]:
    """Fit every term of one GPU that rows cover and take the rest from its stated values.

    A GPU without rows of its own takes another one's fit and says so.

    Raises:
        ConfigError: neither rows nor a base are known for this GPU.
    """
    base, extra_error, derived_note = DERIVED.get(hardware.name, (hardware.name, 0.0, ""))
    if base not in _NOTES:
        known = ", ".join(sorted([*_NOTES, *DERIVED]))
        raise ConfigError(f"There are no measured rows of {hardware.name}; fit one of {known}.")
    fits = fit_terms(base, on_term)
    items = stated_terms(base) | {fit.term.name: fit.fitted for fit in fits}
    terms = Terms.model_validate(items)
    derived_from = None
    if base != hardware.name:
        derived_from = base
        terms = _borrowed(terms, base, extra_error)
    note = f"{derived_note} {_NOTES[base]}".strip()
    return GpuParams(gpu=hardware.name, derived_from=derived_from, note=note, terms=terms), fits


def fit_terms(gpu: str, on_term: Callable[[str], None] = lambda _: None) -> list[TermFit]:
    """Fit the terms that public rows of a GPU cover."""
    peaks = peaks_of(gpu)
    fits = []
    for term in public_terms(gpu):
        frame = read_public(gpu, term.name)
        if frame is None:
            raise ConfigError(f"The shipped rows of {term.name} on {gpu} are missing; reinstall.")
        on_term(term.name)
        source = f"{TABLE_SOURCE}, {gpu}, SGLang's default kernel, bf16"
        fits.append(fit_term(term, term.samples_of(frame), peaks, source))
    return fits


def peaks_of(gpu: str) -> Peaks:
    """Datasheet peaks of a shipped GPU."""
    from granikv.cost_models.hardware import load_hardware

    return Peaks.of(load_hardware(gpu))


def fit_term(term: Term, samples: Samples, peaks: Peaks, source: str) -> TermFit:
    """Fit one term to all rows, and judge the method on shapes held out."""
    latency_ns = latency_of(samples)
    ideal = term.ideal(peaks, latency_ns)
    surface = fit_surface(term.grid, samples, ideal)
    folds = {"folds": _ALL_REDUCE_FOLDS} if term.name == "all_reduce" else {}
    held_out_ns = predict_held_out(term.grid, samples, ideal, **folds)
    error = summarise(held_out_ns, samples.time_ns, samples.shape)
    predicted_ns = ideal(*samples.sizes.T) / surface.efficiency(*samples.sizes.T)
    residual = float(np.median(np.abs(predicted_ns / samples.time_ns - 1)))
    fitted = to_fitted(term, surface, samples, latency_ns, error, residual, source)
    return TermFit(term, fitted, samples, predicted_ns, held_out_ns, error)


def to_fitted(
    term: Term,
    surface: Surface,
    samples: Samples,
    latency_ns: float,
    error: ErrorSummary,
    residual: float,
    source: str,
) -> FittedSurface:
    """The surface in the form of the parameter file."""
    sigma = max(error.median * _SIGMA_OF_MEDIAN, error.p90 * _SIGMA_OF_P90)
    low, high = samples.sizes.min(axis=0).tolist(), samples.sizes.max(axis=0).tolist()
    return FittedSurface(
        provenance="fitted",
        source=source,
        rows_used=len(samples.time_ns),
        rel_error=_rounded(sigma),
        residual=_rounded(residual),
        held_out=HeldOutError(
            median=_rounded(error.median),
            p90=_rounded(error.p90),
            median_interval=_pair(error.median_interval),
            p90_interval=_pair(error.p90_interval),
            shapes=f"{error.shapes} {term.unit}",
        ),
        valid_range=dict(zip(term.grid.names, zip(low, high, strict=True), strict=True)),
        latency_ns=latency_ns,
        axes=dict(zip(term.grid.names, term.grid.knots, strict=True)),
        efficiency=tuple(
            float(f"{value:.{_DIGITS}g}") for value in np.exp(surface.log_efficiency).ravel()
        ),
    )


def stated_terms(gpu: str) -> dict[str, Any]:
    """Values that no row gives, as the parameter file holds them."""
    body: dict[str, Any] = yaml.safe_load(data_file("stated", ".yaml", gpu).read_text())
    return body


def _borrowed(terms: Terms, base: str, extra_error: float) -> Terms:
    changed = {
        name: item.model_copy(
            update={
                "source": f"as on {base}: {item.source}",
                "rows_used": 0,
                "rel_error": _rounded(item.rel_error + extra_error),
                "provenance": "stated" if item.provenance == "fitted" else item.provenance,
                "held_out": None,
                "residual": None,
            }
        )
        for name, item in terms.items()
    }
    return terms.model_copy(update=changed)


def _rounded(value: float) -> float:
    return round(value, 4)


def _pair(values: Sequence[float]) -> tuple[float, float]:
    return _rounded(values[0]), _rounded(values[1])
