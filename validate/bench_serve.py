"""The serving benchmark: `python -m granikv.validate.bench_serve MODEL --out RESULTS.jsonl`.

Starts one variant of the server after the other on the one GPU, each in a process of its own, and
runs the cells of the run list on it. Every repeat of a cell is one line of RESULTS.jsonl, written
at once; a second run with the same file does what is missing. Needs SGLang, numpy and pydantic;
`granikv bench serve` is the same command with run records at the end. docs/serve_bench.md says what
each number is.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from granikv.core.errors import GraniKVError
from granikv.validate.clients import HttpClient
from granikv.validate.serve_options import OPTIONS, Option, Settings, settings_of
from granikv.validate.serve_plan import START_S, plan_lines, planned
from granikv.validate.serve_results import Results
from granikv.validate.serve_share import Share, measure_share, say
from granikv.validate.serve_table import table_text
from granikv.validate.servers import (
    gpu_state,
    in_new_process,
    scheduler_settings,
    serving,
    variant_of,
    versions,
    wait_until_free,
)

_LEAST_S = START_S + 15.0  # with less than this left, no other server is started

Launch = Callable[[Share], int]


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
        if settings.url is None and time.time() + _LEAST_S > until_s:
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
            "scheduler": scheduler_settings(info),
        }
        return await measure_share(client, share, facts)


def _server_row(settings: Settings, variant: str, started: str, code: int) -> dict[str, Any]:
    return {
        "variant": variant,
        "cell": "",
        "repeat": 0,
        "status": "died",
        **settings.identity,
        "settings": "{}",
        "run": started,
        "error": f"exit code {code}",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line, measure and print the table."""
    parser = argparse.ArgumentParser(description="Decode and serving rates of a live SGLang.")
    parser.add_argument("model", nargs="?", help="folder with a config.json")
    for name, option in OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **_of_parser(option))
    chosen = vars(parser.parse_args(argv))
    died = 0
    try:
        if not chosen["table"]:
            settings = settings_of(chosen["model"], chosen)
            if chosen["dry_run"]:
                print("\n".join(plan_lines(settings)))
                return 0
            died = run(settings)
        print(table_text(Results(chosen["out"]).rows()))
    except GraniKVError as error:
        print(error, file=sys.stderr)
        return 1
    return 1 if died else 0


def _of_parser(option: Option) -> dict[str, Any]:
    """An option as `add_argument` takes it."""
    if option.kind is bool:
        return {"action": "store_true", "help": option.help}
    common = {"default": option.default, "help": option.help}
    if option.kind is list:
        return {"action": "append", **common}
    return {"type": option.kind, **common}


if __name__ == "__main__":
    sys.exit(main())
