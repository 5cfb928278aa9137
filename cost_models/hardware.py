"""Hardware: the datasheet numbers of one GPU, each with its source."""

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from granikv.core.errors import ConfigError
from granikv.core.validation import explain
from granikv.cost_models.catalog import data_file

# What a driver calls a GPU whose parameters ship, the most special name first.
_DEVICES = {
    "NVIDIA H200": "h200-sxm",
    "NVIDIA H100": "h100-sxm",
    "A100-SXM4-40GB": "a100-sxm4-40gb",
    "A100": "a100-sxm4-80gb",
}


class Hardware(BaseModel):
    """One GPU as its datasheet describes it; efficiencies live in the parameter file.

    Attributes:
        hbm_mib: memory that the driver reports, in MiB; what the server's memory rule starts from.
        hbm_bytes_per_s: peak HBM bandwidth.
        bf16_flops_per_s: peak dense bf16 tensor rate.
        nvlink_bytes_per_s: peak NVLink bandwidth of one GPU in one direction.
        sources: field name to where the number comes from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    sm_count: PositiveInt
    hbm_mib: PositiveInt
    hbm_bytes_per_s: PositiveFloat
    bf16_flops_per_s: PositiveFloat
    nvlink_bytes_per_s: PositiveFloat
    sources: dict[str, str] = Field(min_length=1)

    @property
    def hbm_bytes(self) -> int:
        """Memory that the driver reports, in bytes."""
        return self.hbm_mib * 2**20


def hardware_name(device: str) -> str:
    """The shipped hardware of a device, by the name that its driver has for it, or by its own.

    Raises:
        ConfigError: none ships.
    """
    for part, name in _DEVICES.items():
        if part in device or device == name:
            return name
    raise ConfigError(
        f"GraniKV has no measured parameters of {device}; it has those of "
        f"{', '.join(_DEVICES.values())}."
    )


def load_hardware(name_or_path: str) -> Hardware:
    """A shipped GPU by name, or a user's YAML file of the same fields.

    Raises:
        ConfigError: unknown name, or the file does not hold exactly these fields.
    """
    path = data_file("hardware", ".yaml", name_or_path)
    try:
        return Hardware.model_validate(yaml.safe_load(path.read_text()))
    except ValidationError as error:
        raise ConfigError(f"{path} is not a hardware file: {explain(error, Hardware)}.") from None
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not a hardware file: {error}") from None
