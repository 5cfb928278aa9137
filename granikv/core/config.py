"""What a user chooses about HOT and COLD, the same for a simulated server and a live one."""

from collections.abc import Mapping
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from granikv.core.admission import make_admission
from granikv.core.dispatch import DispatchChoice, RowSplit
from granikv.core.errors import ConfigError
from granikv.core.validation import explain


class PoolConfig(BaseModel):
    """How the KV slots are split, who gets a slab, and which kernels run.

    Attributes:
        hot_fraction: share of all slots that is HOT.
        admission: name of a HOT admission policy.
        dispatch: how the mode of each shared segment is chosen.
        row_split: whether a tensor-parallel step may run in two.
        repartition: policy that moves the boundary, by name or as `path/to/file.py:Name`.
        policy_interval_s: time between two of its looks.
        move_tokens_per_step: most tokens that a move copies between two steps.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hot_fraction: float = Field(default=0.2, gt=0.0, lt=1.0)
    admission: str = "value"
    dispatch: DispatchChoice = "cost"
    row_split: RowSplit = "auto"
    repartition: str = "static"
    policy_interval_s: float = Field(default=1.0, ge=0.001, allow_inf_nan=False)
    move_tokens_per_step: int = Field(default=4096, gt=0)

    @model_validator(mode="after")
    def _check_admission(self) -> Self:
        try:
            make_admission(self.admission)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    @classmethod
    def from_variables(cls, variables: Mapping[str, str], prefix: str) -> Self:
        """The configuration that environment variables ask for, `<prefix>HOT_FRACTION` and so on.

        Raises:
            ConfigError: a variable of that prefix is no option, or its value cannot be used.
        """
        chosen = {
            name.removeprefix(prefix).lower(): value
            for name, value in variables.items()
            if name.startswith(prefix)
        }
        try:
            return cls.model_validate(chosen)
        except ValidationError as error:
            options = ", ".join(prefix + name.upper() for name in cls.model_fields)
            raise ConfigError(
                f"{prefix}* variables cannot be used: {explain(error, cls)}; options are {options}"
            ) from None

    def hot_tokens_of(self, size_tokens: int) -> int:
        """HOT tokens of a pool."""
        return int(self.hot_fraction * size_tokens)
