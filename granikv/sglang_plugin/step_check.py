"""Debug check: sampled decode steps are computed once more, row by row, and compared."""

import logging
from typing import Any, Literal

import torch

from granikv.kernels import baselines
from granikv.kernels.decode import SharedPrefixDecode
from granikv.kernels.tables import MODE_PAGED, DecodeTables

logger = logging.getLogger(__name__)

Reference = Literal["paged", "fa3"]

# Of a head's largest value. Both results are rounded to bfloat16 (2^-9 each), and both round the
# weights of the second product to it; sums in another order add little.
_TOLERANCE = 2**-6


class StepCheck:
    """Compares a step's attention with another one that shares nothing between rows.

    Args:
        every: how many decode steps there are to one that is compared.
        operator: of its own, since the parts of a step must outlive the check.
        reference: the paged mode of our kernels, or FlashAttention-3 on the rows' own slots.

    Attributes:
        is_due: whether the planned step is compared; it must run eagerly.
        steps: compared so far.
        failures: layers of compared steps that differed too much.
        largest_error: of all, in units of a head's largest value.
    """

    def __init__(
        self, every: int, operator: SharedPrefixDecode, reference: Reference = "paged"
    ) -> None:
        self.steps = 0
        self.failures = 0
        self.largest_error = 0.0
        self.is_due = False
        self._every = every
        self._operator = operator
        self._reference = reference
        self._count = 0

    def begin_step(self) -> None:
        """A decode step has been planned."""
        if self.is_due:
            logger.info(
                "GraniKV check: %d steps compared with %s, %d layers failed, largest error %.2g",
                self.steps, self._reference, self.failures, self.largest_error,
            )  # fmt: skip
        self._count += 1
        self.is_due = self._count % self._every == 0
        self.steps += self.is_due

    def compare(
        self, q: Any, k: Any, v: Any, tables: DecodeTables, out: torch.Tensor, layer: int
    ) -> None:
        """Compare one layer's result `[rows, heads, head_dim]`; waits for the device."""
        again = self._fa3 if self._reference == "fa3" else self._paged
        want = again(q, k, v, tables).float()
        scale = want.abs().amax(-1).clamp_min(1e-6)
        error = float(((out.float() - want).abs().amax(-1) / scale).amax().cpu())
        self.largest_error = max(self.largest_error, error)
        if not error <= _TOLERANCE:
            self.failures += 1
            logger.error(
                "GraniKV check: layer %d of a step with %d rows differs by %.2g of a head's "
                "largest value from %s (allowed %.2g)",
                layer, len(q), error, self._reference, _TOLERANCE,
            )  # fmt: skip

    def _paged(self, q: Any, k: Any, v: Any, tables: DecodeTables) -> Any:
        modes = tables.group_mode.clone()
        tables.group_mode.fill_(MODE_PAGED)
        self._operator.plan(tables, "serial", "none")
        want = self._operator.run(q, k, v, tables)
        tables.group_mode.copy_(modes)
        return want

    def _fa3(self, q: Any, k: Any, v: Any, tables: DecodeTables) -> Any:
        lengths = tables.private_start + tables.private_length
        pages = tables.private_slots[tables.private_row.long(), : int(lengths.max())].contiguous()
        starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        return baselines.fa3_decode(q.contiguous(), k[:, None], v[:, None], pages, lengths, starts)
