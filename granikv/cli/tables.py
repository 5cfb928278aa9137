"""Tables: results as rich tables."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from granikv.planner.contest import Contest
    from granikv.planner.ranking import Ranking
    from granikv.planner.search import Findings
    from granikv.planner.verdict import Verdict
    from granikv.sim.bench import Measurement
    from granikv.sim.metrics import Distribution, Slo, Summary
    from granikv.sim.run import RunOutcome
    from granikv.traces.stats import SharedPrefix, TraceInfo
    from granikv.validate.paper.answers import Answer


def plan_table(findings: "Findings", verdict: "Verdict | None") -> Table:
    """One row per system and pool fraction, of the nominal seed; the recommended one is marked."""
    from granikv.planner.page import comparison

    headers, rows = comparison(findings, verdict)
    title = f"Nominal cost model, replicas: {findings.replicas}"
    table = _table(title, [header.replace(", ", "\n") for header in headers])
    recommended = None if verdict is None else f"{verdict.fraction:g}" if verdict.helps else "stock"
    for name, cells in rows.items():
        is_best = name == recommended
        mark = ">" if is_best else " "
        table.add_row(f"{mark} {name}", *cells, style="bold" if is_best else None)
    return table


def policies_table(contest: "Contest", ranking: "Ranking") -> Table:
    """One row per policy, fixed fraction and oracle, best first; the best of those that a server
    can run is marked.
    """
    from granikv.planner.contest_page import standings, to_run
    from granikv.planner.words import OBJECTIVES

    headers, rows = standings(ranking)
    title = (
        f"Gains in {OBJECTIVES[ranking.objective]}; seeds: {contest.seeds}, "
        f"replicas: {contest.replicas}; all else is of seed 0"
    )
    table = _table(title, [_broken(header) for header in headers])
    for name, cells in rows.items():
        is_best = name == to_run(ranking).name
        mark = ">" if is_best else " "
        table.add_row(f"{mark} {name}", *cells, style="bold" if is_best else None)
    return table


def _broken(header: str) -> str:
    """On two lines: ten columns and an interval must fit a pipe's width."""
    first, separator, last = header.partition(", ")
    return f"{first}\n{last}" if separator else "\n".join(header.rsplit(" ", 1))


def run_tables(summary: "Summary", outcome: "RunOutcome", slo: "Slo", tp: int) -> list[Table]:
    """A simulated run: latencies, rates, pools, and where GPU time went."""
    return [
        _latencies(summary),
        _pairs("Run", _run_rows(summary, outcome, slo)),
        _pairs("Pools", _pool_rows(summary, outcome)),
        _pairs("GPU time", _time_rows(summary, outcome, tp)),
    ]


def _latencies(summary: "Summary") -> Table:
    table = _table("Latency, ms", ["", "mean", "p50", "p90", "p95", "p99"])
    rows: Sequence[tuple[str, Distribution]] = (
        ("TTFT", summary.ttft_s),
        ("TPOT", summary.tpot_s),
        ("ITL", summary.itl_s),
        ("end to end", summary.e2e_s),
    )
    for name, d in rows:
        table.add_row(
            name, *(f"{value * 1e3:,.1f}" for value in (d.mean, d.p50, d.p90, d.p95, d.p99))
        )
    return table


def _run_rows(summary: "Summary", outcome: "RunOutcome", slo: "Slo") -> Iterable[tuple[str, str]]:
    yield "requests", f"{outcome.sent:,} sent, {summary.finished:,} finished"
    for name in ("refused", "aborted", "unfinished"):
        if count := getattr(outcome, name):
            yield name, f"{count:,}"
    yield (
        "arrivals over, then draining for",
        f"{summary.offered_s:,.1f} s, {summary.drain_s:,.1f} s",
    )
    yield "throughput", f"{summary.throughput_tokens_per_s:,.0f} output tokens/s"
    yield "finished requests", f"{summary.requests_per_s:.3g} /s"
    if slo.is_set:
        yield (
            "goodput",
            f"{summary.goodput_requests_per_s:.3g} requests/s, "
            f"{summary.slo_share:.1%} within the SLO",
        )
    yield "prompt tokens found in the cache", f"{summary.cached_share:.1%}"
    yield "decode batch", f"{summary.mean_rows:.1f} rows on average, {summary.peak_rows:,} at most"


def _pool_rows(summary: "Summary", outcome: "RunOutcome") -> Iterable[tuple[str, str]]:
    yield "prompt tokens read from HOT", f"{summary.hot_share:.1%}"
    yield "HOT used at most", f"{summary.peak_hot_used:,} tokens"
    yield "COLD free at least", f"{summary.least_cold_free:,} tokens"
    yield "free HOT outside its largest run", f"{outcome.fragmentation:.1%}"
    yield "HOT misses", f"{summary.hot_misses:,}{_by_reason(outcome.hot_misses)}"
    yield "promoted to HOT by copying", f"{outcome.promoted_tokens:,} tokens"
    yield "evictions", f"{summary.evictions:,}"
    yield "retractions", f"{summary.retractions:,}"
    if summary.migrated_tokens:
        yield "moved with the boundary", f"{summary.migrated_tokens:,} tokens"


def _time_rows(summary: "Summary", outcome: "RunOutcome", tp: int) -> Iterable[tuple[str, str]]:
    yield "busy", f"{summary.busy_share:.1%}"
    for name, share in outcome.term_share.items():
        if share:
            yield name, f"{share:.1%}"
    yield "prefill steps", f"{summary.prefill_steps:,}"
    yield "decode steps", f"{summary.decode_steps:,}{_by_reason(summary.decode_steps_by_mode)}"
    if tp > 1:
        splits = sum(t.split_steps for t in outcome.totals)
        saved = outcome.split_saved_share
        yield (
            "steps split into a burst and a follow-on",
            f"{splits:,}, which saved {saved:.2%} of the busy time" if splits else "0",
        )


def _by_reason(counts: dict[str, int]) -> str:
    parts = [f"{name} {count:,}" for name, count in counts.items() if count]
    return f" ({', '.join(parts)})" if parts else ""


def trace_tables(info: "TraceInfo") -> list[Table]:
    """What a trace holds."""
    return [
        _pairs("Trace", _trace_rows(info)),
        _lengths(info),
        _prefixes("Shared prefixes that serve the most tokens", info.top_by_tokens, info),
        _prefixes(
            f"Shared prefixes of {info.min_prefix_tokens:,} tokens or more that are most asked for",
            info.top_by_peak,
            info,
        ),
        _pool(info),
    ]


def _trace_rows(info: "TraceInfo") -> Iterable[tuple[str, str]]:
    yield "requests", f"{info.requests:,}"
    yield "duration", f"{info.duration_s:,.1f} s"
    if info.rate_per_s is not None:
        yield "rate", f"{info.rate_per_s:.4g} requests/s"
    yield (
        "different arrival times",
        f"{info.distinct_times:,}, at most {info.largest_tick:,} requests at one",
    )
    if info.waiting_turns:
        yield "turns that wait for an answer", f"{info.waiting_turns:,}"
    yield (
        "prompt tokens an earlier prompt had",
        f"{info.shared_fraction:.2%} ({info.shared_tokens:,})",
    )
    yield "requests covered entirely", f"{info.covered_requests:,}"
    yield (
        "shared prefixes",
        f"{info.prefixes:,}; {info.prefixes_10:,} of 10 requests or more, "
        f"{info.prefixes_100:,} of 100 or more",
    )


def _lengths(info: "TraceInfo") -> Table:
    from granikv.traces.stats import QUANTILES

    table = _table("Lengths, tokens", ["", *(f"p{q * 100:g}" for q in QUANTILES), "mean", "total"])
    for name, lengths in (("prompt", info.prompt), ("output", info.output)):
        quantiles = (f"{value:,.0f}" for value in lengths.quantiles)
        table.add_row(name, *quantiles, f"{lengths.mean:,.1f}", f"{lengths.total:,}")
    return table


def _prefixes(title: str, prefixes: Sequence["SharedPrefix"], info: "TraceInfo") -> Table:
    headers = [
        "tokens",
        "requests",
        "tokens served",
        "first s",
        "last s",
        f"peak in {info.window_s:g} s",
    ]
    table = _table(title, headers)
    for prefix in prefixes:
        table.add_row(
            f"{prefix.tokens:,}",
            f"{prefix.requests:,}",
            f"{prefix.tokens_served:,}",
            f"{prefix.first_s:,.1f}",
            f"{prefix.last_s:,.1f}",
            f"{prefix.peak_requests:,}",
        )
    return table


def _pool(info: "TraceInfo") -> Table:
    title = "HOT pool of the best whole prefixes, had the trace been known"
    table = _table(title, ["prefixes", "stored tokens", "served tokens", "share of prompts"])
    for row in info.pool:
        share = row.served_tokens / info.prompt.total
        table.add_row(
            f"{row.prefixes:,}", f"{row.stored_tokens:,}", f"{row.served_tokens:,}", f"{share:.2%}"
        )
    return table


def benchmark_table(measurements: Iterable["Measurement"]) -> Table:
    """Figures beside their goals."""
    table = _table("", ["workload", "measured", "goal"])
    for measurement in measurements:
        table.add_row(measurement.name, measurement.value, measurement.goal)
    return table


def paper_tables(answer: "Answer") -> list[Table]:
    """Published figures beside predictions, and the predicted grid."""
    from granikv.validate.paper.answers import HEADERS, grid_words
    from granikv.validate.paper.serving import GRID_ROWS

    claims = Table(title="Ratio: predicted / published", title_justify="left", box=box.SIMPLE_HEAD)
    for header in HEADERS[1:]:
        is_number = header in ("predicted", "ratio", "rows")
        claims.add_column(header, justify="right" if is_number else "left")
    last = ("", "")
    for row in answer.rows:
        where, claim, published, *cells = row.words
        if where != last[0]:
            claims.add_row(where, style="bold")
        is_new = (where, claim) != last
        claims.add_row(*((claim, published) if is_new else ("", "")), *cells)
        last = where, claim
    title = "Predicted gain over stock on the paper's synthetic grid"
    grid = _table(title, ["model", "prefix", *(f"B = {rows}" for rows in GRID_ROWS)])
    for line in answer.grid:
        grid.add_row(*grid_words(line))
    return [claims, grid]


def _pairs(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE, show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    return table


def _table(title: str, headers: Sequence[str]) -> Table:
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD)
    for place, header in enumerate(headers):
        table.add_column(header, justify="right" if place else "left", no_wrap=not place)
    return table
