"""The request and distribution rungs: each request's times, simulated and live, and all of them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from granikv.sim.metrics import timed_requests
from granikv.validate.compare.error_measures import Errors, errors, ks_distance
from granikv.validate.live import RequestRecord
from granikv.validate.steady import steady_window

TIMES = ("ttft_s", "tpot_s", "e2e_s")
_QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class TimeComparison:
    """One kind of time of the requests that finished in both runs.

    Attributes:
        paired: errors request by request.
        ks: distance of the two distributions.
        live, simulated: p50, p90 and p99 in seconds.
    """

    paired: Errors
    ks: float
    live: tuple[float, ...]
    simulated: tuple[float, ...]

    @property
    def quantile_errors(self) -> tuple[float, ...]:
        """Signed relative errors of p50, p90 and p99."""
        pairs = zip(self.simulated, self.live, strict=True)
        return tuple(simulated / live - 1 for simulated, live in pairs)


@dataclass(frozen=True, slots=True)
class RequestComparison:
    """All requests of one run.

    Attributes:
        pairs: requests that finished in both.
        live_tokens_per_s, simulated_tokens_per_s: see `throughput`.
        live_cached, simulated_cached: share of prompt tokens found in the cache, of `pairs`.
        live_hot, simulated_hot: likewise, read from HOT slots; None where the server did not say.
        same_cached: share of `pairs` with equal cached tokens.
        times: by name of `TIMES`.
    """

    pairs: int
    live_tokens_per_s: float
    simulated_tokens_per_s: float
    live_cached: float
    simulated_cached: float
    live_hot: float | None
    simulated_hot: float
    same_cached: float
    times: dict[str, TimeComparison]

    @property
    def throughput_error(self) -> float:
        """Signed relative error of output tokens per second."""
        return self.simulated_tokens_per_s / self.live_tokens_per_s - 1

    @property
    def cached_points(self) -> float:
        """Difference of the cached shares in percentage points."""
        return 100 * (self.simulated_cached - self.live_cached)


def compare_requests(
    live: pl.DataFrame,
    simulated: pl.DataFrame,
    window: tuple[int, int] | None = None,
    *,
    knows_hot: bool = True,
) -> RequestComparison:
    """Compare the requests of two runs of one trace.

    `window` is (requests that finish before it, requests that finish in it) where the live run was
    cut short, see `granikv.validate.steady.steady_window`.

    Raises:
        ValueError: no request finished in both.
    """
    pairs = timed_requests(live).join(timed_requests(simulated), on="id", suffix="_sim")
    if not pairs.height:
        raise ValueError("no request finished in both runs")
    prompts = int(pairs["prompt_tokens"].sum())

    def share(column: str) -> float:
        return int(pairs[column].sum()) / prompts

    return RequestComparison(
        pairs.height,
        throughput(live, window),
        throughput(simulated, window),
        share("cached_tokens"),
        share("cached_tokens_sim"),
        share("hot_tokens") if knows_hot else None,
        share("hot_tokens_sim"),
        int((pairs["cached_tokens"] == pairs["cached_tokens_sim"]).sum()) / pairs.height,
        {name: _times(pairs, name) for name in TIMES if _positive(pairs, name).height},
    )


def throughput(requests: pl.DataFrame, window: tuple[int, int] | None) -> float:
    """Output tokens per second: of a window of finishes, or from first arrival to last token."""
    if window is not None:
        columns = ("id", "session", "arrival_s", "prompt_tokens", "sent_s", "first_token_s")
        columns += ("finish_s", "output_tokens", "status")
        records = [
            RequestRecord(rid="", **{name: row[name] for name in columns})
            for row in requests.iter_rows(named=True)
        ]
        return steady_window(records, *window).tokens_per_s
    done = requests.filter(pl.col("status") == "finished")
    values: dict[str, Any] = done.select(
        tokens=pl.col("output_tokens").sum(), last=pl.col("finish_s").max()
    ).row(0, named=True)
    first_s = float(str(requests["arrival_s"].min()))
    return float(values["tokens"] / (values["last"] - first_s))


def _positive(pairs: pl.DataFrame, name: str) -> pl.DataFrame:
    """Pairs with both times; a request of one token has no time per token."""
    return pairs.filter((pl.col(name) > 0) & (pl.col(f"{name}_sim") > 0))


def _times(pairs: pl.DataFrame, name: str) -> TimeComparison:
    both = _positive(pairs, name)
    live, simulated = both[name].to_numpy(), both[f"{name}_sim"].to_numpy()
    return TimeComparison(
        errors(simulated, live),
        ks_distance(simulated, live),
        _quantiles(live),
        _quantiles(simulated),
    )


def _quantiles(values: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(map(float, np.quantile(values, _QUANTILES)))
