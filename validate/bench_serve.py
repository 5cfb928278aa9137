"""The serving benchmark: `python -m granikv.validate.bench_serve MODEL --out RESULTS.jsonl`.

Starts one variant of the server after the other on the one GPU, each in a process of its own, and
runs the cells of the run list on it. Every repeat of a cell is one line of RESULTS.jsonl, written
at once; a second run with the same file does what is missing. Needs SGLang, numpy and pydantic;
`granikv bench serve` is the same command with run records at the end. docs/serve_bench.md says what
each number is.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from granikv.core.errors import ConfigError, GraniKVError
from granikv.validate.clients import HttpClient
from granikv.validate.drive import Client
from granikv.validate.measure import measure
from granikv.validate.serve_cells import Cell, TraceCell, cells
from granikv.validate.serve_results import Results
from granikv.validate.serve_table import table_text
from granikv.validate.servers import (
    gpu_state,
    in_new_process,
    serving,
    variant_of,
    versions,
    wait_until_free,
)
from granikv.validate.steady import CellError

CELLS = "headline,poisson,unshared,grid"
VARIANTS = "stock,granikv,granikv-fa3"
_START_S = 60.0  # with less than this left, no other server is started
_REPEAT_S = 300.0  # a server that needs longer for one repeat hangs


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run of the benchmark is told.

    Attributes:
        model: folder with a config.json; weights are not needed.
        out: file of results.
        cells: groups or names of cells.
        variants: names of variants, in the order in which they are started.
        budget_s: no cell is started later than this.
        seed: of token ids, lengths and arrivals.
        record: whether servers write their steps, for run records.
        trace: file of a plain trace to send as one more cell, before the others.
        url: a server that runs already; the only variant names it.
        engine: more arguments of `sglang.Engine`, for every variant.
    """

    model: str
    out: Path
    cells: tuple[str, ...]
    variants: tuple[str, ...]
    budget_s: float = 1500.0
    seed: int = 0
    record: bool = False
    trace: Path | None = None
    url: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> dict[str, Any]:
        """Columns that must be equal for a result to count as one of this run list."""
        engine = json.dumps(self.engine, sort_keys=True)
        return {"model": Path(self.model).name, "seed": self.seed, "engine": engine}


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
    jobs: tuple[tuple[Cell, tuple[int, ...]], ...]
    run: str
    until_s: float
    record: Path | None


Launch = Callable[[Share], int]


def planned(settings: Settings) -> list[tuple[str, tuple[tuple[Cell, tuple[int, ...]], ...]]]:
    """For each variant its cells with the repeats that are not in the results yet.

    Raises:
        ConfigError: a cell or variant is unknown, or the file of results is something else.
    """
    if settings.url is not None:
        if len(settings.variants) != 1:
            raise ConfigError("With --url, name the one running server: --variants NAME.")
    else:
        for name in settings.variants:
            variant_of(name)
    chosen: list[Cell] = [TraceCell(settings.trace)] if settings.trace else []
    chosen += cells(settings.cells)
    done = Results(settings.out).complete(settings.identity)
    plan = []
    for name in settings.variants:
        jobs = (
            (cell, tuple(r for r in range(cell.repeats) if (name, cell.name, r) not in done))
            for cell in chosen
        )
        plan.append((name, tuple((cell, repeats) for cell, repeats in jobs if repeats)))
    return plan


def plan_lines(settings: Settings) -> list[str]:
    """What is left to measure, for `--dry-run`."""
    return [
        f"{name}: {sum(len(repeats) for _, repeats in jobs)} results of {len(jobs)} cells left"
        + "".join(f"\n  {cell.name} x{len(repeats)}" for cell, repeats in jobs)
        for name, jobs in planned(settings)
    ]


def run(settings: Settings, launch: Launch | None = None) -> int:
    """Measure what is missing; the number of servers that ended badly.

    Raises:
        ConfigError: see `planned`.
    """
    plan = planned(settings)
    results = Results(settings.out)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    until_s = time.time() + settings.budget_s
    before = gpu_state()
    start = launch or (in_process if settings.url else partial(in_new_process, in_process))
    died = 0
    for name, jobs in plan:
        if not jobs:
            say(f"{name}: all results are there")
            continue
        if settings.url is None and time.time() + _START_S > until_s:
            say(f"{name}: not started, the budget is over")
            continue
        stamp = started.replace(":", "").replace("+0000", "")
        steps = settings.out.with_suffix(".steps") / f"{name}.{stamp}"
        record = steps if settings.record else None
        code = start(Share(settings, name, jobs, started, until_s, record))
        if code:
            died += 1
            say(f"{name}: the server's process ended with {code}; its results so far are kept")
            results.append(_server_row(settings, name, started, code))
        if settings.url is None and not wait_until_free(before):
            say("the GPU is still in use after the server's end; stopped here")
            break
    return died


def in_process(share: Share) -> int:
    """Start the server here, or reach it, and measure; 1 if it stopped answering."""
    settings = share.settings
    if settings.url is not None:
        return asyncio.run(_measure_url(share, settings.url))
    say(f"{share.variant}: starting")
    variant = variant_of(share.variant).given(settings.engine)
    with serving(variant, settings.model, share.record) as server:
        say(f"{share.variant}: ready after {server.facts['startup_s']} s")
        code: int = server.run(measure_share(server.client, share, server.facts))
    return code


async def _measure_url(share: Share, url: str) -> int:
    async with HttpClient(url) as client:
        info = await client.info()
        facts = {
            "flags": {"url": url},
            "variables": {},
            "versions": versions() | {"sglang": info.get("version")},
            "size_tokens": info.get("max_total_num_tokens"),
        }
        return await measure_share(client, share, facts)


async def measure_share(
    client: Client,
    share: Share,
    facts: Mapping[str, Any],
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Measure the cells of a share, one line of results per repeat; 1 if the server hangs."""
    settings, results = share.settings, Results(share.settings.out)
    for number, (cell, repeats) in enumerate(share.jobs):
        if time.time() > share.until_s:
            say(f"{share.variant}: the budget is over, {len(share.jobs) - number} cells left")
            break
        begin_s = time.monotonic()
        steps = measure(client, cell, settings.seed, repeats, clock)
        at = 0
        try:
            while at < len(repeats):
                repeat, measured = await asyncio.wait_for(anext(steps), _REPEAT_S)
                at += 1
                row = _row(share, cell, repeat, facts) | measured.values
                row["server"] = await client.state()
                row["wall_s"] = round(time.monotonic() - begin_s, 2)
                begin_s = time.monotonic()
                if measured.drive is not None:
                    name = f"{share.variant}.{cell.name}.{repeat}"
                    row["requests_file"] = results.keep_requests(measured.drive, name)
                    row["clock_origin"] = measured.drive.clock_origin
                results.append(row)
                say(progress(number, len(share.jobs), row))
                if time.time() > share.until_s:
                    break
        except TimeoutError:
            _fail(results, share, cell, repeats[at], facts, f"no answer for {_REPEAT_S:g} s")
            return 1
        except Exception as error:  # what a server raises for one cell is no reason to lose others
            why = str(error) if isinstance(error, CellError) else f"{type(error).__name__}: {error}"
            _fail(results, share, cell, repeats[at], facts, why)
        finally:
            await steps.aclose()
    return 0


def progress(number: int, count: int, row: Mapping[str, Any]) -> str:
    """One line about a result that was just written."""
    step = f", step {row['step_ms']:.2f} ms" if "step_ms" in row else ""
    doubt = "" if row.get("is_steady", True) else ", NOT STEADY"
    return (
        f"{row['variant']} {number + 1}/{count} {row['cell']} #{row['repeat']}: "
        f"{row['tokens_per_s']:,.0f} tokens/s{step}, took {row['wall_s']:.1f} s{doubt}"
    )


def say(line: str) -> None:
    """A line of progress, on stderr among what SGLang logs there."""
    print(f"[bench serve] {line}", file=sys.stderr, flush=True)


def _row(share: Share, cell: Cell, repeat: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    state, record = gpu_state(), share.record
    return {
        "variant": share.variant,
        "cell": cell.name,
        "repeat": repeat,
        "status": "complete",
        **share.settings.identity,
        "run": share.run,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": state.get("gpu"),
        "clocks": state.get("clocks"),
        "driver": state.get("driver"),
        "record": None if record is None else str(record.relative_to(share.settings.out.parent)),
        **facts,
    }


def _fail(
    results: Results, share: Share, cell: Cell, repeat: int, facts: Mapping[str, Any], why: str
) -> None:
    say(f"{share.variant} {cell.name} #{repeat} failed: {why}")
    results.append(_row(share, cell, repeat, facts) | {"status": "failed", "error": why})


def _server_row(settings: Settings, variant: str, started: str, code: int) -> dict[str, Any]:
    return {
        "variant": variant,
        "cell": "",
        "repeat": 0,
        "status": "died",
        **settings.identity,
        "run": started,
        "error": f"exit code {code}",
    }


def names(text: str) -> tuple[str, ...]:
    """Names between commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def engine_arguments(text: str) -> dict[str, Any]:
    """Arguments of an engine from a JSON object.

    Raises:
        ConfigError: it is none.
    """
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--engine {text} is no JSON ({error}).") from None
    if not isinstance(arguments, dict):
        raise ConfigError(f'--engine {text} is no JSON object; write {{"name": value}}.')
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line, measure and print the table."""
    parser = argparse.ArgumentParser(description="Decode and serving rates of a live SGLang.")
    parser.add_argument("model", help="folder with a config.json")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--cells", default=CELLS, help="groups or names, with commas")
    parser.add_argument("--variants", default=VARIANTS, help="in this order, with commas")
    parser.add_argument("--budget-s", type=float, default=1500.0, help="no cell starts later")
    parser.add_argument("--seed", type=int, default=0, help="of token ids, lengths and arrivals")
    parser.add_argument("--record", action="store_true", help="servers write their steps")
    parser.add_argument("--trace", type=Path, help="plain trace to send as one more cell")
    parser.add_argument("--url", help="a server that runs already; --variants names it")
    parser.add_argument("--engine", default="{}", help="more arguments of sglang.Engine, as JSON")
    parser.add_argument("--table", action="store_true", help="print the table, measure nothing")
    parser.add_argument("--dry-run", action="store_true", help="list what is left to measure")
    chosen = vars(parser.parse_args(argv))
    is_table, is_dry = chosen.pop("table"), chosen.pop("dry_run")
    chosen |= {"cells": names(chosen["cells"]), "variants": names(chosen["variants"])}
    try:
        settings = Settings(**chosen | {"engine": engine_arguments(chosen["engine"])})
        if is_dry:
            print("\n".join(plan_lines(settings)))
            return 0
        died = 0 if is_table else run(settings)
        print(table_text(Results(settings.out).rows()))
    except GraniKVError as error:
        print(error, file=sys.stderr)
        return 1
    return 1 if died else 0


if __name__ == "__main__":
    sys.exit(main())
