"""Cells: the run list of `granikv bench serve`, most valuable first.

A steady cell sends one batch and measures its decode steps; the others are in
`granikv.validate.driven_cells`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from granikv.core.errors import ConfigError
from granikv.validate.driven_cells import (
    LOADS_PER_S,
    MIXED_PREFIXES,
    SHAPES,
    DrivenCell,
    load,
    mixed,
    named,
    poisson,
)

OWN_TOKENS = 64
UNSHARED_TOKENS = 512
HEADLINE_REPEATS = 3
_GRID_PREFIXES = (512, 2048, 4096, 8192, 16384, 32768)
_GRID_ROWS = (1, 8, 32, 64, 128, 256)
_SMALL_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_LOADS_TOKENS = 8192
_FLOOR_S, _TOKEN_S = 8e-3, 1.9e-8  # a stock decode step of Llama-3.1-8B on an H200, to plan with
_MEASURE_S = 2.0
_STEPS = (24, 128)


@dataclass(frozen=True, slots=True)
class SteadyCell:
    """Rows that decode together.

    Attributes:
        name: in results and seeds.
        shared: (prefix tokens, rows) of each prefix; 0 tokens is no prefix.
        own_tokens: tokens of each prompt behind its prefix.
        repeats: measurements.
    """

    name: str
    shared: tuple[tuple[int, int], ...]
    own_tokens: int = OWN_TOKENS
    repeats: int = 1

    @property
    def rows(self) -> int:
        """Prompts in the batch."""
        return sum(rows for _, rows in self.shared)

    @property
    def steps(self) -> int:
        """Decode steps to time: an even number that takes a stock server about two seconds."""
        read = sum(rows * (length + self.own_tokens) for length, rows in self.shared)
        steps = int(_MEASURE_S / (_FLOOR_S + _TOKEN_S * read))
        return min(max(steps, _STEPS[0]), _STEPS[1]) // 2 * 2


Cell = SteadyCell | DrivenCell


def groups() -> dict[str, tuple[Cell, ...]]:
    """The cells of each group, by the name that `--cells` takes."""
    return {
        "headline": tuple(_headline()),
        "poisson": tuple(poisson(f"poisson-{size}", (size,)) for size in (8192, 16384)),
        "loads": tuple(load(_LOADS_TOKENS, rate) for rate in LOADS_PER_S),
        "mixed-loads": tuple(mixed(rate) for rate in LOADS_PER_S),
        "unshared": tuple(_unshared()),
        "grid": tuple(_shared(size, rows) for size in _GRID_PREFIXES for rows in _GRID_ROWS),
    }


def cells(chosen: Sequence[str]) -> list[Cell]:
    """The cells of groups or single names, each once, in the order of the groups chosen.

    Raises:
        ConfigError: a name is neither a group nor a cell.
    """
    known = groups()
    singles = {cell.name: cell for cell in _once(c for group in known.values() for c in group)}
    for name in chosen:
        if name not in known and name not in singles and (cell := named(name)):
            singles[name] = cell
    if unknown := [name for name in chosen if name not in known and name not in singles]:
        raise ConfigError(
            f"There is no cell {', '.join(unknown)}; choose from {', '.join(known)}, a cell's name "
            f"as --dry-run lists them, or a name like {', '.join(SHAPES)}."
        )
    return list(_once(cell for name in chosen for cell in known.get(name) or (singles[name],)))


def _headline() -> Iterator[SteadyCell]:
    for rows in (256, 64):
        for size in (16384, 8192, 32768):
            yield _shared(size, rows, HEADLINE_REPEATS)
    shared = tuple((size, 64) for size in MIXED_PREFIXES)
    yield SteadyCell("mixed-2k-16k-x256", shared, repeats=HEADLINE_REPEATS)


def _unshared() -> Iterator[SteadyCell]:
    for rows in reversed(_GRID_ROWS):
        yield SteadyCell(f"unshared-x{rows}", ((0, rows),), UNSHARED_TOKENS)
    for rows in reversed(_SMALL_ROWS):
        yield _shared(512, rows)


def _shared(size: int, rows: int, repeats: int = 1) -> SteadyCell:
    return SteadyCell(f"{size}x{rows}", ((size, rows),), repeats=repeats)


def _once(many: Iterable[Cell]) -> Iterator[Cell]:
    seen: set[str] = set()
    for cell in many:
        if cell.name not in seen:
            seen.add(cell.name)
            yield cell
