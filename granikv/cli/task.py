"""task: the planner's task, from what option groups have built."""

from typing import TYPE_CHECKING

from granikv.cli.options import BuiltServer
from granikv.cli.trace_options import TransformGroup

if TYPE_CHECKING:
    from granikv.planner.cells import PlanTask
    from granikv.sim.metrics import Slo
    from granikv.traces.source import TraceSource


def task_of(
    source: "TraceSource", transform: TransformGroup, slo: "Slo", built: BuiltServer
) -> "PlanTask":
    """What all simulations of a command have in common."""
    from granikv.planner.cells import PlanTask

    return PlanTask(
        trace=source.path,
        trace_format=source.format,
        read=source.options,
        transform=transform.options(),
        model=built.model,
        hardware=built.hardware,
        params=built.params,
        tp=built.tp,
        server=built.server,
        router=built.router,
        slo=slo,
        size_source=built.capacity,
    )
