"""The step rung: the cost model alone, fed the batch of each step that a live server recorded."""

import json
from collections import Counter
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from granikv.core.errors import TraceFormatError
from granikv.core.step import StepShape
from granikv.cost_models.memory import padded_tokens
from granikv.cost_models.step import StepCost
from granikv.validate.compare.error_measures import Errors, errors
from granikv.validate.compare.live_run import LiveRun
from granikv.validate.compare.shared_reads import SharedReads, plan_of

# A step that starts so much later than its predecessor ended did not follow it at once: the server
# had nothing to do, and the gap is no step time.
_IDLE_S = 1e-3
_UNKNOWN_LENGTHS = "extend of several requests whose lengths were not recorded"
_UNKNOWN_READS = "decode of rows of which it is not known what they shared in COLD"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Recorded steps beside their predictions.

    Attributes:
        table: a row per recorded row: `mode` (extend, private, paged, cascade or dense), `rows`,
            `recorded_us` and `predicted_us` of one step. What was recorded is the time to the next
            start where that follows at once, else the time on the GPU.
        skipped: reason to how many steps have no prediction.
    """

    table: pl.DataFrame
    skipped: dict[str, int]

    def errors(self, *by: str) -> dict[tuple[object, ...], Errors]:
        """Errors of groups of steps; without a column, of all under the key ()."""
        if not by:
            return {(): _errors(self.table)} if self.table.height else {}
        groups = self.table.group_by(by, maintain_order=True)
        return {key: _errors(group) for key, group in sorted(groups)}


def step_times(run: LiveRun, cost: StepCost) -> StepTimes:
    """Predict every recorded step of a run.

    Raises:
        TraceFormatError: a recorded batch cannot be read.
    """
    reads, sizes = SharedReads.of(run), run.prefill_graph_tokens
    skipped: Counter[str] = Counter()
    rows = []
    taken_s = recorded_s(run.steps).tolist()
    for step, step_s in zip(run.steps.iter_rows(named=True), taken_s, strict=True):
        is_decode = step["kind"] == "decode"
        if is_decode and not reads.knows(step):
            skipped[_UNKNOWN_READS] += 1
            continue
        try:
            found = _decode(step, reads, cost) if is_decode else _extend(step, sizes, cost)
        except (ValueError, KeyError) as error:
            raise TraceFormatError(
                f"{run.folder}: step {step['iter']} cannot be read ({error}); record it again."
            ) from None
        if found is None:
            skipped[_UNKNOWN_LENGTHS] += 1
            continue
        mode, predicted_ns = found
        rows.append((mode, step["rows"], step_s * 1e6, predicted_ns / 1e3))
    schema = {"mode": pl.String, "rows": pl.Int64, "recorded_us": pl.Float64}
    table = pl.DataFrame(rows, schema | {"predicted_us": pl.Float64}, orient="row")
    return StepTimes(table.filter(pl.col("recorded_us") > 0), dict(skipped))


def recorded_s(steps: pl.DataFrame) -> NDArray[np.float64]:
    """Seconds of each recorded step: to the next start where that follows at once, else on the GPU.

    Where a row stands for several steps, their mean.
    """
    starts = steps["start_s"].to_numpy()
    gpu_s = steps["gpu_us"].to_numpy() / 1e6
    taken_s = np.append(np.diff(starts), np.inf)
    taken_s = np.where(taken_s - gpu_s < _IDLE_S, np.maximum(taken_s, gpu_s), gpu_s)
    return taken_s / steps["steps"].to_numpy()


def shape_of(step: dict[str, object], reads: SharedReads, cost: StepCost) -> StepShape:
    """The batch of a decode step."""
    segments, private_tokens = reads.at(step)
    rows, padded_rows = int(str(step["rows"])), int(str(step["padded_rows"]))
    return StepShape(rows, padded_rows, private_tokens, private_tokens, segments, *cost.heads[:3])


def _decode(
    step: dict[str, object], reads: SharedReads, cost: StepCost
) -> tuple[str, float] | None:
    shape = shape_of(step, reads, cost)
    plan = plan_of(step, len(shape.segments))
    mode = max(plan.modes).name.lower() if plan.modes else "private"
    steps = int(str(step["steps"]))
    return mode, float(cost.segment(shape, plan, steps)[-1]) / steps


def _extend(
    step: dict[str, object], graph_tokens: tuple[int, ...], cost: StepCost
) -> tuple[str, float] | None:
    told = json.loads(str(step["plan_json"]) or "{}") or {}
    if not (pairs := told.get("extend")):
        return None
    new, cached = zip(*pairs, strict=True)
    return "extend", cost.extend(new, cached, padded_tokens(sum(new), graph_tokens)).total_ns


def _errors(table: pl.DataFrame) -> Errors:
    return errors(table["predicted_us"].to_numpy(), table["recorded_us"].to_numpy())
