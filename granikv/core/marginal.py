"""marginal: tokens move to the side whose next token is worth more."""

from dataclasses import dataclass, field

from granikv.core.repartition import Window


@dataclass(slots=True)
class MarginalPolicy:
    """Compares both sides in one unit: KV token reads that a decode step saves for one token.

    HOT: a token of a prefix that `rows` rows read is read once instead: `rows - 1`, at least 1.

    COLD: 0 unless it is short. Then the rows are as many as COLD holds, and from throughput =
    rows / (fixed_reads + reads) a further token, which holds 1 / private of all rows and is read
    as well, is worth `(fixed_reads + reads) / private - 1`. Here private is what rows read alone,
    and reads is private + what is shared, each run once.

    Three things follow.

    - A run that rows read in common in COLD, and that missed HOT, takes nothing from COLD: it gives
      its COLD tokens back once it is HOT. HOT grows by it, whatever COLD is worth.
    - A prefix that missed and that no two rows read yet does take from COLD. HOT grows by it while
      the one read that it saves at least is worth more than COLD's token.
    - What HOT has beyond that and no two rows read in common saves nothing. COLD gets it when it
      is short, but only the least of what was spare for as long as it would take to get it back.
      Whoever knows nothing of the future and keeps a thing until that has cost as much as parting
      with it would, never pays more than twice what one who knows pays (Karlin et al., Competitive
      snoopy caching, Algorithmica 3, 1988).

    Attributes:
        fixed_reads: what a step costs beside KV reads, in token reads: the weights' bytes over a
            token's KV bytes. Llama-3.1-8B in bf16: 16.06e9 / 131,072.
        shortest_tokens: shorter runs in COLD are not wanted in HOT: `ValueAdmission.min_tokens`.
        return_s: how long HOT waits for tokens that it has given, until the rows that hold them
            end: `ValueAdmission.residence_s`.
    """

    fixed_reads: float = 122_500.0
    shortest_tokens: int = 256
    return_s: float = 10.0
    _is_short: bool = field(default=False, init=False)
    _has_missed: bool = field(default=False, init=False)
    _spare_since_s: float = field(default=0.0, init=False)
    _least_spare: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Check the options."""
        if not self.fixed_reads >= 0:
            raise ValueError(f"fixed_reads must be at least 0, got {self.fixed_reads!r}")
        if not self.shortest_tokens >= 1:
            raise ValueError(f"shortest_tokens must be at least 1, got {self.shortest_tokens!r}")
        if not self.return_s >= 0:
            raise ValueError(f"return_s must be at least 0, got {self.return_s!r}")

    def observe(self, window: Window) -> int | None:
        """HOT with what it lacks, without what it can spare, or stay."""
        # A server that is full admits nothing, and so refuses nothing either.
        self._is_short = window.cold_is_short or (self._is_short and window.cold_waiting_tokens > 0)
        spare = window.hot_unread - self.wanted_tokens(window)
        if spare > 0 and self._is_short:
            return self._give(window, spare)
        self._least_spare = 0
        room = min(window.cold_idle, window.size_tokens - 1 - window.hot_tokens)
        growth = min(-spare, room)
        return window.hot_tokens + growth if growth > 0 else None

    def cold_value(self, window: Window) -> float:
        """Token reads a step that one more COLD token is worth."""
        if not self._is_short:
            return 0.0
        shared = sum(length for length, _ in (*window.rows_per_slab, *window.rows_per_cold_run))
        return (self.fixed_reads + shared) / max(1, window.private_tokens)

    def wanted_tokens(self, window: Window) -> int:
        """Tokens that should be HOT and are not; call it once a window."""
        runs = [n for n, _ in window.rows_per_cold_run if n >= self.shortest_tokens]
        # Where nothing is admitted, nothing can miss: what has missed is wanted while it is read.
        self._has_missed = bool(window.hot_miss_tokens) or (self._has_missed and bool(runs))
        if not self._has_missed:
            return 0
        misses = sum(window.hot_misses.values())
        if not misses or self.cold_value(window) >= 1.0:
            return sum(runs)
        return max(sum(runs), window.hot_miss_tokens // misses)

    def _give(self, window: Window, spare: int) -> int | None:
        """What was spare long enough, if it was."""
        if not self._least_spare:
            self._spare_since_s, self._least_spare = window.now_s, spare
        self._least_spare = min(self._least_spare, spare)
        if window.now_s - self._spare_since_s < self.return_s:
            return None
        given, self._least_spare = self._least_spare, 0
        return window.hot_tokens - given
