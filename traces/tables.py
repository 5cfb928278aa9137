"""Tables of measured prompt and answer lengths."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from granikv.core.errors import ConfigError

DATA = Path(__file__).parent / "data"

# Source: traces/data/SOURCE.md.
_SHIPPED = {"sharegpt-llama-3.1-8b": "sharegpt-llama-3.1-8b.lengths.csv"}


@dataclass(frozen=True, slots=True, eq=False)
class LengthTable:
    """Measured lengths in tokens, int64 `[rows]` each; row i of both belongs to one request."""

    prompt: NDArray[np.int64]
    output: NDArray[np.int64]


def load_table(name: str) -> LengthTable:
    """A shipped table by name, or a CSV file with num_prefill_tokens and num_decode_tokens.

    Raises:
        ConfigError: there is no such table or file, or it lacks a column or holds a length below 1.
    """
    path = DATA / _SHIPPED[name] if name in _SHIPPED else Path(name)
    try:
        frame = pl.read_csv(path, columns=["num_prefill_tokens", "num_decode_tokens"])
        table = LengthTable(
            frame["num_prefill_tokens"].cast(pl.Int64).to_numpy(),
            frame["num_decode_tokens"].cast(pl.Int64).to_numpy(),
        )
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ConfigError(
            f"{name} is neither a shipped table ({', '.join(_SHIPPED)}) nor a CSV file with "
            f"num_prefill_tokens and num_decode_tokens ({error})."
        ) from None
    if not len(frame) or min(table.prompt.min(), table.output.min()) < 1:
        raise ConfigError(f"{name} has no rows, or a length below 1; remove such rows.")
    return table
