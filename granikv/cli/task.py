"""task: the planner's task from what option groups have built, and how its commands begin, run and
end.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from granikv.cli.failures import InterruptError
from granikv.cli.folders import kept, prepare_folder, written
from granikv.cli.options import BuiltServer
from granikv.cli.reading import count_trace, report_lines
from granikv.cli.screen import Bar, progress_bar, say
from granikv.cli.trace_options import TransformGroup

if TYPE_CHECKING:
    from granikv.planner.cells import PlanTask
    from granikv.planner.contest import Contest
    from granikv.planner.search import Findings
    from granikv.sim.metrics import Slo
    from granikv.traces.source import TraceSource

T = TypeVar("T")


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


def begin(
    source: "TraceSource", task: "PlanTask", built: BuiltServer, out: Path, name: str
) -> dict[str, str]:
    """Read the trace once, make the folder ready for a `name`'s results, and say what is asked;
    returns the facts for the top of a page.

    Raises:
        ConfigError: the trace or the folder cannot be used.
    """
    with progress_bar("Reading the trace"):
        count = count_trace(source, task.transform)
    prepare_folder(out, name)
    say(*report_lines(source), count.text, f"KV capacity: {built.capacity}")
    return {"Trace": f"{source.path.name}: {count.text}", "KV capacity": built.capacity}


def simulated(run: Callable[[Bar], T], out: Path, names: Sequence[str]) -> T:
    """Simulate under a bar; `names` are the files of `out` that a run leaves.

    Raises:
        InterruptError: Ctrl-C came before or after what the planner saves by itself.
    """
    try:
        with progress_bar("Simulating") as bar:
            return run(bar)
    except KeyboardInterrupt:
        raise InterruptError(kept(out, names)) from None


def end(runs: "Contest | Findings", out: Path, names: Sequence[str]) -> None:
    """Say what was written.

    Raises:
        InterruptError: simulations are missing.
    """
    say(f"Written: {written(out, names)}")
    if runs.is_partial:
        count = len(runs.results)
        raise InterruptError(f"{count} simulations were finished; {kept(out, names)}")
