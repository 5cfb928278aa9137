"""What a user chooses about a live server, read once from `GRANIKV_*` variables.

SGLang's flags have no room for others, and its processes inherit the environment.
"""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from granikv.core.config import PoolConfig
from granikv.core.errors import ConfigError

BACKEND = "granikv"  # what SGLang's flags call our attention and our radix cache
SGLANG_VERSION = "0.5.17"
VARIABLES = "GRANIKV_"  # prefix of the options
OBSERVE = f"{VARIABLES}OBSERVE"


class LiveConfig(PoolConfig):
    """`PoolConfig` and what only a live server has.

    Attributes:
        admission: as there; by default one that reads no clock, so that tensor-parallel ranks
            decide alike.
        row_split: a live step is never run in two.
        kernels: `granikv`, or `fa3` for FlashAttention-3's prefix pass and paged pass with a merge
            in their place, to see what the kernels alone are worth.
        deterministic: tiles of a fixed size, so that a row's bits do not depend on the batch, on
            promotions or on moves; slower.
        gpu: name or YAML file of the hardware whose parameters the dispatcher uses; found from the
            device by default.
        dispatch_table: file of `granikv dispatch-table` to use instead.
        record: folder for run records.
        observe: folder for run records of a server with SGLang's own backends.
        check_steps: of so many decode steps one is computed twice and compared, 0 for none.
        check_against: what it is compared with: our paged mode, or FlashAttention-3.
    """

    admission: str = "shared"
    row_split: Literal["off"] = "off"
    kernels: Literal["granikv", "fa3"] = "granikv"
    deterministic: bool = False
    gpu: str | None = None
    dispatch_table: Path | None = None
    record: Path | None = None
    observe: Path | None = None
    check_steps: int = Field(default=0, ge=0)
    check_against: Literal["paged", "fa3"] = "paged"

    @classmethod
    def from_environment(cls) -> "LiveConfig":
        """The configuration of this process.

        Raises:
            ConfigError: a `GRANIKV_*` variable is no option, or its value cannot be used.
        """
        return cls.from_variables(os.environ, VARIABLES)

    @classmethod
    def of_backend(cls) -> "LiveConfig":
        """The configuration of a process that one of our backends is built in.

        Raises:
            ConfigError: as above, or the server was to be recorded as one without them.
        """
        settings = cls.from_environment()
        if settings.observe is not None:
            raise ConfigError(
                f"{OBSERVE} records a server with SGLang's own backends, but this one has "
                f"backend {BACKEND}; leave {OBSERVE} out and use `granikv serve --record` or "
                f"{VARIABLES}RECORD"
            )
        return settings

    @staticmethod
    def is_observing() -> bool:
        """Whether a server with SGLang's own backends is to be recorded, rightly or not."""
        return OBSERVE in os.environ

    def to_variables(self) -> dict[str, str]:
        """The variables that give this configuration again, without those at their default."""
        chosen = self.model_dump(mode="json", exclude_defaults=True)
        return {VARIABLES + name.upper(): str(value) for name, value in chosen.items()}
