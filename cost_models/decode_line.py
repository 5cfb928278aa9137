"""DecodeLine: the time of a decode step as a function of its private tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from granikv.cost_models.piecewise import Pieces, piece_at

_LIST_STEPS = 12  # below this many steps numpy's fixed cost per call exceeds the loop's


@dataclass(frozen=True, slots=True)
class DecodeLine:
    """Time of a decode step in its private tokens P: `floor(fixed + a + b * P)` ns.

    Attributes:
        host_ns: host time that the GPU does not hide.
        gemm_ns: matrix products and the element-wise kernels between them.
        collective_ns: collectives; under a row split only the last one, which nothing hides.
        attention: `(start_tokens, a_ns, b_ns_per_token)` pieces, of which the last one that starts
            at or below P holds; under a row split they also hold the collectives that compute
            hides.
    """

    host_ns: float
    gemm_ns: float
    collective_ns: float
    attention: Pieces

    def ns(self, private_tokens: int) -> int:
        """Time of one step with that many private tokens over all rows."""
        _, a, b = self.attention[piece_at(self.attention, private_tokens)]
        fixed = self.host_ns + self.gemm_ns + self.collective_ns
        return math.floor(fixed + (a + b * private_tokens))

    def cumulative(self, private_tokens: int, rows: int, k: int) -> NDArray[np.int64]:
        """Time at the end of each of `k` steps; each adds one private token to each of `rows` rows.

        Equal to the running sum of `ns(private_tokens + rows * i)`: same operations, same order.
        """
        tokens = np.arange(k, dtype=np.float64) * rows + private_tokens
        first = piece_at(self.attention, private_tokens)
        last = piece_at(self.attention, private_tokens + rows * (k - 1))
        a: float | NDArray[np.float64]
        b: float | NDArray[np.float64]
        _, a, b = self.attention[first]
        if last > first:
            starts, all_a, all_b = np.array(self.attention[first : last + 1]).T
            index = np.maximum(np.searchsorted(starts, tokens, "right") - 1, 0)
            a, b = all_a[index], all_b[index]
        fixed = self.host_ns + self.gemm_ns + self.collective_ns
        return np.cumsum(np.floor(fixed + (a + b * tokens)).astype(np.int64))

    def ends_ns(self, private_tokens: int, rows: int, k: int) -> Sequence[int]:
        """`cumulative` in the quickest form: a list for a few steps, an array for many."""
        if k > _LIST_STEPS:
            return self.cumulative(private_tokens, rows, k)  # type: ignore[return-value]
        end = private_tokens + rows * k
        first = piece_at(self.attention, private_tokens)
        if first != piece_at(self.attention, end - rows):
            return list(accumulate(map(self.ns, range(private_tokens, end, rows))))
        _, a, b = self.attention[first]
        fixed = self.host_ns + self.gemm_ns + self.collective_ns
        floor = math.floor
        steps = [floor(fixed + (a + b * tokens)) for tokens in range(private_tokens, end, rows)]
        return list(accumulate(steps))
