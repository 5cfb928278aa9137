"""The schedule rung: the simulator's scheduler and pools alone, with the live run's own step times.

A step takes what the recorded step took that did most nearly the same: of decode steps the one with
the nearest rows and private tokens, of extend steps the one with the nearest new tokens and
requests. What the cost model says counts nothing; what still differs comes from scheduling, caching
and placement.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.spatial import KDTree

from granikv.core.errors import ConfigError
from granikv.core.step import StepPlan, StepShape
from granikv.cost_models.decode_line import DecodeLine
from granikv.cost_models.step import ExtendCost, StepCost
from granikv.validate.compare.live_run import LiveRun, server_config
from granikv.validate.compare.replay import simulated
from granikv.validate.compare.request_rung import RequestComparison, compare_requests
from granikv.validate.compare.shared_reads import SharedReads
from granikv.validate.compare.step_rung import recorded_s


@dataclass(frozen=True, slots=True)
class ScheduleComparison:
    """Batches and placements of one run, simulated with recorded step times, beside the live ones.

    Attributes:
        live_rows, simulated_rows: rows of a decode step, the mean over steps.
        live_extends, simulated_extends: prefill steps.
        live_prefill_tokens, simulated_prefill_tokens: new tokens of those.
        live_hot_used, simulated_hot_used: most HOT tokens in use.
        live_evictions, simulated_evictions: evicted nodes.
        requests: what that did to requests.
    """

    live_rows: float
    simulated_rows: float
    live_extends: int
    simulated_extends: int
    live_prefill_tokens: int
    simulated_prefill_tokens: int
    live_hot_used: int
    simulated_hot_used: int
    live_evictions: int
    simulated_evictions: int
    requests: RequestComparison


class _Recorded:
    """Recorded steps of one kind by their (rows, tokens)."""

    def __init__(self, batches: NDArray[np.float64], taken_s: NDArray[np.float64]) -> None:
        # A row more weighs as much as its tokens do.
        self._tokens_per_row = max(1.0, float(batches[:, 1].sum() / batches[:, 0].sum()))
        self._tree = KDTree(batches / (1.0, self._tokens_per_row))
        self._taken_s = taken_s

    def nearest_ns(self, rows: int, tokens: int) -> float:
        """Nanoseconds of the most similar step."""
        _, place = self._tree.query((rows, tokens / self._tokens_per_row))
        return float(self._taken_s[place]) * 1e9


class _RecordedCost(StepCost):
    """Step times of a live run in the place of a cost model's; one step at a time."""

    def __init__(self, cost: StepCost, run: LiveRun) -> None:
        super().__init__(cost.params, cost.model, cost.hardware, cost.tp)
        reads, taken_s = SharedReads.of(run), recorded_s(run.steps)
        is_decode = run.steps["kind"].to_numpy() == "decode"
        decodes = [
            (step["rows"], reads.at(step)[1])
            for step in run.steps.filter(pl.col("kind") == "decode").iter_rows(named=True)
        ]
        extends = run.steps.filter(pl.col("kind") == "extend").select("rows", "prefill_tokens")
        self._decodes = _Recorded(np.array(decodes, np.float64), taken_s[is_decode])
        self._extends = _Recorded(extends.to_numpy().astype(np.float64), taken_s[~is_decode])

    def decode(self, shape: StepShape, plan: StepPlan) -> DecodeLine:
        """A step that takes what the most similar recorded one took."""
        ns = self._decodes.nearest_ns(shape.rows, shape.private_tokens)
        return DecodeLine(ns, 0.0, 0.0, ((0, 0.0, 0.0),))

    def extend(
        self, extend_lens: Sequence[int], prefix_lens: Sequence[int], padded_tokens: int = 0
    ) -> ExtendCost:
        """Likewise."""
        ns = self._extends.nearest_ns(len(extend_lens), sum(extend_lens))
        return ExtendCost(round(ns), ns, 0.0, 0.0, 0.0)

    def in_engine(self, is_stock: bool) -> StepCost:
        """Itself: the times are of the engine that was recorded."""
        return self

    def copy_ns(self, tokens: int) -> int:
        """Nothing: copies are in the recorded times."""
        return 0


def compare_schedule(
    run: LiveRun, cost: StepCost, window: tuple[int, int] | None = None
) -> ScheduleComparison:
    """Simulate a run with its own step times; `window` as in `compare_requests`.

    Raises:
        ConfigError: the run has no trace or no steps, or the simulator has no such server.
    """
    kinds = set(run.steps["kind"].to_list())
    if run.trace is None or not {"decode", "extend"} <= kinds:
        raise ConfigError(f"{run.folder} has no trace or no steps; record it with --record.")
    config = server_config(run.header.flags, run.variant, run.header.size_tokens, exact=True)
    found = simulated(run.trace, run.cached, config, _RecordedCost(cost, run))
    end_s = float(str(run.steps["start_s"].max()))
    live, steps = run.steps, found.steps.filter(pl.col("start_s") <= end_s)
    extends = pl.col("kind") == "extend"
    return ScheduleComparison(
        _mean_rows(live),
        _mean_rows(steps),
        live.filter(extends).height,
        steps.filter(extends).height,
        int(live["prefill_tokens"].sum()),
        int(steps["prefill_tokens"].sum()),
        int(live["hot_used"].to_numpy().max()),
        int(steps["hot_used"].to_numpy().max()),
        int(live["evictions"].sum()),
        int(steps["evictions"].sum()),
        compare_requests(run.requests, found.requests, window, knows_hot=run.knows_hot),
    )


def _mean_rows(steps: pl.DataFrame) -> float:
    decode = steps.filter(pl.col("kind") == "decode")
    return float((decode["rows"] * decode["steps"]).sum() / decode["steps"].sum())
