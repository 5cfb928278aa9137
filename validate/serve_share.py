"""serve_share: one server's part of the run list, measured cell by cell."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from sys import stderr
from typing import Any, cast

from granikv.validate.live import Client, Configurable
from granikv.validate.measure import Measured, measure
from granikv.validate.serve_options import Settings
from granikv.validate.serve_plan import Job, job_s
from granikv.validate.serve_results import Results, requests_name
from granikv.validate.servers import gpu_state
from granikv.validate.steady import CellError

# A server hangs when one repeat takes longer than this, and than so many times what is expected.
_REPEAT_S, _TIMES = 300.0, 4.0


@dataclass(frozen=True, slots=True)
class Share:
    """What one server is to measure: cells with their missing repeats, until a moment.

    Attributes:
        run: date of the command's start, the same in all results of one command.
        until_s: Unix time after which no cell is started.
        record: folder that the server writes its steps to.
    """

    settings: Settings
    variant: str
    jobs: tuple[Job, ...]
    run: str
    until_s: float
    record: Path | None


async def measure_share(
    client: Client,
    share: Share,
    facts: Mapping[str, Any],
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Measure the cells of a share, one line of results per repeat; 1 if the server hangs."""
    results = Results(share.settings.out)
    for number, job in enumerate(share.jobs):
        if time.time() > share.until_s:
            say(f"{share.variant}: the budget is over, {len(share.jobs) - number} cells left")
            break
        steps = measure(client, job.cell, share.settings.seed, job.repeats, clock)
        limit_s, at = _REPEAT_S, 0
        try:
            limit_s = max(limit_s, _TIMES * job_s(job, is_ours=False) / len(job.repeats))
            if job.choices:
                await asyncio.wait_for(cast(Configurable, client).configure(job.choices), limit_s)
            while at < len(job.repeats):
                row = await asyncio.wait_for(_next(client, share, job, steps, facts), limit_s)
                results.append(row)
                at += 1
                say(progress(number, len(share.jobs), row))
                if time.time() > share.until_s:
                    break
        except TimeoutError:
            _fail(results, share, job, at, facts, f"no answer for {limit_s:g} s")
            return 1
        except Exception as error:  # what a server raises for one cell is no reason to lose others
            why = str(error) if isinstance(error, CellError) else f"{type(error).__name__}: {error}"
            _fail(results, share, job, at, facts, why)
        finally:
            await steps.aclose()
    return 0


async def _next(
    client: Client,
    share: Share,
    job: Job,
    steps: AsyncGenerator[tuple[int, Measured], None],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """The next repeat's line of results; its requests are on disk by then."""
    begin_s = time.monotonic()
    repeat, measured = await anext(steps)
    row = _row(share, job, repeat, facts) | measured.values
    row["server"] = await client.state()
    row["wall_s"] = round(time.monotonic() - begin_s, 2)
    if measured.drive is not None:
        results = Results(share.settings.out)
        row["requests_file"] = results.keep_requests(measured.drive, requests_name(row))
        row["clock_origin"] = measured.drive.clock_origin
    return row


def progress(number: int, count: int, row: Mapping[str, Any]) -> str:
    """One line about a result that was just written."""
    step = f", step {row['step_ms']:.2f} ms" if "step_ms" in row else ""
    wait = f", TTFT p50 {row['ttft_p50_ms']:,.0f} ms" if "ttft_p50_ms" in row else ""
    choices = "" if row["settings"] == "{}" else f" {row['settings']}"
    doubt = "" if row.get("is_steady", True) else ", NOT STEADY"
    return (
        f"{row['variant']} {number + 1}/{count} {row['cell']}{choices} #{row['repeat']}: "
        f"{row['tokens_per_s']:,.0f} tokens/s{step}{wait}, took {row['wall_s']:.1f} s{doubt}"
    )


def say(line: str) -> None:
    """A line of progress, on stderr among what SGLang logs there."""
    print(f"[bench serve] {line}", file=stderr, flush=True)


def _row(share: Share, job: Job, repeat: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    state, record = gpu_state(), share.record
    return {
        "variant": share.variant,
        "cell": job.cell.name,
        "repeat": repeat,
        "status": "complete",
        **share.settings.identity,
        "settings": job.settings,
        "run": share.run,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": state.get("gpu"),
        "clocks": state.get("clocks"),
        "driver": state.get("driver"),
        "record": None if record is None else str(record.relative_to(share.settings.out.parent)),
        **facts,
    }


def _fail(
    results: Results, share: Share, job: Job, at: int, facts: Mapping[str, Any], why: str
) -> None:
    row = _row(share, job, job.repeats[at], facts) | {"status": "failed", "error": why}
    say(f"{share.variant} {row['cell']} #{row['repeat']} failed: {why}")
    results.append(row)
