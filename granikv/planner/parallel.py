"""parallel: simulations on all cores, and a Ctrl-C or an error that loses no result."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import joblib

from granikv.core.errors import GraniKVError

T = TypeVar("T")


class Unfinished(Protocol):
    """What simulations are collected in."""

    is_partial: bool


def run_all(calls: Sequence[Callable[[], T]], jobs: int | None = None) -> Iterator[tuple[int, T]]:
    """Place and result of every call as they end, in `jobs` processes (all cores by default)."""
    workers = jobs or len(os.sched_getaffinity(0))
    if workers == 1 or len(calls) == 1:
        for place, call in enumerate(calls):
            yield place, call()
        return
    parallel = joblib.Parallel(n_jobs=workers, return_as="generator_unordered", batch_size=1)
    # Workers inherit a blocked Ctrl-C: this process alone answers it, and ends them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        results = parallel(joblib.delayed(_placed)(place, call) for place, call in enumerate(calls))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    yield from results


def _placed(place: int, call: Callable[[], T]) -> tuple[int, T]:
    return place, call()


def saved(work: Unfinished, run: Callable[[], None], save: Callable[[], T]) -> T:
    """Run all simulations of `work`, then save it; what there is, also after an interrupt or an
    error.

    Raises:
        GraniKVError: that of `run`, once all is saved.
    """
    try:
        run()
    except KeyboardInterrupt:
        ignore_interrupts()
        work.is_partial = True
    except GraniKVError:
        work.is_partial = True
        save()
        raise
    return save()


def ignore_interrupts() -> None:
    """From here on only what is there is written. One interrupt may arrive twice (polars raises its
    own besides Python's), and a second Ctrl-C must not lose the results either.
    """
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
