"""A finished plan of a small workload, made once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from granikv.cost_models.hardware import load_hardware
from granikv.cost_models.models import load_model
from granikv.cost_models.params import load_params
from granikv.planner.cells import PlanTask
from granikv.planner.plan import make_plan
from granikv.planner.search import Findings
from granikv.planner.verdict import Verdict
from granikv.sim.config import ServerConfig
from granikv.sim.metrics import Slo
from granikv.traces.options import ReadOptions
from granikv.traces.transform import TransformOptions

WORKLOAD = """
requests: 60
arrivals: {kind: poisson, rate_per_s: 60}
prefixes: [{count: 2, tokens: 8192}]
private_tokens: 128
output_tokens: 48
"""


@pytest.fixture(scope="session")
def make_task(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., PlanTask]:
    """A task on a workload file; the file's name and the SLO can be chosen."""

    def make(name: str = "workload.yaml", slo: Slo | None = None) -> PlanTask:
        trace = tmp_path_factory.mktemp("task") / name
        trace.write_text(WORKLOAD)
        return PlanTask(
            trace=trace,
            trace_format="workload",
            read=ReadOptions(),
            transform=TransformOptions(),
            model=load_model("llama-3.1-8b"),
            hardware=load_hardware("h200-sxm"),
            params=load_params("h200-sxm"),
            tp=1,
            server=ServerConfig(size_tokens=400_000),
            router="round_robin",
            slo=slo or Slo(),
        )

    return make


@pytest.fixture(scope="session")
def planned(
    make_task: Callable[..., PlanTask], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Findings, Verdict]:
    """Three fractions, three seeds."""
    out: Path = tmp_path_factory.mktemp("plan")
    findings, verdict = make_plan(
        make_task(), (0.02, 0.1, 0.2), 1, 3, out, lambda *_: None, lambda _: None, jobs=1
    )
    assert verdict is not None
    return findings, verdict
