"""Recorded steps of live servers as the cost model prices them: one row a step, host time apart.

A step's time is what passes until the next one starts: `gpu_us` on the GPU, and a gap. It is known
where the next iteration was recorded too and was a decode step, which never waits for a request.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from granikv.core.step import Launch, Mode, Segment, StepPlan, StepShape
from granikv.cost_models.hardware import Hardware
from granikv.cost_models.models import ModelShape
from granikv.cost_models.params import GpuParams
from granikv.cost_models.step import StepCost

UNSHARED = "unshared"  # the mode of a step without shared segments
_PARTS = {
    "mode": pl.String(),
    "length": pl.Int64(),
    "predicted_ns": pl.Float64(),
    "other_ns": pl.Float64(),
    "layers": pl.Int64(),
    "prefix_ns": pl.Float64(),
    "launch_ns": pl.Float64(),
    "cascade_ns": pl.Float64(),
    "token_ns": pl.Float64(),
    "is_fused": pl.Boolean(),
    "is_fitted": pl.Boolean(),
    "reads_shared": pl.Boolean(),
}


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Steps of one live server.

    Attributes:
        name: of the run, for tables and provenance.
        steps: rows of `steps.parquet` (schema in `granikv.traces.records`); of a stock server with
            what rows share filled in.
        is_stock: whether decode attention was SGLang's own.
        prefill_graph_tokens: sizes of extend steps that a CUDA graph runs, ascending.
    """

    name: str
    model: ModelShape
    tp: int
    steps: pl.DataFrame
    is_stock: bool = False
    prefill_graph_tokens: tuple[int, ...] = ()


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
    segment, `predicted_ns`, and for a fit of GraniKV's attention `other_ns` (matrix products and
    collectives), `layers`, `prefix_ns` (dense passes, all layers) and `launch_ns` (their launches,
    a part of it), `cascade_ns`, `token_ns` (all layers' private reads at the peak) and `is_fused`;
    `is_fitted` where these are the whole step, `reads_shared` where rows read common tokens there
    too. Steps under a row split are left out.
    """
    return pl.concat([_priced(run, params, hardware) for run in runs])


def _priced(run: RecordedRun, params: GpuParams, hardware: Hardware) -> pl.DataFrame:
    steps = timed_steps(run, "decode")
    is_whole = steps["plan_json"].map_elements(
        lambda text: not json.loads(text)["row_split"], return_dtype=pl.Boolean
    )
    steps = steps.filter(is_whole)
    cost = StepCost(params, run.model, hardware, run.tp, is_stock=run.is_stock)
    parts = [_parts_of(step, cost) for step in steps.iter_rows(named=True)]
    return steps.hstack(pl.DataFrame(parts, schema=_PARTS, orient="row"))


def _parts_of(step: dict[str, Any], cost: StepCost) -> tuple[Any, ...]:
    """The columns of `_PARTS`."""
    shape, plan = _shape_and_plan(step, cost)
    modes = set(plan.modes)
    name = UNSHARED if not modes else "mixed" if len(modes) > 1 else min(modes).name.lower()
    length = max([segment.length for segment in shape.segments], default=0)
    line = cost.decode(shape, plan)
    is_fused = plan.launch is Launch.FUSED and bool(modes - {Mode.PAGED})
    prefix_ns = cost.attention.fused_parts_ns(shape, plan)[0] if is_fused else 0.0
    launch_ns = cost.model.layers * cost.attention.dense.latency_ns if Mode.DENSE in modes else 0.0
    cascade_ns = cost.attention.cascades_ns(shape, plan) if is_fused else 0.0
    token_ns = shape.private_tokens * cost.model.layers * cost.heads.kv_bytes
    return (
        name,
        length,
        float(line.ns(shape.private_tokens)),
        line.gemm_ns + line.collective_ns,
        cost.model.layers,
        prefix_ns,
        launch_ns if is_fused else 0.0,
        cascade_ns,
        token_ns / (cost.hardware.hbm_bytes_per_s * 1e-9),
        is_fused,
        not cost.is_stock and Mode.PAGED not in modes and (is_fused or not modes),
        Mode.PAGED in modes,
    )


def _shape_and_plan(step: dict[str, Any], cost: StepCost) -> tuple[StepShape, StepPlan]:
    """What a recorded decode step ran; no term asks for the longest row's private tokens."""
    segments = tuple(Segment(*segment) for segment in json.loads(step["segments_json"]))
    plan = json.loads(step["plan_json"])
    modes = tuple(Mode(mode) for mode in plan["modes"])
    shape = StepShape(
        step["rows"], step["padded_rows"], step["private_tokens"], 0, segments, *cost.heads[:3]
    )
    return shape, StepPlan(modes, Launch[plan["launch"].upper()])
