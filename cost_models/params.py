"""The parameter file of one GPU: every number of the cost model with its origin and its error."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from granikv.core.errors import ConfigError
from granikv.core.validation import explain
from granikv.cost_models.catalog import data_file
from granikv.cost_models.surface import Surface

Provenance = Literal["datasheet", "stated", "fitted", "paper"]
Unit = Literal["fraction", "share", "ns", "bytes/s", "rows"]
Efficiency = Annotated[float, Field(gt=0, le=1)]
Interval = tuple[float, float]

AXES = {
    "gemm": ("m", "n", "k"),
    "paged": ("tiles", "tokens", "group", "head_dim"),
    "extend": ("queries", "keys", "group", "head_dim"),
    "all_reduce": ("bytes", "gpus"),
    "dense": ("tile_rows", "tokens", "kv_heads"),
    "shared_page_cost": ("in_flight", "waves", "tokens"),
}


class HeldOutError(BaseModel):
    """Absolute relative error on whole shapes that the fit had not seen.

    Attributes:
        median, p90: over all rows.
        median_interval, p90_interval: 5 % and 95 % of resampling whole shapes.
        shapes: how many, and of what kind.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    median: float = Field(ge=0)
    p90: float = Field(ge=0)
    median_interval: Interval
    p90_interval: Interval
    shapes: str


class Evidence(BaseModel):
    """Where a value comes from and how far it may be off.

    Attributes:
        source: rows and method, or the figure, that the value was taken from.
        rows_used: measured rows behind the value; 0 when it is an assumption.
        rel_error: one sigma of the relative error of the time that it gives; widens predictions.
        residual: median absolute relative error on the rows used, when it was fitted.
        held_out: the same on shapes that were not used.
        valid_range: axis to lowest and highest value that the rows cover.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    provenance: Provenance
    source: str = Field(min_length=1)
    rows_used: int = Field(ge=0)
    rel_error: float = Field(ge=0)
    residual: float | None = None
    held_out: HeldOutError | None = None
    valid_range: dict[str, Interval] = {}


class Parameter(Evidence):
    """One number.

    A unit of `fraction` is a part of a datasheet peak, above 0 and at most 1; a `share` is a part
    of some time, from 0 to 1.
    """

    value: float = Field(ge=0)
    unit: Unit

    @model_validator(mode="after")
    def _value_fits_unit(self) -> "Parameter":
        if self.unit == "fraction" and not 0 < self.value <= 1:
            raise ValueError(f"a fraction must be in (0, 1], got {self.value}")
        if self.unit == "share" and self.value > 1:
            raise ValueError(f"a share must be in [0, 1], got {self.value}")
        if self.unit in ("bytes/s", "rows") and self.value <= 0:
            raise ValueError(f"a value in {self.unit} must be positive, got {self.value}")
        return self

    @property
    def summary(self) -> str:
        """The value in words."""
        return f"{self.value:.4g} {self.unit}"

    def draw(self, rng: np.random.Generator) -> "Parameter":
        """The same with its value times a log-normal draw; a fraction or share stays at most 1."""
        value = self.value * math.exp(self.rel_error * float(rng.standard_normal()))
        if self.unit in ("fraction", "share"):
            value = min(value, 1.0)
        return self.model_copy(update={"value": value})


class FittedSurface(Evidence):
    """An efficiency as a function of shape: the share of the ideal time's rate that is reached.

    Attributes:
        latency_ns: fixed part of the ideal time.
        axes: axis to its knots in natural units, ascending; one knot means no dependence.
        efficiency: values at the knots, the last axis running fastest.
    """

    unit: Literal["fraction"] = "fraction"
    latency_ns: float = Field(ge=0)
    axes: dict[str, tuple[float, ...]]
    efficiency: tuple[Efficiency, ...]

    @model_validator(mode="after")
    def _grid_is_complete(self) -> "FittedSurface":
        for name, knots in self.axes.items():
            if not knots or min(knots) <= 0 or any(np.diff(knots) <= 0):
                raise ValueError(f"axis {name} must have ascending positive knots, got {knots}")
        wanted = math.prod(len(knots) for knots in self.axes.values())
        if len(self.efficiency) != wanted:
            raise ValueError(f"efficiency must have {wanted} values, got {len(self.efficiency)}")
        return self

    def surface(self) -> Surface:
        """The form that predicts."""
        knots = tuple(np.log2(np.asarray(knots, np.float64)) for knots in self.axes.values())
        shape = tuple(len(knots) for knots in self.axes.values())
        return Surface(knots, np.log(np.asarray(self.efficiency, np.float64)).reshape(shape))

    @property
    def summary(self) -> str:
        """The value in words."""
        if len(self.efficiency) == 1:
            return f"{self.efficiency[0]:.4g} of the ideal rate"
        low, high = min(self.efficiency), max(self.efficiency)
        return f"{low:.2g} to {high:.2g} of the ideal rate over {', '.join(self.axes)}"

    def draw(self, rng: np.random.Generator) -> "FittedSurface":
        """The same surface with all efficiencies times one log-normal draw, at most 1 each."""
        factor = math.exp(self.rel_error * float(rng.standard_normal()))
        drawn = tuple(min(1.0, value * factor) for value in self.efficiency)
        return self.model_copy(update={"efficiency": drawn})


class Terms(BaseModel):
    """All parameters of the cost model; docs/cost_models.md says what each one means."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gemm: FittedSurface
    paged: FittedSurface
    extend: FittedSurface
    all_reduce: FittedSurface
    dense: FittedSurface
    shared_page_cost: FittedSurface
    elementwise_memory_efficiency: Parameter
    elementwise_latency_ns: Parameter
    dense_step_efficiency: Parameter
    private_compute_efficiency: Parameter
    private_memory_efficiency: Parameter
    private_latency_ns: Parameter
    private_row_ns: Parameter
    private_reread_share: Parameter
    contiguous_memory_efficiency: Parameter
    gather_memory_efficiency: Parameter
    reread_bytes_per_s: Parameter
    cascade_compute_efficiency: Parameter
    cascade_latency_ns: Parameter
    fused_latency_ns: Parameter
    fused_exposed_share: Parameter
    merge_memory_efficiency: Parameter
    merge_latency_ns: Parameter
    host_decode_ns: Parameter
    stock_row_ns: Parameter
    host_extend_ns: Parameter
    host_extend_layer_ns: Parameter
    host_extend_graph_ns: Parameter
    extend_step_efficiency: Parameter
    copy_memory_efficiency: Parameter
    copy_latency_ns: Parameter
    m_sat: Parameter | None = None

    @model_validator(mode="after")
    def _items_match_names(self) -> "Terms":
        for name, item in self.items():
            if isinstance(item, FittedSurface):
                if tuple(item.axes) != AXES[name]:
                    raise ValueError(f"{name} must have axes {AXES[name]}, got {tuple(item.axes)}")
            elif item.unit != _unit_of(name):
                raise ValueError(f"{name} must have unit {_unit_of(name)}, got {item.unit}")
        return self

    def items(self) -> Iterator[tuple[str, Parameter | FittedSurface]]:
        """Every term that is present, by name, in a fixed order."""
        for name in type(self).model_fields:
            item = getattr(self, name)
            if item is not None:
                yield name, item


class GpuParams(BaseModel):
    """The parameter file of one GPU.

    Attributes:
        gpu: name of the hardware file that the fractions refer to.
        derived_from: GPU whose measured rows the values rest on when they are not this GPU's own.
        note: what a reader must know before trusting the file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["granikv-params-2"] = "granikv-params-2"
    gpu: str
    derived_from: str | None = None
    note: str
    terms: Terms

    def draw(self, rng: np.random.Generator) -> "GpuParams":
        """A parameter set from the error distribution: each term drawn on its own.

        The same generator state gives the same set; the file itself is not changed.
        """
        drawn = {name: item.draw(rng) for name, item in self.terms.items()}
        return self.model_copy(update={"terms": self.terms.model_copy(update=drawn)})

    def save(self, path: Path) -> None:
        """Write the file that `load_params` reads back without loss."""
        path.write_text(self.model_dump_json(exclude_none=True) + "\n")


def load_params(name_or_path: str) -> GpuParams:
    """The shipped parameters of a GPU, or a user's own file.

    Raises:
        ConfigError: unknown name, or not a complete parameter file.
    """
    path = data_file("params", ".json", name_or_path)
    try:
        return GpuParams.model_validate_json(path.read_text())
    except ValidationError as error:
        raise ConfigError(f"{path} is not a parameter file: {explain(error, GpuParams)}.") from None
    except OSError as error:
        raise ConfigError(f"{path} is not a parameter file: {error}") from None


def _unit_of(name: str) -> Unit:
    if name == "m_sat":
        return "rows"
    if name.endswith("_efficiency"):
        return "fraction"
    if name.endswith("_share"):
        return "share"
    return "bytes/s" if name.endswith("_bytes_per_s") else "ns"
