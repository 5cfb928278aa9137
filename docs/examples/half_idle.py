"""HalfIdlePolicy: gives COLD half of what HOT does not use, and HOT what it misses."""

from dataclasses import dataclass

from granikv.core.repartition import Window


@dataclass(slots=True)
class HalfIdlePolicy:
    """Moves at most `step` of all tokens at a look."""

    step: float = 0.05

    def observe(self, window: Window) -> int | None:
        """HOT tokens to move to, None to stay."""
        step = int(self.step * window.size_tokens)
        if window.cold_is_short:
            return window.hot_tokens - min(step, window.hot_free // 2)
        if window.hot_miss_tokens and window.cold_idle >= 2 * step:
            return window.hot_tokens + step
        return None
