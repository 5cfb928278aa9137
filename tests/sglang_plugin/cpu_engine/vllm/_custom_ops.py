"""The one function that SGLang takes from vLLM for a device it does not know as its own."""

import torch


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Rotate queries and keys `[tokens, heads * head_size]` in place, halves against each other."""
    assert is_neox
    cos, sin = cos_sin_cache[positions.flatten()].float()[:, None].chunk(2, dim=-1)
    for tensor in (query, key):
        heads = tensor.view(len(tensor), -1, head_size)
        left, right = heads.float().chunk(2, dim=-1)
        heads.copy_(torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1))
