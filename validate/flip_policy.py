"""FlipPolicy: moves the boundary at every look, to check that no answer depends on where it is.

It serves nobody: `granikv.validate.agreement` and the tests give its path to a server.
"""

from granikv.core.repartition import Window

SMALL, LARGE = 0.3, 0.6  # shares of all tokens


class FlipPolicy:
    """HOT is made large, small, large, ..."""

    def observe(self, window: Window) -> int:
        """HOT tokens to move to."""
        is_large = 2 * window.hot_tokens > window.size_tokens
        return int(window.size_tokens * (SMALL if is_large else LARGE))
