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

_FORMAT = "granikv-cost-table-3"


@dataclass(frozen=True, slots=True, eq=False)
class CostTable:
    """Times in ns for one GPU, model and tensor-parallel degree.

    Attention times are for one layer, `gemm_ns` and `collective_ns` for the whole step (all
    layers). The first axis of `prefix_ns` and `private_ns` is `Mode`. A segment takes time of its
    own (cascade, dense) or in the private pass (paged). One after the other both add up; in a fused
    launch they overlap but for an exposed share of the shorter one, so a step's attention takes
    `max(sum prefix, sum private) + share * min(sum prefix, sum private)`, and segments are not
    separable. Dense passes bring their latency along, in whatever launch.

    Attributes:
        rows: int64 `[R]`, ascending row counts of the grid.
        lengths: int64 `[L]`, ascending segment lengths in tokens.
        prefix_ns: `[3, L, R]`, time of a segment's own pass; zero for a paged one.
        private_ns: `[3, L, R]`, time of a segment in the private pass; zero but for a paged one.
        pass_latency_ns: `[3]`, fixed time of one two-call pass in that mode.
        private_ns_per_token: `[R]`, time of one private token when that many rows run.
        private_latency_ns: fixed time of the private pass.
        fused_latency_ns: fixed time of one fused launch; None when no fused kernel is modelled.
        fused_exposed_share: share of the shorter sum that a fused launch does not hide, 0 to 1.
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
    prefix_ns: FloatArray
    private_ns: FloatArray
    pass_latency_ns: FloatArray
    private_ns_per_token: FloatArray
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
            ("prefix_ns", (3, *grid)),
            ("private_ns", (3, *grid)),
            ("pass_latency_ns", (3,)),
            ("private_ns_per_token", (grid[1],)),
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
        latency = self.private_latency_ns
        if not isinstance(latency, int | float) or not latency >= 0:
            raise ValueError(
                f"private_latency_ns must be a number and not negative, got {latency!r}"
            )
        share = self.fused_exposed_share
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError(f"fused_exposed_share must be a number from 0 to 1, got {share!r}")

    def overlapped_ns(self, prefix_ns: float, private_ns: float) -> float:
        """Time of both sums in one fused launch, without its latency."""
        if prefix_ns > private_ns:
            return prefix_ns + self.fused_exposed_share * private_ns
        return private_ns + self.fused_exposed_share * prefix_ns

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
