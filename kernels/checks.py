"""What a decode call accepts: each rule raises with the name of the argument that broke it.

Only shapes, dtypes, devices and strides are looked at: contents live on the device, and reading
them back would stall a step and break a captured graph.
"""

from dataclasses import dataclass
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]

from granikv.kernels.shapes import Heads
from granikv.kernels.tables import MAX_SEGMENTS, DecodeTables

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 96, 128, 256)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
STRIDE_ELEMENTS = 8  # 16 bytes: what one vector load and a TMA box need


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What a decode operator was built for; checked when it is made.

    Raises:
        ValueError: a limit is not positive, or query heads are no multiple of kv heads.
        NotImplementedError: no kernel exists for the head dimension, the group or the dtype.
    """

    max_rows: int
    heads: Heads
    max_groups: int
    max_private_tokens: int
    dtype: Any
    device: Any

    def __post_init__(self) -> None:
        sizes = {
            "max_rows": self.max_rows,
            "max_groups": self.max_groups,
            "max_private_tokens": self.max_private_tokens,
            "num_q_heads": self.heads.q,
            "num_kv_heads": self.heads.kv,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be positive, got {size}")
        check_heads(self.heads)
        check_dtype(self.dtype)

    @property
    def group(self) -> int:
        """Query heads of one kv head."""
        return self.heads.q // self.heads.kv


def check_heads(heads: Heads) -> None:
    """Refuse heads that no kernel is built for.

    Raises:
        ValueError: query heads are no multiple of kv heads.
        NotImplementedError: of a head dimension or group.
    """
    if heads.q % heads.kv:
        raise ValueError(f"num_q_heads must be a multiple of {heads.kv}, got {heads.q}")
    if heads.dim not in HEAD_DIMS:
        raise NotImplementedError(f"head_dim must be one of {HEAD_DIMS}, got {heads.dim}")
    if heads.q // heads.kv not in GROUPS:
        raise NotImplementedError(f"group must be one of {GROUPS}, got {heads.q // heads.kv}")


def check_dtype(dtype: Any) -> None:
    """Refuse dtypes that no kernel is built for.

    Raises:
        NotImplementedError: it is neither bfloat16 nor float16.
    """
    if dtype not in DTYPES:
        raise NotImplementedError(f"dtype must be bfloat16 or float16, got {dtype}")


def check_tables(limits: DecodeLimits, tables: DecodeTables) -> None:
    """Check one step's tables.

    Raises:
        ValueError: a table has a wrong shape, dtype or device, is not contiguous, or is larger
            than the operator.
    """
    rows = _rows_of(tables.private_length)
    _at_most("rows of tables", rows, limits.max_rows)
    wanted: dict[str, tuple[int | None, ...]] = {
        "segment_base": (rows, MAX_SEGMENTS),
        "segment_length": (rows, MAX_SEGMENTS),
        "segment_group": (rows, MAX_SEGMENTS),
        "group_mode": (None,),
        "private_slots": (None, None),
        "private_row": (rows,),
        "private_start": (rows,),
        "private_length": (rows,),
    }
    for name, shape in wanted.items():
        table = getattr(tables, name)
        _check_tensor(name, table, shape, torch.int32, limits.device)
        if not table.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {table.stride()}")
    _at_most("groups of tables", tables.groups, limits.max_groups)
    _at_most("width of private_slots", tables.width, limits.max_private_tokens)


def check_call(
    limits: DecodeLimits,
    q: Any,
    k: Any,
    v: Any,
    tables: DecodeTables,
    out: Any = None,
    lse: Any = None,
) -> None:
    """Check one layer's call: `q`, the pools, the tables, and `out` and `lse` where given.

    Raises:
        ValueError: a tensor has a wrong shape, dtype, device or strides, or shares memory among
            its own elements where it is written.
    """
    check_tables(limits, tables)
    heads, rows = limits.heads, tables.rows
    of_query = (rows, heads.q, heads.dim)
    _check_heads_tensor(limits, "q", q, of_query)
    _check_heads_tensor(limits, "k", k, (None, heads.kv, heads.dim))
    _check_heads_tensor(limits, "v", v, (k.shape[0], heads.kv, heads.dim))
    if out is not None:
        _check_heads_tensor(limits, "out", out, of_query)
        if rows > 1 and out.stride(0) < heads.q * heads.dim:
            raise ValueError(f"out must not overlap itself, got strides {out.stride()}")
    if lse is not None:
        _check_tensor("lse", lse, (rows, heads.q), torch.float32, limits.device)
        if any(n > 1 and step < 1 for n, step in zip(lse.shape, lse.stride(), strict=True)):
            raise ValueError(f"lse must not overlap itself, got strides {lse.stride()}")


def _check_heads_tensor(
    limits: DecodeLimits, name: str, tensor: Any, shape: tuple[int | None, ...]
) -> None:
    """`[rows or slots, heads, head_dim]` of the operator's dtype, whole rows, aligned."""
    _check_tensor(name, tensor, shape, limits.dtype, limits.device)
    dim = limits.heads.dim
    if tensor.stride(2) != 1 or (tensor.shape[1] > 1 and tensor.stride(1) != dim):
        raise ValueError(
            f"{name} must be contiguous in its last two dimensions, got strides {tensor.stride()}"
        )
    if tensor.shape[0] > 1 and tensor.stride(0) % STRIDE_ELEMENTS:
        raise ValueError(
            f"{name} must have a row stride that is a multiple of {STRIDE_ELEMENTS} elements, "
            f"got {tensor.stride(0)}"
        )
    if tensor.data_ptr() % (STRIDE_ELEMENTS * tensor.element_size()):
        raise ValueError(f"{name} must start at a multiple of 16 bytes, got {tensor.data_ptr():#x}")


def _check_tensor(
    name: str, tensor: Any, shape: tuple[int | None, ...], dtype: Any, device: Any
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    fits = len(tensor.shape) == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must be of shape [{wanted}], got {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
    if not _same_device(tensor.device, torch.device(device)):
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def _same_device(have: Any, want: Any) -> bool:
    """`cuda` without a number names the current device."""
    if have.type != want.type:
        return False
    if have.type != "cuda":
        return True
    current = torch.cuda.current_device() if want.index is None else want.index
    return bool(have.index == current)


def _rows_of(private_length: Any) -> int:
    if not isinstance(private_length, torch.Tensor) or private_length.dim() != 1:
        raise ValueError(f"private_length must be a tensor of one dimension, got {private_length}")
    return int(private_length.shape[0])


def _at_most(name: str, size: int, limit: int) -> None:
    if not 1 <= size <= limit:
        raise ValueError(f"{name} must be in [1, {limit}], got {size}")
