"""The contract between batch, dispatcher, cost model and kernels: what a step looks like and how a
decode step runs.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Mode(IntEnum):
    """How one shared segment is read in a decode step; device tables hold the value."""

    PAGED = 0
    CASCADE = 1
    DENSE = 2


class Launch(IntEnum):
    """How the passes are launched; the only choice that may be a CUDA graph variant."""

    FUSED = 0
    TWO_CALL = 1


class Segment(NamedTuple):
    """KV that `rows` running requests read in common.

    `base` is the first slot of a contiguous HOT run, or 0 when the tokens lie in scattered COLD
    slots (slot 0 is the engine's padding slot, so no slab can start there).
    """

    base: int
    length: int
    rows: int


@dataclass(frozen=True, slots=True)
class StepShape:
    """One decode step of a batch, for one tensor-parallel rank.

    `private_tokens` counts every KV token that is in no segment, summed over rows and including the
    token being decoded; `max_private_tokens` is the longest row's share. `padded_rows` is the CUDA
    graph's batch size. Head counts are per rank.
    """

    rows: int
    padded_rows: int
    private_tokens: int
    max_private_tokens: int
    segments: tuple[Segment, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.num_q_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How to run one step: a mode per segment (same order as `StepShape.segments`), a launch, a row
    split.

    `row_split` is empty for one step, or the row counts of a saturated burst and its follow-on
    step.
    """

    modes: tuple[Mode, ...]
    launch: Launch = Launch.TWO_CALL
    row_split: tuple[int, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Plain form for run records."""
        return {
            "modes": [int(mode) for mode in self.modes],
            "launch": self.launch.name.lower(),
            "row_split": list(self.row_split),
        }


@dataclass(frozen=True, slots=True)
class ExtendShape:
    """One extend step: `(new_tokens, prefix_tokens)` of each request, in the order of the batch.

    New tokens are computed in this step; of the prefix, K and V are there already, from the cache
    or from an earlier chunk.
    """

    requests: tuple[tuple[int, int], ...]

    @property
    def new_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(new for new, _ in self.requests)

    def to_json(self) -> dict[str, object]:
        """Plain form for run records."""
        return {"extend": [list(request) for request in self.requests]}
