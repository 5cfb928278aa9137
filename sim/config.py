"""What a simulated server is: its pools, its scheduler's settings, which system it stands for."""

from typing import Literal, Self

from pydantic import Field, model_validator

from granikv.core.config import PoolConfig
from granikv.core.dispatch import DispatchChoice

System = Literal["sglang", "cascade", "granikv"]
SchedulePolicy = Literal["fcfs", "lpm"]

# SGLang 0.5.17, environ.py: SGLANG_INIT_NEW_TOKEN_RATIO, _MIN_NEW_TOKEN_RATIO_FACTOR,
# _RATIO_DECAY_STEPS and SGLANG_RETRACT_DECODE_STEPS.
INIT_NEW_TOKEN_RATIO = 0.7
MIN_NEW_TOKEN_RATIO_FACTOR = 0.14
NEW_TOKEN_RATIO_DECAY_STEPS = 600
RETRACT_DECODE_STEPS = 20


class ServerConfig(PoolConfig):
    """One replica's settings; defaults are SGLang 0.5.17's.

    `size_tokens` is the KV capacity in tokens (SGLang's `max_total_num_tokens`); the HOT pool takes
    `floor(hot_fraction * size_tokens)` of it and exists only in the system `granikv`.
    """

    system: System = "granikv"
    size_tokens: int = Field(gt=1)
    chunked_prefill_size: int = Field(default=8192, gt=0)
    max_prefill_tokens: int = Field(default=16384, gt=0)
    max_running_requests: int = Field(default=2048, gt=0)
    graph_batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 12, *range(16, 257, 8))
    schedule_policy: SchedulePolicy = "fcfs"
    schedule_conservativeness: float = Field(default=1.0, ge=0.0)
    overlap_schedule: bool = True
    exact: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if list(self.graph_batch_sizes) != sorted(set(self.graph_batch_sizes)):
            raise ValueError("graph_batch_sizes must ascend")
        return self

    @property
    def hot_tokens(self) -> int:
        """HOT pool size in tokens."""
        return self.hot_tokens_of(self.size_tokens) if self.system == "granikv" else 0

    @property
    def is_stock(self) -> bool:
        """Whether decode attention is the stock engine's."""
        return self.system != "granikv"

    @property
    def dispatch_choice(self) -> DispatchChoice:
        """What the dispatcher is told: comparison systems have their own fixed answer."""
        fixed: dict[System, DispatchChoice] = {"sglang": "paged", "cascade": "cascade_global"}
        return fixed.get(self.system, self.dispatch)

    def padded_rows(self, rows: int) -> int:
        """The CUDA graph's batch size for `rows`; beyond the largest graph a step runs eagerly,
        unpadded.
        """
        sizes = self.graph_batch_sizes
        if not sizes or rows > sizes[-1]:
            return rows
        return next(size for size in sizes if size >= rows)
