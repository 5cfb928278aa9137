"""FusedWork: compute and memory time of one fused launch, and how they add up."""

from typing import NamedTuple

from granikv.cost_models.piecewise import Pieces, overlapped, piece_at


class FusedWork(NamedTuple):
    """All layers' work of a fused launch in its private tokens P, in ns, without launch latency.

    Attributes:
        compute: `(a, b)` of the compute time `a + b * P`.
        memory: pieces of the memory time.
        one_by_one_ns: what the passes one after the other would take beyond the memory time.
    """

    compute: tuple[float, float]
    memory: Pieces
    one_by_one_ns: float

    def pieces(self, exposed_share: float, latency_ns: float) -> Pieces:
        """Time of the launch: the greater part and a share of the smaller one, which it does not
        hide, but at most what the passes one after the other take.
        """
        return overlapped(self.memory, self.compute, exposed_share, self.one_by_one_ns, latency_ns)

    def parts_ns(self, private_tokens: int) -> tuple[float, float, float]:
        """The greater and the smaller of compute and memory time, and the passes one by one."""
        a, b = self.compute
        compute = a + b * private_tokens
        _, a, b = self.memory[piece_at(self.memory, private_tokens)]
        memory = a + b * private_tokens
        return max(compute, memory), min(compute, memory), memory + self.one_by_one_ns
