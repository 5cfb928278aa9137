"""Recorded steps of live servers as the cost model prices them: one row a step, host time apart.

A step's time is what passes until the next one starts: `gpu_us` on the GPU, and a gap. It is known
where the next iteration was recorded too and was a decode step, which never waits for a request.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from granikv.core.step import Launch, Mode, Segment, StepPlan, StepShape
from granikv.cost_models.hardware import Hardware
from granikv.cost_models.models import ModelShape
from granikv.cost_models.params import GpuParams
from granikv.cost_models.step import StepCost
from granikv.cost_models.surface import FloatArray

UNSHARED = "unshared"  # the mode of a step without shared segments
_PARTS = {
    "mode": pl.String(),
    "length": pl.Int64(),
    "kernels_ns": pl.Float64(),
    "launches": pl.Int64(),
    "exposed_ns": pl.Float64(),
    "most_ns": pl.Float64(),
}


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Steps of one live server.

    Attributes:
        name: of the run, for tables and provenance.
        steps: rows of `steps.parquet` (schema in `granikv.traces.records`).
    """

    name: str
    model: ModelShape
    tp: int
    steps: pl.DataFrame


def timed_steps(run: RecordedRun, kind: str) -> pl.DataFrame:
    """Steps of a kind that a decode step follows at once, with `run`, `gpu_ns` and `gap_ns`."""
    ordered = run.steps.sort("replica", "iter")
    is_next = (pl.col("iter").shift(-1) == pl.col("iter") + 1) & (
        pl.col("replica").shift(-1) == pl.col("replica")
    )
    kept = is_next & (pl.col("kind").shift(-1) == "decode") & (pl.col("steps") == 1)
    kept &= (pl.col("kind") == kind) & (pl.col("gpu_us") > 0)
    interval = (pl.col("start_s").shift(-1) - pl.col("start_s")) * 1e9
    timed = ordered.with_columns(
        run=pl.lit(run.name),
        gpu_ns=pl.col("gpu_us") * 1e3,
        gap_ns=interval - pl.col("gpu_us") * 1e3,
        is_timed=kept,
    )
    return timed.filter("is_timed").drop("is_timed")


def price_decodes(
    runs: Sequence[RecordedRun], params: GpuParams, hardware: Hardware
) -> pl.DataFrame:
    """Every timed decode step of all runs with its parts by these parameters.

    Added columns: `mode` (of all its segments, or `mixed`, or `unshared`), `length` of the longest
    segment, `kernels_ns` (nothing exposed, without fused latency and host time), `launches` (fused
    ones), `exposed_ns`, the smaller of compute and memory time of those, and `most_ns`, what can be
    exposed at most. Steps under a row split are left out: there, what a launch hides is no sum.
    """
    return pl.concat([_priced(run, params, hardware) for run in runs])


def predicted_ns(steps: pl.DataFrame, params: GpuParams) -> FloatArray:
    """Time of priced steps by `params`, which may differ from what priced them in fused and host
    terms.
    """
    terms = params.terms
    names = ("rows", "kernels_ns", "launches", "exposed_ns", "most_ns")
    rows, kernels, launches, exposed, most = (steps[name].to_numpy() for name in names)
    host = terms.host_decode_ns.value + terms.host_decode_row_ns.value * rows
    exposed = np.minimum(terms.fused_exposed_share.value * exposed, most)
    return np.asarray(kernels + host + terms.fused_latency_ns.value * launches + exposed)


def _priced(run: RecordedRun, params: GpuParams, hardware: Hardware) -> pl.DataFrame:
    steps = timed_steps(run, "decode")
    is_whole = steps["plan_json"].map_elements(
        lambda text: not json.loads(text)["row_split"], return_dtype=pl.Boolean
    )
    steps = steps.filter(is_whole)
    cost = StepCost(params, run.model, hardware, run.tp)
    parts = [_parts_of(step, cost) for step in steps.iter_rows(named=True)]
    return steps.hstack(pl.DataFrame(parts, schema=_PARTS, orient="row"))


def _parts_of(step: dict[str, Any], cost: StepCost) -> tuple[str, int, float, int, float, float]:
    """The columns of `_PARTS`."""
    shape, plan = _shape_and_plan(step, cost)
    modes = set(plan.modes)
    name = UNSHARED if not modes else "mixed" if len(modes) > 1 else min(modes).name.lower()
    length = max([segment.length for segment in shape.segments], default=0)
    line = cost.decode(shape, plan)
    if plan.launch is not Launch.FUSED or not modes - {Mode.PAGED}:
        kernels = line.ns(shape.private_tokens) - line.host_ns
        return name, length, kernels, 0, 0.0, 0.0
    parts = cost.fused_work(shape, plan).parts_ns(shape.private_tokens)
    greater, smaller, one_by_one = parts
    kernels = line.gemm_ns + line.collective_ns + greater
    return name, length, kernels, cost.model.layers, smaller, one_by_one - greater


def _shape_and_plan(step: dict[str, Any], cost: StepCost) -> tuple[StepShape, StepPlan]:
    """What a recorded decode step ran; no term asks for the longest row's private tokens."""
    segments = tuple(Segment(*segment) for segment in json.loads(step["segments_json"]))
    plan = json.loads(step["plan_json"])
    modes = tuple(Mode(mode) for mode in plan["modes"])
    shape = StepShape(
        step["rows"], step["padded_rows"], step["private_tokens"], 0, segments, *cost.heads[:3]
    )
    return shape, StepPlan(modes, Launch[plan["launch"].upper()])
