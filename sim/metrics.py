"""Metrics: one function from run records to a summary, the same for simulated and live runs.

TTFT is first token - arrival, TPOT is (last - first token) / (n - 1) of one request, ITL is each
gap between two tokens, throughput is output tokens / (last token - first arrival).
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

_QUANTILES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a request must meet; None is no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def is_set(self) -> bool:
        """Whether there is any limit."""
        return self.ttft_s is not None or self.tpot_s is not None


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles in seconds; zeros when there is no sample."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run achieved.

    Attributes:
        offered_s: seconds from the first to the last arrival.
        drain_s: seconds from the last arrival to the last token.
        slo_share: share of all requests that finished within the SLO (1.0 of the finished ones
            without one).
        goodput_requests_per_s: those requests per second of the run.
        cached_share: prompt tokens found in the cache / prompt tokens of the requests that ran.
        hot_share: prompt tokens read from HOT / prompt tokens of the requests that ran.
        shared_read_share: KV token reads of decode steps that two or more rows had in common.
        busy_share: GPU time / run time, per replica.
        mean_rows: decode rows, weighted by steps.
        decode_steps_by_mode: decode steps by their most compute-heavy mode.
    """

    requests: int
    finished: int
    refused: int
    aborted: int
    duration_s: float
    offered_s: float
    drain_s: float
    throughput_tokens_per_s: float
    requests_per_s: float
    slo_share: float
    goodput_requests_per_s: float
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    e2e_s: Distribution
    prompt_tokens: int
    output_tokens: int
    cached_share: float
    hot_share: float
    shared_read_share: float
    busy_share: float
    mean_rows: float
    peak_rows: int
    peak_hot_used: int
    least_cold_free: int
    hot_misses: int
    evictions: int
    retractions: int
    migrated_tokens: int
    prefill_steps: int
    decode_steps: int
    decode_steps_by_mode: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Plain form."""
        return asdict(self)


def summarise(
    requests: pl.DataFrame | pl.LazyFrame,
    steps: pl.DataFrame | pl.LazyFrame,
    slo: Slo | None = None,
) -> Summary:
    """Summarise run records (`traces.records` schemas); pass large ones as lazy frames."""
    timed = _timed(requests.lazy(), slo or Slo()).collect()
    done = timed.filter(pl.col("status") == "finished")
    ran = timed.filter(pl.col("first_token_s").is_not_null())
    first_arrival = _number(timed["arrival_s"].min())
    last_arrival = _number(timed["arrival_s"].max())
    last_token = _number(done["finish_s"].max()) if done.height else last_arrival
    duration = max(last_token - first_arrival, 1e-9)
    output = int(done["output_tokens"].sum())
    prompt = int(ran["prompt_tokens"].sum())
    within = int(done["within_slo"].sum())
    by_step = _steps(steps.lazy())
    return Summary(
        requests=timed.height,
        finished=done.height,
        refused=_count(timed, "refused"),
        aborted=_count(timed, "aborted"),
        duration_s=duration,
        offered_s=last_arrival - first_arrival,
        drain_s=max(0.0, last_token - last_arrival),
        throughput_tokens_per_s=output / duration,
        requests_per_s=done.height / duration,
        slo_share=within / timed.height if timed.height else 0.0,
        goodput_requests_per_s=within / duration,
        ttft_s=distribution(done["ttft_s"].to_numpy()),
        tpot_s=distribution(done["tpot_s"].drop_nulls().to_numpy()),
        itl_s=_itl(steps.lazy()),
        e2e_s=distribution(done["e2e_s"].to_numpy()),
        prompt_tokens=prompt,
        output_tokens=output,
        cached_share=int(ran["cached_tokens"].sum()) / prompt if prompt else 0.0,
        hot_share=int(ran["hot_tokens"].sum()) / prompt if prompt else 0.0,
        shared_read_share=_shared_read_share(steps.lazy()),
        busy_share=by_step["gpu_s"] / duration / max(1, by_step["replicas"]),
        mean_rows=by_step["mean_rows"],
        peak_rows=by_step["peak_rows"],
        peak_hot_used=by_step["peak_hot_used"],
        least_cold_free=by_step["least_cold_free"],
        hot_misses=by_step["hot_misses"],
        evictions=by_step["evictions"],
        retractions=by_step["retractions"],
        migrated_tokens=by_step["migrated_tokens"],
        prefill_steps=by_step["prefill_steps"],
        decode_steps=by_step["decode_steps"],
        decode_steps_by_mode=_modes(steps.lazy()),
    )


def distribution(
    values: NDArray[np.float64], weights: NDArray[np.float64] | None = None
) -> Distribution:
    """Mean and percentiles of samples, each counted `weights` times (linear interpolation without
    weights).
    """
    if not len(values):
        return Distribution(0.0, 0.0, 0.0, 0.0, 0.0)
    if weights is None:
        return Distribution(float(values.mean()), *map(float, np.quantile(values, _QUANTILES)))
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    below = np.cumsum(weights)
    places = np.searchsorted(below, np.asarray(_QUANTILES) * below[-1])
    mean = float((values * weights).sum() / below[-1])
    return Distribution(mean, *map(float, values[np.minimum(places, len(values) - 1)]))


def timed_requests(requests: pl.DataFrame | pl.LazyFrame) -> pl.DataFrame:
    """Finished requests with `ttft_s`, `tpot_s` (null for one token) and `e2e_s` added."""
    frame = _timed(requests.lazy(), Slo()).collect()
    return frame.filter(pl.col("status") == "finished")


def _timed(requests: pl.LazyFrame, slo: Slo) -> pl.LazyFrame:
    gaps = pl.col("output_tokens") - 1
    decode_s = pl.col("finish_s") - pl.col("first_token_s")
    within = pl.col("status") == "finished"
    if slo.ttft_s is not None:
        within &= pl.col("ttft_s") <= slo.ttft_s
    if slo.tpot_s is not None:
        within &= pl.col("tpot_s").fill_null(0.0) <= slo.tpot_s
    return requests.with_columns(
        ttft_s=pl.col("first_token_s") - pl.col("arrival_s"),
        e2e_s=pl.col("finish_s") - pl.col("arrival_s"),
        tpot_s=pl.when(gaps > 0).then(decode_s / gaps),
    ).with_columns(within_slo=within.fill_null(False))


def _steps(steps: pl.LazyFrame) -> dict[str, Any]:
    decode = pl.col("kind") == "decode"
    weight = pl.col("steps")
    sums = ("hot_misses", "evictions", "retractions", "migrated_tokens")
    row = steps.select(
        (pl.col("gpu_us").sum() / 1e6).alias("gpu_s"),
        pl.col("replica").n_unique().alias("replicas"),
        ((pl.col("rows") * weight).filter(decode).sum() / weight.filter(decode).sum()).alias(
            "mean_rows"
        ),
        pl.col("rows").filter(decode).max().alias("peak_rows"),
        pl.col("hot_used").max().alias("peak_hot_used"),
        pl.col("cold_free").min().alias("least_cold_free"),
        *(pl.col(name).sum() for name in sums),
        weight.filter(~decode).sum().alias("prefill_steps"),
        weight.filter(decode).sum().alias("decode_steps"),
    ).collect()
    values = row.row(0, named=True)
    mean_rows = values["mean_rows"]
    is_number = mean_rows is not None and mean_rows == mean_rows
    return {key: value or 0 for key, value in values.items()} | {
        "mean_rows": float(mean_rows) if is_number else 0.0
    }


def _itl(steps: pl.LazyFrame) -> Distribution:
    """Gaps between tokens from step rows.

    Inside a row's steps all gaps count as their mean. Across rows, the requests that decode before
    and after also wait for what lies between (prefills); the others' first gap is the step alone.
    """
    decode = (
        steps.filter(pl.col("kind") == "decode")
        .select("replica", "start_s", "gpu_us", "steps", "rows")
        .with_columns(step_s=pl.col("gpu_us") / 1e6 / pl.col("steps"))
        .with_columns(
            before_rows=pl.col("rows").shift(1).over("replica"),
            before_end_s=(pl.col("start_s") + pl.col("gpu_us") / 1e6).shift(1).over("replica"),
        )
        .collect()
    )
    if not decode.height:
        return distribution(np.empty(0))
    step_s = decode["step_s"].to_numpy()
    rows = decode["rows"].to_numpy().astype(np.float64)
    count = decode["steps"].to_numpy().astype(np.float64)
    stall_s = (decode["start_s"] - decode["before_end_s"]).fill_null(0.0).to_numpy()
    staying = np.minimum(rows, decode["before_rows"].fill_null(0).to_numpy())
    stalled = np.where(stall_s > 1e-9, staying, 0.0)
    values = np.concatenate([step_s, step_s + stall_s])
    weights = np.concatenate([rows * count - stalled, stalled])
    kept = weights > 0
    return distribution(values[kept], weights[kept])


def _shared_read_share(steps: pl.LazyFrame) -> float:
    """Reads through segments / all KV reads of decode steps; private reads grow by one a row and
    step.
    """
    decode = steps.filter(pl.col("kind") == "decode")
    segment = pl.element().list.get(1) * pl.element().list.get(2)
    kind = pl.List(pl.List(pl.Int64()))
    sums = decode.select(
        shared=(
            pl.col("segments_json").str.json_decode(kind).list.eval(segment).list.sum()
            * pl.col("steps")
        ).sum(),
        private=(
            (pl.col("private_tokens") + pl.col("rows") * (pl.col("steps") - 1) / 2)
            * pl.col("steps")
        ).sum(),
    ).collect()
    shared, private = float(sums["shared"][0] or 0), float(sums["private"][0] or 0)
    return shared / (shared + private) if shared + private else 0.0


def _modes(steps: pl.LazyFrame) -> dict[str, int]:
    names = {0: "paged", 1: "cascade", 2: "dense"}
    plan = pl.Struct({"modes": pl.List(pl.Int64())})
    frame = (
        steps.filter(pl.col("kind") == "decode")
        .select(
            "steps",
            mode=pl.col("plan_json")
            .str.json_decode(plan)
            .struct.field("modes")
            .list.max()
            .fill_null(0),
        )
        .group_by("mode")
        .agg(pl.col("steps").sum())
        .sort("mode")
        .collect()
    )
    return {names[mode]: int(count) for mode, count in frame.iter_rows()}


def _count(frame: pl.DataFrame, status: str) -> int:
    return int((frame["status"] == status).sum())


def _number(value: Any) -> float:
    return float(value) if value is not None else 0.0
