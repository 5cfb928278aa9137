"""Tables of `granikv validate`: each rung's errors, and what repeats of the live run say."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from granikv.validate.compare.error_measures import Errors
    from granikv.validate.compare.ladder import Ladder, RunReport
    from granikv.validate.compare.steady_rung import SteadyComparison

_NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end"}


def ladder_tables(ladder: "Ladder") -> Iterable[Table]:
    """One table for each rung that something was compared on."""
    tables = (
        _steps(ladder.runs),
        _schedules(ladder.runs),
        _requests(ladder),
        _distributions(ladder.runs),
        _saturations(ladder),
        _steady(ladder.steady),
        _decisions(ladder),
    )
    return (table for table in tables if table.row_count)


def _steps(reports: Iterable["RunReport"]) -> Table:
    headers = ["run", "mode", "steps", "median", "p90", "worst", "bias"]
    table = wide_table("1. Steps: predicted time of each recorded batch, absolute errors", headers)
    for report in reports:
        if report.steps is None:
            continue
        for (mode,), error in report.steps.errors("mode").items():
            table.add_row(report.run.name, str(mode), *_error_cells(error))
        for reason, count in report.steps.skipped.items():
            table.add_row(report.run.name, f"not priced: {reason}", f"{count:,}")
    return table


def _schedules(reports: Iterable["RunReport"]) -> Table:
    headers = ["run", "tokens/s", "cached, points", "rows", "extends", "evictions", "HOT used"]
    title = "2. Schedule: with the run's own step times; simulated - live, or live / simulated"
    table = wide_table(title, headers)
    for report in reports:
        found = report.schedule
        if found is None:
            continue
        pairs = (
            (found.live_extends, found.simulated_extends),
            (found.live_evictions, found.simulated_evictions),
            (found.live_hot_used, found.simulated_hot_used),
        )
        table.add_row(
            report.run.name,
            f"{found.requests.throughput_error:+.1%}",
            f"{found.requests.cached_points:+.2f}",
            f"{found.live_rows:.1f} / {found.simulated_rows:.1f}",
            *(f"{live:,} / {simulated:,}" for live, simulated in pairs),
        )
    return table


def _requests(ladder: "Ladder") -> Table:
    headers = ["run", "tokens/s live", "simulated", "error", "repeats differ by", "cached, points"]
    headers += ["TTFT", "TPOT", "end to end"]
    table = wide_table("3. Requests: throughput, and median error request by request", headers)
    for report in ladder.runs:
        found = report.requests
        if found is None:
            continue
        spread = ladder.spreads.get(report.run.identity, {}).get("throughput")
        times = (found.times.get(name) for name in _NAMES)
        table.add_row(
            report.run.name,
            f"{found.live_tokens_per_s:,.0f}",
            f"{found.simulated_tokens_per_s:,.0f}",
            f"{found.throughput_error:+.1%}",
            "one run" if spread is None else f"{spread:.1%}",
            f"{found.cached_points:+.2f}",
            *("" if t is None else f"{t.paired.median:.1%} ({t.paired.bias:+.1%})" for t in times),
        )
    return table


def _distributions(reports: Iterable["RunReport"]) -> Table:
    headers = ["run", "time", "KS distance", "p50 live", "simulated", "error of p50", "p90", "p99"]
    table = wide_table("4. Distributions of all requests that finished in both", headers)
    for report in reports:
        for name, found in ({} if report.requests is None else report.requests.times).items():
            unit = 1e3 if name == "tpot_s" else 1.0
            table.add_row(
                report.run.name,
                f"{_NAMES[name]}, {'ms' if unit > 1 else 's'}",
                f"{found.ks:.3f}",
                f"{found.live[0] * unit:,.2f}",
                f"{found.simulated[0] * unit:,.2f}",
                *(f"{error:+.1%}" for error in found.quantile_errors),
            )
    return table


def _saturations(ladder: "Ladder") -> Table:
    headers = ["workload", "live, requests/s", "simulated", "error"]
    table = wide_table("Saturation: the rate at which TTFT p50 passes a second", headers)
    for one in ladder.saturations:
        rates = (one.live_per_s, one.simulated_per_s)
        cells = ("not crossed" if rate is None else f"{rate:.2f}" for rate in rates)
        table.add_row(one.workload, *cells, "" if one.error is None else f"{one.error:+.1%}")
    return table


def _steady(steady: Iterable["SteadyComparison"]) -> Table:
    from granikv.validate.compare.error_measures import errors

    headers = ["server", "cells", "median", "p90", "worst", "bias", "worst cell"]
    table = wide_table("Steady decode: rates of full batches, absolute errors", headers)
    groups: dict[str, list[SteadyComparison]] = {}
    for one in steady:
        groups.setdefault(" ".join((one.model, one.variant, one.engine)), []).append(one)
    for name, many in groups.items():
        error = errors([one.simulated for one in many], [one.live for one in many])
        worst = max(many, key=lambda one: abs(one.error))
        cells = _error_cells(error)
        table.add_row(name.removesuffix(" {}"), *cells, f"{worst.cell} {worst.error:+.1%}")
    return table


def _decisions(ladder: "Ladder") -> Table:
    headers = ["workload", "choices", "best live", "the simulator's", "lost", "best over worst"]
    headers += ["simulated"]
    table = wide_table("5. Decisions: what the simulator would have chosen", headers)
    by_server = [one for one in ladder.decisions if one.question == "server"]
    counting = [one for one in by_server if one.counts]
    if by_server:
        right = sum(one.best == one.chosen for one in counting)
        table.add_row(
            f"stock or ours, {len(by_server)} workloads of which {len(counting)} differ enough",
            "2",
            "",
            f"{right} of {len(counting)} right",
            f"{max((one.loss for one in counting), default=0.0):.1%} at most",
        )
    for one in ladder.decisions:
        if one.question == "settings":
            lost = f"{one.loss:.1%}" if one.counts else "does not count"
            cells = (one.workload, f"{one.settings}", one.best, one.chosen, lost)
            table.add_row(*cells, f"{one.range:+.1%}", f"{one.simulated_range:+.1%}")
    return table


def grown_table(grown: Mapping[str, tuple[float, float]]) -> Table:
    """Errors that are larger than they were."""
    table = wide_table("Errors that have grown by more than a tenth", ["error", "before", "now"])
    for name, (before, now) in grown.items():
        table.add_row(name, f"{before:.2%}", f"{now:.2%}")
    return table


def _error_cells(error: "Errors") -> tuple[str, ...]:
    shares = (f"{error.median:.1%}", f"{error.p90:.1%}", f"{error.worst:.1%}")
    return f"{error.count:,}", *shares, f"{error.bias:+.1%}"


def wide_table(title: str, headers: Iterable[str]) -> Table:
    """An empty table whose names may break and whose other cells stay whole."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for place, header in enumerate(headers):
        side = "left" if place < 2 else "right"
        table.add_column(header, justify=side, overflow="fold", no_wrap=place > 1)
    return table
