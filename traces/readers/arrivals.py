"""Arrival times for files that have none."""

from collections.abc import Iterator
from itertools import repeat

import numpy as np

from granikv.core.errors import TraceFormatError
from granikv.traces import draw
from granikv.traces.readers.reading import Reading
from granikv.traces.spec import PoissonArrivals


def made_arrivals(reading: Reading) -> Iterator[float]:
    """Poisson arrivals in seconds at the rate that the caller gave; all 0 for an infinite rate.

    Raises:
        TraceFormatError: no rate was given.
    """
    rate = reading.options.requests_per_s
    if rate is None:
        raise TraceFormatError(
            f"{reading.path} has no arrival times; give requests_per_s (inf sends all at once)."
        )
    reading.origin = 0.0
    if rate == float("inf"):
        return repeat(0.0)
    rng = np.random.default_rng(reading.options.seed)
    return draw.arrivals(PoissonArrivals(kind="poisson", rate_per_s=rate), rng)
