"""The parameter file of one GPU: every number of the cost model with its origin and its error."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from granikv.core.errors import ConfigError
from granikv.core.validation import explain
from granikv.cost_models.catalog import data_file

Provenance = Literal["datasheet", "stated", "fitted", "paper"]
Unit = Literal["fraction", "ns", "bytes/s", "rows"]


class Parameter(BaseModel):
    """One number: its value, where it comes from and how far it may be off.

    Attributes:
        unit: `fraction` is a share of a datasheet peak and at most 1.
        source: rows and statistic, or the figure, that the value was taken from.
        rows_used: measured rows behind the value; 0 when it is an assumption.
        rel_error: one sigma of the value's relative error; widens predictions.
        residual: median absolute relative error on the rows used, when it was fitted.
        held_out_error: the same on rows that were not used.
        valid_range: axis to lowest and highest value that the rows cover.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float = Field(ge=0)
    unit: Unit
    provenance: Provenance
    source: str = Field(min_length=1)
    rows_used: int = Field(ge=0)
    rel_error: float = Field(ge=0)
    residual: float | None = None
    held_out_error: float | None = None
    valid_range: dict[str, tuple[float, float]] = {}

    @model_validator(mode="after")
    def _value_fits_unit(self) -> "Parameter":
        if self.unit == "fraction" and not 0 < self.value <= 1:
            raise ValueError(f"a fraction must be in (0, 1], got {self.value}")
        if self.unit in ("bytes/s", "rows") and self.value <= 0:
            raise ValueError(f"a value in {self.unit} must be positive, got {self.value}")
        return self

    def draw(self, rng: np.random.Generator) -> "Parameter":
        """The same parameter with its value times a log-normal draw; a fraction stays at most 1."""
        value = self.value * math.exp(self.rel_error * float(rng.standard_normal()))
        if self.unit == "fraction":
            value = min(value, 1.0)
        return self.model_copy(update={"value": value})


class Terms(BaseModel):
    """All parameters of the roofline terms; see docs/cost_models.md for what each one means."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gemm_memory_efficiency: Parameter
    gemm_compute_efficiency: Parameter
    gemm_latency_ns: Parameter
    elementwise_memory_efficiency: Parameter
    elementwise_latency_ns: Parameter
    extend_compute_efficiency: Parameter
    extend_latency_ns: Parameter
    private_memory_efficiency: Parameter
    private_compute_efficiency: Parameter
    private_latency_ns: Parameter
    private_tile_ns: Parameter
    paged_shared_bytes_per_s: Parameter
    contiguous_memory_efficiency: Parameter
    reread_bytes_per_s: Parameter
    cascade_compute_efficiency: Parameter
    cascade_latency_ns: Parameter
    dense_compute_efficiency: Parameter
    dense_latency_ns: Parameter
    fused_latency_ns: Parameter
    merge_memory_efficiency: Parameter
    merge_latency_ns: Parameter
    collective_latency_ns_2: Parameter
    collective_latency_ns_4: Parameter
    collective_latency_ns_8: Parameter
    collective_bytes_per_s_2: Parameter
    collective_bytes_per_s_4: Parameter
    collective_bytes_per_s_8: Parameter
    host_decode_ns: Parameter
    host_extend_ns: Parameter
    host_extend_layer_ns: Parameter
    copy_memory_efficiency: Parameter
    copy_latency_ns: Parameter
    m_sat: Parameter | None = None

    @model_validator(mode="after")
    def _units_match_names(self) -> "Terms":
        for name, parameter in self.items():
            expected = _unit_of(name)
            if parameter.unit != expected:
                raise ValueError(f"{name} must have unit {expected}, got {parameter.unit}")
        return self

    def items(self) -> Iterator[tuple[str, Parameter]]:
        """Every parameter that is present, by name, in a fixed order."""
        for name in type(self).model_fields:
            parameter = getattr(self, name)
            if parameter is not None:
                yield name, parameter


class GpuParams(BaseModel):
    """The parameter file of one GPU.

    Attributes:
        gpu: name of the hardware file that the fractions refer to.
        derived_from: GPU whose measured rows the values rest on when they are not this GPU's own.
        note: what a reader must know before trusting the file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["granikv-params-1"] = "granikv-params-1"
    gpu: str
    derived_from: str | None = None
    note: str
    terms: Terms

    def draw(self, rng: np.random.Generator) -> "GpuParams":
        """A parameter set from the error distribution: each term drawn on its own.

        The same generator state gives the same set; the file itself is not changed.
        """
        drawn = {name: parameter.draw(rng) for name, parameter in self.terms.items()}
        return self.model_copy(update={"terms": self.terms.model_copy(update=drawn)})

    def save(self, path: Path) -> None:
        """Write the file that `load_params` reads back without loss."""
        path.write_text(self.model_dump_json(indent=1, exclude_none=True) + "\n")


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
    return "bytes/s" if "_bytes_per_s" in name else "ns"
