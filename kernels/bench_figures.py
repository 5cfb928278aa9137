"""The decode benchmark's figures beside what they are to reach: rows to text, without torch."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from granikv.kernels.bench_points import MIXED, Cell, one_prefix
from granikv.kernels.sweep_points import LLAMA

Key = tuple[Any, ...]

# Microseconds to reach, and further, of whole layers: Llama-3.1-8B heads, 256 private tokens.
REACH_US = {
    "16K x 256": (one_prefix(LLAMA, 256, 16384, 256), 160.0, 130.0),
    "8K x 256": (one_prefix(LLAMA, 256, 8192, 256), 115.0, None),
    "32K x 256": (one_prefix(LLAMA, 256, 32768, 256), 295.0, 265.0),
    "16K x 64": (one_prefix(LLAMA, 64, 16384, 256), 58.0, None),
    "8K x 64": (one_prefix(LLAMA, 64, 8192, 256), 46.0, None),
    "2K x 32": (one_prefix(LLAMA, 32, 2048, 256), 28.0, None),
    "2K 4K 8K 16K x 64 each": (MIXED, 135.0, None),
}
REACH_BYTES = {
    "8K x 256, private 1024": (one_prefix(LLAMA, 256, 8192, 1024), 3.8e6, 0.9),
    "8K x 256, private 2048": (one_prefix(LLAMA, 256, 8192, 2048), 3.8e6, 0.9),
    **{f"private alone, {n} rows": (Cell(LLAMA, n, 256), 3.9e6, 0.93) for n in (128, 256, 512)},
}
REACH_FLOPS = {
    "prefix alone, 8K x 256": (one_prefix(LLAMA, 256, 8192, 0), 480e6),
    "prefix alone, 16K x 256": (one_prefix(LLAMA, 256, 16384, 0), 530e6),
    "prefix alone, 8K x 512": (one_prefix(LLAMA, 512, 8192, 0), 530e6),
    "prefix alone, 16K x 512": (one_prefix(LLAMA, 512, 16384, 0), 530e6),
}
MIXED_FLOOR_RATIO = 1.5
_PAIR = "fa3_prefix_suffix_merge"
_PAIR_MEDIAN, _PAIR_WORST, _PAGED_WORST = 0.75, 0.95, 1.03


class Time(NamedTuple):
    """Median and interquartile range of one backend on one cell."""

    backend: str
    page_size: int
    median_us: float
    iqr_us: float


@dataclass(frozen=True, slots=True)
class Results:
    """Times of every cell, and the roofs of the run."""

    times: dict[Key, list[Time]]
    read_bytes_per_us: float | None
    copy_bytes_per_us: float | None
    gemm_flops_per_us: float | None

    def of(self, cell: Cell) -> list[Time]:
        """All backends of a cell, but not its plan."""
        return [time for time in self.times.get(_cell_key(cell), []) if not _is_plan(time)]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON lines file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def collect(rows: Iterable[dict[str, Any]]) -> Results:
    """Group rows by cell; of rows of the same cell, backend and page size the last one counts."""
    latest: dict[Key, dict[tuple[str, int], Time]] = {}
    roofs: dict[str, float] = {}
    for row in rows:
        time_us = median(row["times_us"])
        if row["op"] in ("roof_read", "roof_copy"):
            roofs[row["op"]] = row["bytes"] / time_us
        elif row["op"] == "gemm":
            roofs["gemm"] = 2 * row["m"] * row["n"] * row["k"] / time_us
        elif row["op"] in ("decode_attention", "prefix_pass", "plan"):
            page = row["page_size"] or 1
            time = Time(row["backend"], page, time_us, _iqr(row["times_us"]))
            latest.setdefault(_key(row), {})[row["backend"], page] = time
    times = {key: list(found.values()) for key, found in latest.items()}
    return Results(times, roofs.get("roof_read"), roofs.get("roof_copy"), roofs.get("gemm"))


def summary(rows: Iterable[dict[str, Any]]) -> str:
    """Every figure with its reach, what the libraries took, and the share of the run's roofs."""
    results = collect(rows)
    lines = [_roof_line(results), ""]
    lines += _table(_HEADERS, [*_time_rows(results), *_rate_rows(results)])
    lines += ["", *_grid_lines(results)]
    details = list(_detail_lines(results))
    return "\n".join([*lines, "", "All backends, us (interquartile range):", *details])


_HEADERS = ("figure", "reach", "best", "met", "by", "fa3", "fa3 pages", "pair", "pair forked",
            "TB/s", "of read", "TFLOP/s", "of gemm", "x floor")  # fmt: skip


def _roof_line(results: Results) -> str:
    def rate(value: float | None, unit: str) -> str:
        return "not measured" if value is None else f"{value / 1e6:.2f} {unit}"

    return (
        f"Roofs of this run: read {rate(results.read_bytes_per_us, 'TB/s')}, "
        f"copy {rate(results.copy_bytes_per_us, 'TB/s')}, "
        f"bf16 product {rate(results.gemm_flops_per_us, 'TFLOP/s')}"
    )


def _time_rows(results: Results) -> Iterator[tuple[str, ...]]:
    for name, (cell, reach_us, stretch_us) in REACH_US.items():
        best = _best(results.of(cell))
        further = f" ({stretch_us:.0f})" if stretch_us else ""
        met = best is not None and best.median_us <= reach_us
        floor = _floor_us(results, cell)
        if met and cell == MIXED and floor is not None and best is not None:
            met = best.median_us <= MIXED_FLOOR_RATIO * floor
        yield _row(results, name, cell, f"{reach_us:.0f} us{further}", best, met)


def _rate_rows(results: Results) -> Iterator[tuple[str, ...]]:
    for name, (cell, bytes_per_us, share) in REACH_BYTES.items():
        best = _best(results.of(cell))
        roof = results.read_bytes_per_us
        needed = min(bytes_per_us, share * roof) if roof else bytes_per_us
        met = best is not None and cell.least_bytes / best.median_us >= needed
        yield _row(results, name, cell, f"{needed / 1e6:.2f} TB/s", best, met)
    for name, (cell, flops_per_us) in REACH_FLOPS.items():
        best = _best(results.of(cell))
        met = best is not None and cell.flops / best.median_us >= flops_per_us
        yield _row(results, name, cell, f"{flops_per_us / 1e6:.0f} TFLOP/s", best, met)


def _row(
    results: Results, name: str, cell: Cell, reach: str, best: Time | None, met: bool
) -> tuple[str, ...]:
    times = results.of(cell)
    if best is None:
        others = (_us(_named(times, "fa3")), _us(_best_page(times)), "-", "-")
        return (name, reach, "-", "-", "not measured", *others, *("-",) * 5)
    bytes_rate, flops_rate = cell.least_bytes / best.median_us, cell.flops / best.median_us
    floor = _floor_us(results, cell)
    return (
        name,
        reach,
        f"{best.median_us:.1f} ({best.iqr_us:.1f})",
        "yes" if met else "no",
        best.backend,
        _us(_named(times, "fa3")),
        _us(_best_page(times)),
        _us(_named(times, _PAIR)),
        _us(_named(times, f"{_PAIR}_streams")),
        f"{bytes_rate / 1e6:.2f}",
        _share(bytes_rate, results.read_bytes_per_us),
        f"{flops_rate / 1e6:.0f}",
        _share(flops_rate, results.gemm_flops_per_us),
        f"{best.median_us / floor:.2f}" if floor else "-",
    )


def _grid_lines(results: Results) -> Iterator[str]:
    to_pair: list[tuple[float, Key]] = []
    to_paged: list[tuple[float, Key]] = []
    for key, times in results.times.items():
        best = _best([time for time in times if not _is_plan(time)])
        if best is None or key[0] != "decode_attention":
            continue
        pair, paged = _named(times, _PAIR), _named(times, "fa3")
        if pair and _is_large(key):
            to_pair.append((best.median_us / pair.median_us, key))
        if paged:
            to_paged.append((best.median_us / paged.median_us, key))
    if to_pair:
        middle, (worst, where) = median(ratio for ratio, _ in to_pair), max(to_pair)
        met = middle <= _PAIR_MEDIAN and worst <= _PAIR_WORST
        yield (
            f"Best over FA3's serial pair, {len(to_pair)} cells of 2K tokens and 32 rows or more: "
            f"median {middle:.3f} (<= {_PAIR_MEDIAN}), worst {worst:.3f} (<= {_PAIR_WORST}) at "
            f"{_where(where)}; {'yes' if met else 'no'}"
        )
    if to_paged:
        worst, where = max(to_paged)
        over = [entry for entry in sorted(to_paged, reverse=True) if entry[0] > _PAGED_WORST]
        yield (
            f"Best over FA3 paged, page 1, all {len(to_paged)} cells: worst {worst:.3f} "
            f"(<= {_PAGED_WORST}) at {_where(where)}; {'no' if over else 'yes'}"
        )
        yield from (f"  over: {ratio:.3f} at {_where(where)}" for ratio, where in over[1:12])
    plans = [time for found in results.times.values() for time in found if _is_plan(time)]
    if plans:
        costs = [time.median_us for time in plans]
        yield f"Plan of a step, once for all layers: {min(costs):.1f} to {max(costs):.1f} us"


def _detail_lines(results: Results) -> Iterator[str]:
    for name, (cell, *_) in {**REACH_US, **REACH_BYTES, **REACH_FLOPS}.items():
        found = sorted(results.of(cell), key=lambda time: time.median_us)
        parts = [f"{_label(time)} {time.median_us:.1f} ({time.iqr_us:.1f})" for time in found]
        if parts:
            yield f"{name}: {', '.join(parts)}"


def _best(times: Sequence[Time]) -> Time | None:
    ours = [time for time in times if time.backend.startswith("granikv_")]
    return min(ours, key=lambda time: time.median_us, default=None)


def _named(times: Sequence[Time], backend: str) -> Time | None:
    found = [time for time in times if time.backend == backend and time.page_size == 1]
    return found[0] if found else None


def _best_page(times: Sequence[Time]) -> Time | None:
    """FA3 with its best page size, once several were measured."""
    found = [time for time in times if time.backend == "fa3"]
    return min(found, key=lambda time: time.median_us) if len(found) > 1 else None


def _floor_us(results: Results, cell: Cell) -> float | None:
    if results.read_bytes_per_us is None or results.gemm_flops_per_us is None:
        return None
    return cell.floor_us(results.read_bytes_per_us, results.gemm_flops_per_us)


def _is_plan(time: Time) -> bool:
    return time.backend == "granikv_plan"


def _is_large(key: Key) -> bool:
    """A cell of one level whose segments all have 2K tokens and whose batch has 32 rows or more."""
    segments = key[4]
    return bool(segments) and key[3] >= 32 and all(tokens >= 2048 for tokens, _ in segments)


def _key(row: dict[str, Any]) -> Key:
    segments = tuple((tokens, rows) for _, tokens, rows in json.loads(row["segments_json"]))
    op = "prefix_pass" if row["private_tokens"] == 0 else "decode_attention"
    return (op, row["num_q_heads"], row["num_kv_heads"], row["rows"], segments,
            row["private_tokens"])  # fmt: skip


def _cell_key(cell: Cell) -> Key:
    return _key(cell.columns())


def _where(key: Key) -> str:
    _, q, kv, rows, segments, private = key
    parts = [f"{tokens} x {count}" for tokens, count in segments[:4]]
    return f"{q}/{kv} heads, {' + '.join(parts) or 'no prefix'}, private {private // rows}"


def _label(time: Time) -> str:
    return f"{time.backend} page {time.page_size}" if time.page_size > 1 else time.backend


def _us(time: Time | None) -> str:
    return "-" if time is None else f"{time.median_us:.1f}"


def _share(rate: float, roof: float | None) -> str:
    return "-" if roof is None else f"{rate / roof:.2f}"


def _iqr(times_us: Sequence[float]) -> float:
    if len(times_us) < 2:
        return 0.0
    low, _, high = quantiles(times_us, n=4, method="inclusive")
    return high - low


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table with columns of equal width."""
    widths = [max(len(line[i]) for line in [headers, *rows]) for i in range(len(headers))]
    rule = ["-" * width for width in widths]
    return [
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in [headers, rule, *rows]
    ]
