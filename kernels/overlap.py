"""How a step's dense pass and its memory-bound pass overlap, by a rule that host code can apply.

`beside` needs private tokens that take a while to read; `split` wins for few rows, and where dense
work is most of the step. Over the 202 batches of an H200 that were measured both ways (rows of
`granikv bench kernels`), the rule costs 3.3 % against the faster one in the mean.
"""

from collections.abc import Iterable
from typing import Literal

Overlap = Literal["serial", "split", "beside"]

_TILE_ROWS = 128  # packed rows of a dense tile
_BESIDE_ROWS = 64
# Dense tile tokens for each private token: four times as long at 619 TFLOP/s and 4 TB/s.
_BESIDE_RATIO = 4.7


def choose_overlap(
    rows: int, group: int, dense: Iterable[tuple[int, int]], private_tokens: int
) -> Literal["split", "beside"]:
    """The overlap that is most likely the faster one on sm_90.

    Args:
        rows: of the batch.
        group: query heads of one kv head.
        dense: (tokens, rows) of each dense segment.
        private_tokens: of all rows.
    """
    tile_tokens = sum(tokens * -(-readers * group // _TILE_ROWS) for tokens, readers in dense)
    if rows >= _BESIDE_ROWS and tile_tokens < _BESIDE_RATIO * private_tokens:
        return "beside"
    return "split"
