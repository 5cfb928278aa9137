"""serve_plan: what is left to measure, and about how long it takes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from statistics import fmean

from granikv.core.errors import ConfigError
from granikv.validate.driven_cells import LARGEST_BATCH, ClosedCell, PoissonCell, TraceCell
from granikv.validate.serve_cells import Cell, SteadyCell, cells
from granikv.validate.serve_options import Choices, Settings, canonical
from granikv.validate.serve_results import Results
from granikv.validate.servers import variant_of
from granikv.validate.workloads import last_arrival_s

_Step = tuple[float, float, float, float]

START_S = 45.0  # of a server on an H200 whose kernels have been compiled before
# Decode steps of Llama-3.1-8B on an H200: seconds of a step, of a row in it, and of each token of a
# row's own and of its prefix. Fitted by eye to validate/data/serve.h200-sxm.jsonl.
_STOCK_STEP = (5e-3, 1.2e-5, 1.9e-8, 1.9e-8)
_OUR_STEP = (5e-3, 1.2e-5, 3.3e-8, 8.5e-10)
_PREFILL_PER_S = 25_000.0  # tokens of Llama-3.1-8B on an H200
_SEND_S, _SEND_TOKEN_S = 0.1, 1.2e-7  # of a batch, and of each token id in it
_OWN_TOKENS, _OUTPUT_TOKENS = 857, 512  # means of the ShareGPT file, outputs cut to 512


@dataclass(frozen=True, slots=True)
class Job:
    """A cell under some choices of the server, with the repeats that are missing.

    Attributes:
        choices: what the server is told first; nothing for one that stays as it started.
    """

    cell: Cell
    repeats: tuple[int, ...]
    choices: Choices = field(default_factory=dict)

    @property
    def settings(self) -> str:
        """The choices as the column of results."""
        return canonical(self.choices)


def planned(settings: Settings) -> list[tuple[str, tuple[Job, ...]]]:
    """For each variant the jobs that are not in the results yet.

    Raises:
        ConfigError: a cell or variant is unknown, or the file of results is something else.
    """
    if settings.url is None:
        for name in settings.variants:
            variant_of(name)
    elif len(settings.variants) != 1:
        raise ConfigError("With --url, name the one running server: --variants NAME.")
    elif settings.sweep:
        raise ConfigError("--sweep needs servers of its own; leave out --url.")
    chosen: list[Cell] = [TraceCell(settings.trace)] if settings.trace else []
    chosen += cells(settings.cells)
    done = Results(settings.out).complete(settings.identity)
    return [(name, tuple(_jobs(settings, name, chosen, done))) for name in settings.variants]


def _jobs(
    settings: Settings, variant: str, chosen: list[Cell], done: set[tuple[str, str, str, int]]
) -> Iterator[Job]:
    is_swept = settings.sweep and variant_of(variant).is_ours
    for cell in chosen:
        for choices in settings.sweep if is_swept else ({},):
            text = canonical(choices)
            repeats = (r for r in range(cell.repeats) if (variant, cell.name, text, r) not in done)
            if missing := tuple(repeats):
                yield Job(cell, missing, choices)


def plan_lines(settings: Settings) -> list[str]:
    """What is left to measure and about how long it takes, for `--dry-run`."""
    lines, total_s = [], 0.0
    for name, jobs in planned(settings):
        is_ours = settings.url is None and variant_of(name).is_ours
        seconds = [job_s(job, is_ours) for job in jobs]
        start_s = START_S if jobs and settings.url is None else 0.0
        count = sum(len(job.repeats) for job in jobs)
        lines.append(
            f"{name}: {count} results of {len(jobs)} jobs left, about {sum(seconds) + start_s:.0f} "
            f"s with {start_s:.0f} s to start"
        )
        for job, job_seconds in zip(jobs, seconds, strict=True):
            choices = f" {job.settings}" if job.choices else ""
            lines.append(
                f"  {job.cell.name}{choices} x{len(job.repeats)}, about {job_seconds:.0f} s"
            )
        total_s += sum(seconds) + start_s
    return [*lines, f"about {total_s:.0f} s in all"]


def job_s(job: Job, is_ours: bool) -> float:
    """About the seconds that a server of Llama-3.1-8B on an H200 needs for a job."""
    step = _OUR_STEP if is_ours else _STOCK_STEP
    if isinstance(job.cell, SteadyCell):
        return _steady_s(job.cell, len(job.repeats), step)
    return len(job.repeats) * _driven_s(job.cell, step)


def _steady_s(cell: SteadyCell, repeats: int, step: _Step) -> float:
    tokens = sum(length for length, _ in cell.shared) + cell.rows * cell.own_tokens
    prefix_tokens = sum(length * rows for length, rows in cell.shared) / cell.rows
    step_s = _step_s(step, cell.rows, prefix_tokens, cell.own_tokens)
    send_s = _SEND_S + _SEND_TOKEN_S * cell.rows * (prefix_tokens + cell.own_tokens)
    first_s = tokens / _PREFILL_PER_S + cell.steps / 2 * step_s + 2 * send_s
    return first_s + repeats * (1.5 * cell.steps * step_s + send_s)


def _driven_s(cell: PoissonCell | ClosedCell | TraceCell, step: _Step) -> float:
    if isinstance(cell, TraceCell):
        with cell.path.open() as file:
            last_s = last_arrival_s(file, str(cell.path))
        return last_s + _answer_s(step, 0.0, LARGEST_BATCH)
    if isinstance(cell, ClosedCell):
        rows, rate_per_s = min(cell.users, LARGEST_BATCH), inf
        prefixes: tuple[int, ...] = (cell.prefix_tokens,)
        count = cell.requests
    else:
        rows, rate_per_s, prefixes = LARGEST_BATCH, cell.rate_per_s, cell.prefixes
        count = cell.requests if cell.window is None else sum(cell.window)
    answer_s = _answer_s(step, fmean(prefixes), rows)
    served_per_s = 1 / (answer_s / rows + _OWN_TOKENS / _PREFILL_PER_S)
    prefill_s = sum(prefixes) / _PREFILL_PER_S
    return prefill_s + count / min(rate_per_s, served_per_s) + answer_s


def _answer_s(step: _Step, prefix_tokens: float, rows: int) -> float:
    """Seconds that a row decodes among so many rows."""
    own_tokens = _OWN_TOKENS + _OUTPUT_TOKENS / 2
    return _OUTPUT_TOKENS * _step_s(step, rows, prefix_tokens, own_tokens)


def _step_s(step: _Step, rows: int, prefix_tokens: float, own_tokens: float) -> float:
    base_s, row_s, own_s, prefix_s = step
    return base_s + rows * (row_s + own_s * own_tokens + prefix_s * prefix_tokens)
