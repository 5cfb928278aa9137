"""Paper questions about throughput: headline, short prefixes, storage, B sweep, many prefixes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise

from granikv.core.dispatch import DispatchChoice
from granikv.sim.config import System
from granikv.validate.paper.outcomes import Outcome, Question, gain, gains
from granikv.validate.paper.settings import (
    CONFIGURATIONS,
    CUT,
    LLAMA,
    MEANS,
    QWEN14,
    Cell,
    Lengths,
    Served,
    with_granikv,
)

GRID_PREFIXES = (512, 1024, 2048, 4096, 8192)
GRID_ROWS = (8, 32, 128, 256)
_PREFIXES = (*GRID_PREFIXES, 16384)
_MIXED = (1024, 2048, 4096, 8192)  # the paper's lengths are not known: four of its grid
_ROWS = 256
_LONG = 8192
_SWEEP_ROWS = (64, 128, 256, 512, 1024)
_KERNELS: tuple[tuple[System, DispatchChoice], ...] = (("sglang", "paged"), ("cascade", "cascade"))


def serving_questions() -> Iterator[Question]:
    """Each with the shipped ShareGPT cut and with ShareGPT's published means."""
    for lengths in (CUT, MEANS):
        yield from _headline(lengths)
        yield from _short(lengths)
        yield from _storage(lengths)
        yield from _sweep(lengths)
        yield from _uniform(lengths)
        yield from _mixed(lengths)
    grid = chain.from_iterable(
        grid_cells(served, 512, rows) for served in CONFIGURATIONS for rows in GRID_ROWS
    )
    setting = "bursts, 256 + 128 tokens"
    yield Question("short.grid", setting, tuple(grid), lambda o: min(gains(o)))


def grid_cells(served: Served, prefix: int, rows: int) -> tuple[Cell, Cell]:
    """Stock and GraniKV at one point of the paper's synthetic grid."""
    return with_granikv(Cell(served, "sglang", (prefix,), rows, None))


def _headline(lengths: Lengths) -> Iterator[Question]:
    ladder: list[Cell] = []
    for name, served in zip(("llama", "qwen14", "qwen32"), CONFIGURATIONS, strict=True):
        pairs = [
            with_granikv(Cell(served, "sglang", (tokens,), _ROWS, lengths)) for tokens in _PREFIXES
        ]
        ladder.extend(chain.from_iterable(pairs))
        stock, ours = pairs[-1]
        yield Question(f"headline.{name}", lengths.name, (stock, ours), gain)
        two = stock, replace(ours, launches="two")
        yield Question(f"headline.{name}", f"{lengths.name}, two launches", two, gain)
    setting = f"{lengths.name}, three models"
    short = tuple(cell for cell in ladder if cell.prefixes == (512,))
    yield Question("headline.short", setting, short, lambda o: min(gains(o)))
    yield Question(
        "headline.monotone", f"{lengths.name}, three models, to 16K", tuple(ladder), _rising
    )


def _rising(outcomes: Sequence[Outcome]) -> float:
    """Share of the steps to the next longer prefix of a model that raise its gain."""
    found, size = gains(outcomes), len(_PREFIXES)
    rises = [
        after > before
        for start in range(0, len(found), size)
        for before, after in pairwise(found[start : start + size])
    ]
    return sum(rises) / len(rises)


def _short(lengths: Lengths) -> Iterator[Question]:
    corner = with_granikv(Cell(QWEN14, "sglang", (512,), 512, lengths))
    yield Question("short.corner", lengths.name, corner, gain)


def _storage(lengths: Lengths) -> Iterator[Question]:
    """The same kernel on both sides; what differs is where the prefix lies."""
    for system, kernel in _KERNELS:
        pages = Cell(LLAMA, system, (_LONG,), _ROWS, lengths, launches="two")
        slab = replace(pages, system="granikv", dispatch=kernel)
        setting = f"{lengths.name}, {kernel} kernels"
        yield Question("storage.serving", setting, (pages, slab), gain)


def _sweep(lengths: Lengths) -> Iterator[Question]:
    cells = {rows: Cell(LLAMA, "granikv", (_LONG,), rows, lengths) for rows in _SWEEP_ROWS}
    reference_last = *cells.values(), cells[_ROWS]
    yield Question("sweep.peak", f"{lengths.name}, Llama, 8K", reference_last, _of_best)
    yield Question("sweep.1024", f"{lengths.name}, Llama, 8K", (cells[_ROWS], cells[1024]), gain)


def _of_best(outcomes: Sequence[Outcome]) -> float:
    return outcomes[-1].tokens_per_s / max(outcome.tokens_per_s for outcome in outcomes)


def _uniform(lengths: Lengths) -> Iterator[Question]:
    def cell(system: System, count: int) -> Cell:
        return Cell(LLAMA, system, (_LONG,) * count, _ROWS, lengths)

    name, ours = lengths.name, cell("granikv", 4)
    yield Question("several.four", name, (cell("sglang", 4), ours), gain)
    yield Question("several.four.cascade", name, (cell("cascade", 4), ours), gain)
    systems: tuple[tuple[str, System], ...] = (
        ("stock", "sglang"),
        ("cascade", "cascade"),
        ("granikv", "granikv"),
    )
    for claim, system in systems:
        many = (cell(system, 64),)
        yield Question(f"several.many.{claim}", name, many, lambda o: o[0].tokens_per_s)
    fewer = cell("granikv", 1), cell("granikv", 64)
    yield Question("several.many.loss", name, fewer, lambda o: 1 - gain(o))


def _mixed(lengths: Lengths) -> Iterator[Question]:
    cases: tuple[tuple[str, tuple[int, ...], System], ...] = (
        ("mixed.four", _MIXED, "granikv"),
        ("mixed.four.cascade", _MIXED, "cascade"),
        ("mixed.eight", _MIXED * 2, "granikv"),
    )
    for claim, prefixes, system in cases:
        stock = Cell(LLAMA, "sglang", prefixes, _ROWS, lengths)
        setting = f"{lengths.name}, 1K 2K 4K 8K{' twice' if len(prefixes) > 4 else ''}"
        yield Question(claim, setting, (stock, replace(stock, system=system)), gain)
