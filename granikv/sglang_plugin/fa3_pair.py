"""FlashAttention-3's pair of kernels in our server: a comparison that shows what ours are worth.

One segment that all rows read, by FA3's variable-length kernel, the rest of each row by its paged
kernel, then SGLang's merge. Both follow device tables, so that a graph holds for any step.
"""

from typing import Any

import torch

from granikv.kernels import baselines, fa3
from granikv.kernels.shapes import Heads
from granikv.kernels.tables import DecodeTables

_TILE_ROWS = 128  # of FA3's tiles at head_dim 128, rows of a group packed


class Fa3Pair:
    """The pair, for batches of up to `max_rows` rows.

    Args:
        max_rows: rows of the largest batch, padding included.
        heads: of this rank.
        max_prefix_tokens: longest segment.
        max_private_tokens: most that a row of a planned step has.
        device: where everything lives.

    Raises:
        NotImplementedError: FlashAttention-3 is not installed.
    """

    def __init__(
        self, max_rows: int, heads: Heads, max_prefix_tokens: int, max_private_tokens: int,
        device: Any,
    ) -> None:  # fmt: skip
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        fa3.load()
        self._heads = heads
        self._max_prefix_tokens = max_prefix_tokens
        self._q_starts, self._k_starts, self._k_used = ints(2), ints(2), ints(1)
        self._row_starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._pages = ints(max_rows, max_private_tokens)
        self._columns = torch.arange(max_private_tokens, device=device)
        self._schedule: Any = None
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count

    def plan(self, tables: DecodeTables) -> None:
        """Prepare a step: the segment of row 0, and a page table of the rest; may be captured."""
        rows = tables.rows
        self._q_starts[1:].fill_(rows)
        self._k_starts[:1].copy_(tables.segment_base[0, :1])
        self._k_used.copy_(tables.segment_length[0, :1])
        at = tables.private_start[:, None] + self._columns[None, :]
        at.clamp_(max=tables.width - 1)
        slots = tables.private_slots[tables.private_row.long()[:, None], at]
        self._pages[:rows].copy_(slots)
        self._schedule = baselines.fa3_decode_schedule(
            self._heads, tables.private_length, self._row_starts[: rows + 1], len(self._columns), 1
        )

    def run(self, q: Any, k: Any, v: Any, tables: DecodeTables) -> Any:
        """Attention of one layer; shapes as `SharedPrefixDecode.run`."""
        rows, heads = tables.rows, self._heads
        tiles = heads.kv * -(-rows * (heads.q // heads.kv) // _TILE_ROWS)
        shared, shared_lse, *_ = fa3.load().flash_attn_varlen_func(
            q,
            k,
            v,
            self._q_starts,
            self._k_starts,
            max_seqlen_q=rows,
            max_seqlen_k=self._max_prefix_tokens,
            seqused_k=self._k_used,
            softmax_scale=heads.dim**-0.5,
            num_splits=min(32, max(1, self._sms // tiles)),
            return_softmax_lse=True,
        )
        own, own_lse = baselines.fa3_decode(
            q, k[:, None], v[:, None], self._pages[:rows], tables.private_length,
            self._row_starts[: rows + 1], self._schedule, return_lse=True,
        )  # fmt: skip
        return baselines.prefix_suffix_merge((shared, shared_lse), (own, own_lse))
