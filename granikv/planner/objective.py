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
    return 1.0 / summary.e2e_s.mean if summary.e2e_s.mean else 0.0
