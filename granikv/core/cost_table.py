"""CostTable: predicted time of the parts of a decode step on a frozen grid, so that core needs no
cost model.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from granikv.core.errors import ConfigError

FloatArray = NDArray[np.float64]

_FORMAT = "granikv-cost-table-2"


@dataclass(frozen=True, slots=True, eq=False)
class CostTable:
    """Times in ns for one GPU, model and tensor-parallel degree.

    Attention times are for one layer, `gemm_ns` and `collective_ns` for the whole step (all
    layers). The first axis of `compute_ns` and `memory_ns` is `Mode`. A pass alone takes
    `max(compute, memory)`; in a fused launch the sums over all segments and the private part
    overlap but for an exposed share of the smaller one, so a step's attention takes
    `max(sum compute, sum memory) + share * min(sum compute, sum memory)`, at most what the passes
    one after the other take, and segments are not separable.

    Attributes:
        rows: int64 `[R]`, ascending row counts of the grid.
        lengths: int64 `[L]`, ascending segment lengths in tokens.
        compute_ns: `[3, L, R]`, tensor-core time of a segment pass.
        memory_ns: `[3, L, R]`, HBM or L2 time of a segment pass.
        pass_latency_ns: `[3]`, fixed time of one two-call pass in that mode.
        private_compute_ns_per_token: tensor-core time of one private token.
        private_memory_ns_per_token: `[R]`, HBM time of one private token when that many rows run.
        private_latency_ns: fixed time of the private pass.
        fused_latency_ns: fixed time of one fused launch; None when no fused kernel is modelled.
        fused_exposed_share: share of the smaller sum that a fused launch does not hide, 0 to 1.
        merge_ns: `[R]`, merging two partial results of that many rows.
        gemm_ns: `[R]`, all matrix products of a step.
        collective_ns: `[R]`, all collectives of a step (zero for one GPU).
        num_layers: layers that run attention.
        group: query heads per kv head.
        m_sat: effective rows (`rows * group`) from which the dense pass saturates the tensor cores.
        meta: where the numbers come from: gpu, model, tp, parameter file and its provenance.
    """

    rows: NDArray[np.int64]
    lengths: NDArray[np.int64]
    compute_ns: FloatArray
    memory_ns: FloatArray
    pass_latency_ns: FloatArray
    private_compute_ns_per_token: float
    private_memory_ns_per_token: FloatArray
    private_latency_ns: float
    fused_latency_ns: float | None
    fused_exposed_share: float
    merge_ns: FloatArray
    gemm_ns: FloatArray
    collective_ns: FloatArray
    num_layers: int
    group: int
    m_sat: int
    meta: dict[str, Any]

    def __post_init__(self) -> None:
        """Check shapes and freeze the arrays.

        Raises:
            ValueError: a grid is not ascending or an array does not match it.
        """
        grid = (len(self.lengths), len(self.rows))
        for name in ("rows", "lengths"):
            axis = getattr(self, name)
            if len(axis) < 2 or not bool(np.all(np.diff(axis) > 0)) or int(axis[0]) < 1:
                raise ValueError(
                    f"{name} must be at least two ascending positive integers, got {axis!r}"
                )
        for name, shape in (
            ("compute_ns", (3, *grid)),
            ("memory_ns", (3, *grid)),
            ("pass_latency_ns", (3,)),
            ("private_memory_ns_per_token", (grid[1],)),
            ("merge_ns", (grid[1],)),
            ("gemm_ns", (grid[1],)),
            ("collective_ns", (grid[1],)),
        ):
            array = getattr(self, name)
            if not isinstance(array, np.ndarray):
                raise ValueError(f"{name} must be an array, got {array!r}")
            if array.shape != shape:
                raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
            if not bool(np.all(np.isfinite(array))) or float(array.min()) < 0:
                raise ValueError(f"{name} must be finite and not negative")
            array.setflags(write=False)
        for name in ("num_layers", "group", "m_sat"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        for name in ("private_compute_ns_per_token", "private_latency_ns"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"{name} must be a number and not negative, got {value!r}")
        share = self.fused_exposed_share
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError(f"fused_exposed_share must be a number from 0 to 1, got {share!r}")

    def overlapped_ns(self, compute_ns: float, memory_ns: float) -> float:
        """Time of both sums in one fused launch, without its latency and before that limit."""
        if compute_ns > memory_ns:
            return compute_ns + self.fused_exposed_share * memory_ns
        return memory_ns + self.fused_exposed_share * compute_ns

    def save(self, path: Path) -> None:
        """Write the table as JSON; `load` gives it back bit for bit."""
        body = {"format": _FORMAT} | {
            field.name: value.tolist() if isinstance(value, np.ndarray) else value
            for field in fields(self)
            for value in (getattr(self, field.name),)
        }
        path.write_text(json.dumps(body, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "CostTable":
        """Read a table written by `save`.

        Raises:
            ConfigError: the file is missing or is not a cost table.
        """
        try:
            body = json.loads(path.read_text())
            if not isinstance(body, dict) or body.pop("format", None) != _FORMAT:
                raise ValueError(f"format must be {_FORMAT}")
            integers = {"rows", "lengths"}
            arguments: dict[str, Any] = {
                key: np.asarray(value, np.int64 if key in integers else np.float64)
                if isinstance(value, list)
                else value
                for key, value in body.items()
            }
            return cls(**arguments)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is not a dispatch table ({error}); give one that `CostTable.save` wrote."
            ) from None
