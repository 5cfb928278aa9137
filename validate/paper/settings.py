"""Paper settings: one simulated run each, of one system, model, batch limit and set of prefixes."""

from dataclasses import dataclass, replace
from typing import Literal

from granikv.core.dispatch import DispatchChoice
from granikv.sim.config import System
from granikv.traces.spec import (
    ConstantLength,
    Length,
    PoissonArrivals,
    PrefixLevel,
    TableLength,
    UniformLength,
    WorkloadSpec,
    burst_grid_point,
)

GPU = "a100-sxm4-40gb"
HOT_FRACTION = 0.2  # the paper's default
REQUESTS = 3000
SATURATED_PER_S = 50.0  # several times what any system here serves


@dataclass(frozen=True, slots=True)
class Served:
    """A model at a tensor-parallel degree, by a shipped name."""

    model: str
    tp: int

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.model} TP{self.tp}"


LLAMA = Served("llama-3.1-8b", 1)
QWEN14 = Served("qwen2.5-14b", 2)
QWEN32 = Served("qwen2.5-32b", 4)
CONFIGURATIONS = (LLAMA, QWEN14, QWEN32)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Where a request's own prompt tokens and its answer's length come from.

    Attributes:
        origin: where they come from, for readers of a table.
        light_per_s: requests a second at which stock SGLang runs Llama at about half its capacity,
            behind a prefix of 8K; where latency is compared without a queue.
    """

    name: str
    private: Length
    output: Length
    origin: str
    light_per_s: float


CUT = Lengths(
    "cut",
    TableLength(kind="table", table="sharegpt-llama-3.1-8b", column="prompt"),
    TableLength(kind="table", table="sharegpt-llama-3.1-8b", column="output"),
    "the shipped 300 ShareGPT rows; their source kept prompts from 256 and answers from 512 tokens "
    "only, so a row holds 857 + 653 tokens on average",
    light_per_s=1.0,
)
MEANS = Lengths(
    "means",
    UniformLength(kind="uniform", low=1, high=321),
    UniformLength(kind="uniform", low=1, high=675),
    "161 + 338 tokens on average, ShareGPT's means in Kwon et al. (PagedAttention, SOSP 2023); "
    "uniform around them, which is an assumption",
    light_per_s=2.75,
)

Launches = Literal["auto", "two"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation.

    Attributes:
        prefixes: tokens of each shared prefix; requests take them in turn.
        max_rows: B, the server's limit on running requests.
        lengths: of the requests, or None for a burst of `max_rows` of the paper's grid (256
            private, 128 output tokens).
        dispatch: of the system granikv; "threshold" is the paper's rule.
        launches: "two" never runs both attention passes in one fused launch (none is known of
            the paper's engine); "auto" does where the cost model says that it is faster.
    """

    served: Served
    system: System
    prefixes: tuple[int, ...]
    max_rows: int
    lengths: Lengths | None
    rate_per_s: float = SATURATED_PER_S
    dispatch: DispatchChoice = "threshold"
    launches: Launches = "auto"
    requests: int = REQUESTS

    @property
    def is_saturated(self) -> bool:
        """Whether requests are meant to queue all the time."""
        return self.lengths is not None and self.rate_per_s == SATURATED_PER_S

    def workload(self) -> WorkloadSpec:
        """What arrives."""
        if self.lengths is None:
            return burst_grid_point(self.prefixes[0], self.max_rows)
        level = PrefixLevel(
            count=len(self.prefixes),
            tokens=ConstantLength(tokens=self.prefixes[0])
            if len(self.prefixes) == 1
            else list(self.prefixes),
        )
        return WorkloadSpec(
            requests=self.requests,
            arrivals=PoissonArrivals(kind="poisson", rate_per_s=self.rate_per_s),
            prefixes=[level],
            private_tokens=self.lengths.private,
            output_tokens=self.lengths.output,
        )


def with_granikv(stock: Cell) -> tuple[Cell, Cell]:
    """A cell of another system, and the same of GraniKV."""
    return stock, replace(stock, system="granikv")
