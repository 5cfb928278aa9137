"""Terms of extend steps, fitted to recorded steps of live servers.

Older recordings hold only sums of an extend step, which do not give its work; newer ones say
`{"extend": [[new tokens, cached tokens], ...]}` in the place of a plan.
"""

import json
from collections.abc import Iterator, Sequence

import numpy as np

from granikv.cost_models.fit.fused import with_values
from granikv.cost_models.fit.recorded_steps import RecordedRun, timed_steps
from granikv.cost_models.fit.robust import bounded_fit
from granikv.cost_models.fit.step_terms import LEAST_STEPS, Finding
from granikv.cost_models.hardware import Hardware
from granikv.cost_models.memory import padded_tokens
from granikv.cost_models.params import GpuParams
from granikv.cost_models.step import StepCost

_SOFTNESS = 0.1  # relative error of a step from which it counts less
_MOST_STRETCH = 2.0
_LONGEST_GAP_NS = 5e6  # a longer one is no part of the step: the server had something else to do


def find_extend(runs: Sequence[RecordedRun], params: GpuParams, hardware: Hardware) -> Finding:
    """What an extend step takes whatever it computes, with a CUDA graph and without one, and the
    share of its kernels' rates that it reaches, by robust least squares of relative error.

    Steps without a graph that wait for the host to launch their layers are left out.
    """
    alone = with_values(params, {"extend_step_efficiency": 1.0})
    steps = np.array([step for run in runs for step in _work(run, alone, hardware)])
    if len(steps) < LEAST_STEPS:
        timed = sum(timed_steps(run, "extend").height for run in runs)
        text = (
            f"Terms of an extend step are kept: only {len(steps)} of {timed} timed ones say what "
            "they extended and do not wait for the host."
        )
        return Finding({}, len(steps), text)
    measured, work, has_graph = steps.T
    columns = ((1 - has_graph) / measured, has_graph / measured, work / measured)
    # At least the kernels' own time: the last factor is 1 and what is beyond.
    found = bounded_fit(
        columns, 1 - work / measured, _SOFTNESS, (np.inf, np.inf, _MOST_STRETCH - 1), measured
    )
    host, graph, beyond = found.tolist()
    error = np.abs((np.where(has_graph, graph, host) + (1 + beyond) * work) / measured - 1)
    values = {"extend_step_efficiency": 1 / (1 + beyond)}
    if np.count_nonzero(has_graph) >= LEAST_STEPS:
        values["host_extend_graph_ns"] = graph
    if np.count_nonzero(1 - has_graph) >= LEAST_STEPS:
        values["host_extend_ns"] = host
    return Finding(values, len(steps), residual=float(np.median(error)))


def _work(
    run: RecordedRun, params: GpuParams, hardware: Hardware
) -> Iterator[tuple[float, float, float]]:
    """Time that a step took, that of its kernels, in ns, and whether a CUDA graph ran it, of steps
    that say their work.
    """
    cost = StepCost(params, run.model, hardware, run.tp, is_stock=run.is_stock)
    floor = cost.model.layers * cost.rates.host_extend_layer_ns
    steps = timed_steps(run, "extend").select("gpu_ns", "gap_ns", "plan_json")
    for gpu_ns, gap_ns, text in steps.iter_rows():
        if requests := json.loads(text).get("extend"):
            new, cached = map(list, zip(*requests, strict=True))
            padded = padded_tokens(sum(new), run.prefill_graph_tokens)
            step = cost.extend(new, cached, padded)
            work = step.gemm_ns + step.attention_ns + step.collective_ns
            if padded or work > floor:
                yield gpu_ns + min(gap_ns, _LONGEST_GAP_NS), work, float(padded > 0)
