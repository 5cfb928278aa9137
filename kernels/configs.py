"""Tile sizes of the decode kernels, for a set of heads and a device."""

from dataclasses import dataclass

from granikv.kernels.shapes import Heads


@dataclass(frozen=True, slots=True)
class Config:
    """Tiles, warps, pipeline stages and blocks for each SM; `head_dim` and `group` are padded.

    `dense_block` is the shortest segment that may run dense.
    """

    head_dim: int
    group: int
    merge_rows: int
    dense_bm: int = 128
    dense_bn: int = 64
    dense_block: int = 128
    dense_warps: int = 8
    dense_stages: int = 3
    cascade_bm: int = 16
    private_bn: int = 32
    private_warps: int = 1
    private_stages: int = 2
    private_per_sm: int = 10
    fused_bn: int = 64
    fused_warps: int = 4
    fused_stages: int = 2
    fused_per_sm: int = 2


def config_for(heads: Heads, capability: tuple[int, int]) -> Config:
    """The measured best tiles on sm_90, the same with less shared memory elsewhere."""
    head_dim = 1 << (heads.dim - 1).bit_length()
    group = heads.q // heads.kv
    # A matrix instruction has 16 rows at least; the merge has none.
    sizes = {
        "head_dim": head_dim,
        "group": max(16, 1 << (group - 1).bit_length()),
        "merge_rows": 1 << (group - 1).bit_length(),
    }
    if head_dim == 256:
        return Config(
            **sizes, dense_bn=32, dense_stages=2, fused_bn=32, fused_warps=8,
            fused_per_sm=1, private_bn=16,
        )  # fmt: skip
    if capability[0] < 9:
        return Config(**sizes, dense_stages=2)
    return Config(**sizes)
