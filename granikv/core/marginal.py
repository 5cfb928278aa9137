"""marginal: tokens move to the side whose next token is worth more."""

from dataclasses import dataclass, field

from granikv.core.repartition import Hold, Window


@dataclass(slots=True)
class MarginalPolicy:
    """Compares both sides in one unit: KV token reads that a decode step saves for one token.

    HOT: a prefix that missed and that `rows` rows read in COLD would be read once: `rows - 1`.

    COLD: 0 unless it is short. Then the rows are as many as COLD holds, and from throughput =
    rows / (fixed_reads + reads) a further token, which holds 1 / private of all rows and is read
    as well, is worth `(fixed_reads + reads) / private - 1`. Here private is what rows read alone,
    and reads is private + what is shared, each run once. Runs that lie in COLD count once too: a
    prefix that HOT takes in gives its COLD tokens back, so COLD has to be worth more than it would
    be afterwards.

    HOT grows by what the best prefix lacks, and gives what no two rows read in common, less the
    best prefix's length while that is worth keeping. Neither undoes the other.

    Attributes:
        fixed_reads: what a step costs beside KV reads, in token reads: the weights' bytes over a
            token's KV bytes. Llama-3.1-8B in bf16: 16.06e9 / 131,072.
        advantage: how many times the other side's value makes a move (the dead band).
        largest: longest move, as a share of all tokens.
        idle_share: share of all tokens that stays idle in COLD when HOT grows.
        memory: windows after a miss in which a prefix in COLD still counts as wanted in HOT: where
            nothing is admitted, nothing can miss.
        hold: windows between two moves; a reversal doubles the wait.
        longest_hold: longest wait, in windows.
    """

    fixed_reads: float = 122_500.0
    advantage: float = 1.5
    largest: float = 0.25
    idle_share: float = 0.01
    memory: int = 10
    hold: int = 1
    longest_hold: int = 16
    _hold: Hold = field(init=False)
    _since_miss: int = field(init=False)

    def __post_init__(self) -> None:
        """Check the options."""
        if not self.advantage >= 1:
            raise ValueError(f"advantage must be at least 1, got {self.advantage!r}")
        if not 0 < self.largest < 1:
            raise ValueError(f"largest must be between 0 and 1, got {self.largest!r}")
        self._hold = Hold(self.hold, self.longest_hold)
        self._since_miss = self.memory

    def observe(self, window: Window) -> int | None:
        """HOT with what the more valuable side lacks, or stay."""
        self._since_miss = 0 if window.hot_miss_tokens else self._since_miss + 1
        if not self._hold.is_over():
            return None
        cold = self.cold_value(window)
        length, hot = self.best_miss(window)
        change = self._growth(window, length) if hot > self.advantage * cold else 0
        if not change and cold > 0:
            change = -self._gift(window, length if self.advantage * hot > cold else 0)
        if not change:
            return None
        self._hold.begin(grows=change > 0)
        return window.hot_tokens + change

    def cold_value(self, window: Window) -> float:
        """Token reads a step that one more COLD token is worth."""
        if not window.cold_is_short:
            return 0.0
        shared = sum(length for length, _ in (*window.rows_per_slab, *window.rows_per_cold_run))
        return (self.fixed_reads + shared) / max(1, window.private_tokens)

    def best_miss(self, window: Window) -> tuple[int, float]:
        """The prefix in COLD that costs the most reads: tokens, and reads saved per token.

        Zeros when no slab was missed lately: what lies in COLD then is not wanted in HOT.
        """
        if self._since_miss >= self.memory or not window.rows_per_cold_run:
            return 0, 0.0
        length, rows = max(window.rows_per_cold_run, key=lambda run: (run[0] * (run[1] - 1), run))
        return length, rows - 1.0

    def _growth(self, window: Window, length: int) -> int:
        room = int(window.cold_idle - self.idle_share * window.size_tokens)
        return max(0, min(self._limit(window), length - window.hot_unread, room))

    def _gift(self, window: Window, kept: int) -> int:
        return max(0, min(self._limit(window), window.hot_unread - kept))

    def _limit(self, window: Window) -> int:
        return max(1, int(self.largest * window.size_tokens))
