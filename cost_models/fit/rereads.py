"""fit_rereads: what GraniKV's private pass pays for tokens that several rows read."""

import numpy as np
import polars as pl

from granikv.cost_models.fit.fused import ShareFit, shape_names
from granikv.cost_models.fit.held_out import predict_unseen, summarise
from granikv.cost_models.fit.robust import bounded_fit
from granikv.cost_models.ideal import ELEMENT_BYTES
from granikv.cost_models.surface import FloatArray

_SOFTNESS = 0.1  # relative error from which a row counts less
_LEAST_READERS = 8


def fit_rereads(frame: pl.DataFrame) -> ShareFit:
    """What a read from L2 costs, as a share of a read from memory: robust least squares of relative
    error over a launch, a private read and a shared read.

    `frame` holds rows of `own_rows.operator_rows` that ran GraniKV's private pass alone over
    tokens that rows have in common, by eight rows or more: fewer leave the card half empty, and
    wait for memory.
    """
    calls = frame.filter(pl.col("sharers") >= _LEAST_READERS)
    token_bytes = 2 * ELEMENT_BYTES * calls["num_kv_heads"] * calls["head_dim"]
    measured = calls["time_us"].to_numpy() * 1e3
    columns = (token_bytes * calls["rows"] * calls[name] for name in ("tokens", "length"))
    reads = [column.cast(pl.Float64).to_numpy() for column in columns]
    terms = np.stack([np.ones_like(measured), *reads])
    names = shape_names(calls)
    predicted = predict_unseen(
        names, lambda hidden: _fit(terms[:, ~hidden], measured[~hidden]) @ terms[:, hidden]
    )
    found = _fit(terms, measured)
    residual = float(np.median(np.abs(found @ terms / measured - 1)))
    error = summarise(predicted, measured, names)
    return ShareFit(float(min(1.0, found[2] / found[1])), residual, error, calls.height)


def _fit(terms: FloatArray, measured: FloatArray) -> FloatArray:
    columns = tuple(terms / measured)
    return bounded_fit(columns, np.ones_like(measured), _SOFTNESS, (np.inf,) * len(columns))
