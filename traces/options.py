"""What a caller may ask of a trace reader, and what the reader did with the rows."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

TimeUnit = Literal["s", "ms", "us", "ns"]

PER_SECOND: dict[TimeUnit, int] = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a trace; the defaults suit every format that states all it needs.

    Attributes:
        block_size: tokens of one hash block; None takes what the format fixes (checked against
            every row).
        drop_failed: drop rows without output or prompt; False keeps them with one token. Both are
            counted.
        closed_loop: a turn waits for the answer before it; False replays recorded times.
        max_think_s: longest pause between an answer and the next turn; None keeps the recorded
            ones.
        start_spread_s: conversations that all start at 0 start uniformly at random in this many
            seconds.
        time_unit: unit of the time stamps, only for formats that leave it open.
        requests_per_s: Poisson arrivals for files without arrival times; `inf` sends all at once.
        chars_per_token: characters of one token, for files that hold text instead of lengths.
        bench_run: which run (from 0) of a benchmark output that several runs appended to.
        sort: sort an unsorted file in memory (stable) instead of refusing it.
        seed: of everything above that is random, and of a generated workload.
    """

    block_size: int | None = None
    drop_failed: bool = True
    closed_loop: bool = True
    max_think_s: float | None = None
    start_spread_s: float = 0.0
    time_unit: TimeUnit | None = None
    requests_per_s: float | None = None
    chars_per_token: float | None = None
    bench_run: int | None = None
    sort: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: a number is out of its range.
        """
        for name in ("block_size", "requests_per_s", "chars_per_token"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        for name in ("max_think_s", "start_spread_s", "bench_run", "seed"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name} must not be negative, got {value}")

    def think_s(self, pause_s: float) -> float:
        """The pause to use for a recorded one: not negative and not above the cap."""
        pause_s = max(pause_s, 0.0)
        return pause_s if self.max_think_s is None else min(pause_s, self.max_think_s)


@dataclass(slots=True)
class ReadReport:
    """What one pass over a trace did; complete when the pass has reached the end.

    Attributes:
        rows_read: rows that held a request.
        kept: requests handed on.
        dropped: rows left out, by reason.
        clamped: values raised to the least that a server accepts, by reason.
        out_of_order: rows earlier than the row before them (only a sorting pass gets past one).
        block_size: tokens of one hash block, None when the format has no blocks.
        block_rule: "ceil" when a partial last block has an id, "floor" when it has none, "either"
            when no row tells.
        warnings: one sentence for each thing that looks wrong but can be read.
    """

    rows_read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    clamped: Counter[str] = field(default_factory=Counter)
    out_of_order: int = 0
    block_size: int | None = None
    block_rule: str | None = None
    warnings: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """One line for people: rows read, kept, dropped and clamped."""
        parts = [f"{self.rows_read:,} rows read, {self.kept:,} kept"]
        parts += [f"{count:,} dropped ({reason})" for reason, count in self.dropped.items()]
        parts += [f"{count:,} clamped ({reason})" for reason, count in self.clamped.items()]
        if self.out_of_order:
            parts.append(f"{self.out_of_order:,} out of order, sorted")
        if self.block_size is not None:
            parts.append(f"blocks of {self.block_size} tokens ({self.block_rule})")
        return ", ".join(parts)
