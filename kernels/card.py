"""The current CUDA device as a benchmark holds it: pool, timer, versions and clocks."""

from collections.abc import Callable

import torch  # type: ignore[import-not-found,unused-ignore]

from granikv.kernels import baselines
from granikv.kernels.sweep_cases import DevicePool, measure
from granikv.kernels.sweep_points import Point
from granikv.kernels.timing import GraphTimer


class Card:
    """Measures points of the sweep; holds about 33 GiB of the device.

    Args:
        seed: of all values and orders.
        read_clocks: says the clocks of the moment it is called.
    """

    def __init__(self, seed: int, read_clocks: Callable[[], str]) -> None:
        self._clocks = ""
        self._read_clocks = read_clocks
        self._pool = DevicePool(seed)
        self._timer = GraphTimer(self._note_clocks)

    def measure_point(self, point: Point) -> list[float]:
        """Every timed repetition of a point, in us."""
        return measure(self._pool, self._timer, point)

    def clocks_under_load(self) -> str:
        """The clocks while the last call was timed."""
        return self._clocks

    def versions(self) -> dict[str, str]:
        """Versions of everything that decides a time."""
        return baselines.versions()

    def device_name(self) -> str:
        """The card's own name for itself."""
        return str(torch.cuda.get_device_name())

    def _note_clocks(self) -> None:
        self._clocks = self._read_clocks()
