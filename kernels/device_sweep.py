"""The device side of the sweep: a card that checks its calls, behind one object without torch."""

from granikv.kernels.card import Card
from granikv.kernels.sweep_check import run_checks


class DeviceSweep(Card):
    """Measures points on the current CUDA device."""

    def check(self, attention: bool) -> list[str]:
        """Compare the calls with float64; one line a check.

        Raises:
            RuntimeError: a result is off by more than rounding.
        """
        return run_checks(self._pool, attention)
