"""watermark: HOT grows while prefixes miss it, and shrinks while COLD alone is short."""

from dataclasses import dataclass, field

from granikv.core.repartition import Hold, Window


@dataclass(slots=True)
class WatermarkPolicy:
    """Two marks with a dead band between them, and a wait after every move.

    HOT grows by a step, or by what COLD has idle, when enough tokens missed it lately.
    COLD may be short then: what it holds of the missed prefixes comes back once they are HOT. But
    while more than a step of HOT is read by no two rows, admission has room to make, not COLD.
    HOT shrinks by at most a step, of tokens that no two running rows read in common, when COLD is
    short and less than that missed HOT. Neither condition can hold beside the other.

    The defaults are choices, not fits: `docs/policies.md` has what they give.

    Attributes:
        step: size of a move, as a share of all tokens: a boundary of 0.2 is gone in four.
        miss_share: tokens of missed slabs in a window, as a share of all tokens, from which HOT
            grows. A prefix is counted once for every request that missed it. Misses of the past
            count half for every window since: where nothing is admitted, nothing can miss.
        idle_share: share of all tokens that stays idle in COLD when HOT grows.
        hold: windows between two moves; a reversal doubles the wait.
        longest_hold: longest wait, in windows.
    """

    step: float = 0.05
    miss_share: float = 0.01
    idle_share: float = 0.01
    hold: int = 1
    longest_hold: int = 16
    _hold: Hold = field(init=False)
    _missed_tokens: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        """Check the options."""
        if not 0 < self.step < 1:
            raise ValueError(f"step must be between 0 and 1, got {self.step!r}")
        self._hold = Hold(self.hold, self.longest_hold)

    def observe(self, window: Window) -> int | None:
        """One step up, one step down, or stay."""
        self._missed_tokens = max(float(window.hot_miss_tokens), self._missed_tokens / 2)
        if not self._hold.is_over():
            return None
        step = max(1, int(self.step * window.size_tokens))
        change = self._growth(window, step) if self._misses(window) else -self._gift(window, step)
        if not change:
            return None
        self._hold.begin(grows=change > 0)
        return window.hot_tokens + change

    def _misses(self, window: Window) -> bool:
        return self._missed_tokens >= max(1.0, self.miss_share * window.size_tokens)

    def _growth(self, window: Window, step: int) -> int:
        if window.hot_unread > step:
            return 0
        room = int(window.cold_idle - self.idle_share * window.size_tokens)
        return max(0, min(step, room))

    def _gift(self, window: Window, step: int) -> int:
        return min(step, window.hot_unread) if window.cold_is_short else 0
