"""Objective: the one number by which runs are compared."""

from typing import Literal

from granikv.sim.metrics import Summary

Objective = Literal["goodput", "throughput", "latency"]


def score(summary: Summary, objective: Objective) -> float:
    """What a run achieved; larger is better."""
    if objective == "goodput":
        return summary.goodput_requests_per_s
    if objective == "throughput":
        return summary.throughput_tokens_per_s
    if not summary.finished:
        return 0.0
    # Refused requests wait for nothing: without their share, refusing them would look fast.
    return summary.finished / summary.requests / summary.e2e_s.mean
