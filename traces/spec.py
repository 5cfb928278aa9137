"""WorkloadSpec: what a user writes to have a synthetic trace generated."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from granikv.traces.tables import LengthTable, load_table

_MAX_NODES = 1 << 22
# Prefix sets of a trace with phases, and of one phase: half of the bits of a set's number each.
MAX_SETS = 1 << 10


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ConstantLength(_Spec):
    """Always the same number of tokens."""

    kind: Literal["constant"] = "constant"
    tokens: int = Field(ge=1)


class UniformLength(_Spec):
    """Any number of tokens from `low` to `high`, both included."""

    kind: Literal["uniform"]
    low: int = Field(ge=1)
    high: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.high < self.low:
            raise ValueError(f"high ({self.high}) must be at least low ({self.low})")
        return self


class LognormalLength(_Spec):
    """Lognormal with this median; `sigma` is the standard deviation of the logarithm.

    Draws are rounded and clipped to 1..`largest`.
    """

    kind: Literal["lognormal"]
    median: float = Field(ge=1)
    sigma: float = Field(ge=0)
    largest: int = Field(ge=1)


class TableLength(_Spec):
    """Rows drawn from a table of measured lengths.

    `table` is a shipped name (sharegpt-llama-3.1-8b) or a CSV file with the columns
    num_prefill_tokens and num_decode_tokens. Prompt and answer drawn from one table come from the
    same row.
    """

    kind: Literal["table"]
    table: str
    column: Literal["prompt", "output"]

    def load(self) -> LengthTable:
        """The table."""
        return load_table(self.table)


def _plain_number(value: object) -> object:
    return {"kind": "constant", "tokens": value} if isinstance(value, int) else value


Length = Annotated[
    Annotated[
        ConstantLength | UniformLength | LognormalLength | TableLength, Field(discriminator="kind")
    ],
    BeforeValidator(_plain_number),
]


class PoissonArrivals(_Spec):
    """Independent arrivals: exponential gaps."""

    kind: Literal["poisson"]
    rate_per_s: float = Field(gt=0)


class GammaArrivals(_Spec):
    """Gamma gaps; `burstiness` is their shape: 1 is Poisson, below 1 bursty, above 1 regular."""

    kind: Literal["gamma"]
    rate_per_s: float = Field(gt=0)
    burstiness: float = Field(gt=0)


class ConstantArrivals(_Spec):
    """Equal gaps; the first request arrives at 0."""

    kind: Literal["constant"]
    rate_per_s: float = Field(gt=0)


class BurstArrivals(_Spec):
    """`size` requests at the same instant, again every `period_s`; the first burst is at 0."""

    kind: Literal["burst"]
    size: int = Field(ge=1)
    period_s: float = Field(gt=0)


Arrivals = Annotated[
    PoissonArrivals | GammaArrivals | ConstantArrivals | BurstArrivals, Field(discriminator="kind")
]


class EvenPopularity(_Spec):
    """Prefixes in turn, over all nested levels that say so: equal shares, exactly."""

    kind: Literal["even"] = "even"


class UniformPopularity(_Spec):
    """Every prefix is equally likely."""

    kind: Literal["uniform"]


class ZipfPopularity(_Spec):
    """Prefix i (from 1) is taken in proportion to i**-exponent."""

    kind: Literal["zipf"]
    exponent: float = Field(ge=0)


class WeightedPopularity(_Spec):
    """Prefixes are taken in proportion to given weights."""

    kind: Literal["weights"]
    weights: list[Annotated[float, Field(gt=0)]]


Popularity = Annotated[
    EvenPopularity | UniformPopularity | ZipfPopularity | WeightedPopularity,
    Field(discriminator="kind"),
]


class ZipfLengths(_Spec):
    """Prefix i (from 1) has `largest` * i**-exponent tokens, rounded, at least 1."""

    kind: Literal["zipf"]
    largest: int = Field(ge=1)
    exponent: float = Field(ge=0)


PrefixLengths = Annotated[
    Annotated[
        ConstantLength | UniformLength | LognormalLength | ZipfLengths, Field(discriminator="kind")
    ],
    BeforeValidator(_plain_number),
]


class PrefixLevel(_Spec):
    """Shared prefixes of one nesting depth: every parent has `count` of them below it.

    `tokens` is one length for all, a list with one length per prefix, or a distribution that is
    drawn once per prefix. With `period_s` a new set replaces the old one every so many seconds.
    """

    count: int = Field(ge=1)
    tokens: list[Annotated[int, Field(ge=1)]] | PrefixLengths
    popularity: Popularity = EvenPopularity()
    period_s: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _counts_agree(self) -> Self:
        if isinstance(self.tokens, list) and len(self.tokens) != self.count:
            raise ValueError(f"tokens has {len(self.tokens)} lengths for {self.count} prefixes")
        weights = self.popularity
        if isinstance(weights, WeightedPopularity) and len(weights.weights) != self.count:
            raise ValueError(f"weights has {len(weights.weights)} values for {self.count} prefixes")
        return self


class Conversation(_Spec):
    """Closed-loop turns: each prompt is the prompt before it, its answer and new user tokens.

    The pause between an answer and the next turn is exponential with mean `think_s`, or exactly
    `think_s` when `think` is "constant".
    """

    turns: Length
    user_tokens: Length
    think_s: float = Field(ge=0)
    think: Literal["exponential", "constant"] = "exponential"


class RequestMix(_Spec):
    """Endless requests of one kind.

    Attributes:
        arrivals: when requests, or the first turns of conversations, arrive.
        prefixes: shared prefixes, outermost level first; empty for none.
        private_tokens: tokens of each (first) prompt behind its shared prefixes.
        output_tokens: tokens to generate.
        conversation: None for single requests.
    """

    arrivals: Arrivals
    prefixes: list[PrefixLevel] = []
    private_tokens: Length
    output_tokens: Length
    conversation: Conversation | None = None

    @model_validator(mode="after")
    def _prefixes_fit(self) -> Self:
        nodes = 1
        for level in self.prefixes:
            nodes *= level.count
        if nodes > _MAX_NODES or len(self.prefixes) > 16:
            raise ValueError("prefixes must have at most 16 levels and 2**22 leaves")
        return self


class WorkloadSpec(RequestMix):
    """A synthetic trace of exactly `requests` requests.

    Attributes:
        requests: requests in all, turns included; the last conversation may be cut short.
    """

    requests: int = Field(ge=1)


class Phase(RequestMix):
    """A mix that arrives for a while.

    Attributes:
        seconds: how long; requests may run longer, and later turns of a conversation come later.
        start_s: when it starts, None for when the phase before it ends; phases may overlap.
        tenant: phases of one tenant read the same prefixes; without one, those of a phase are its
            own, in every repetition.
    """

    seconds: float = Field(gt=0)
    start_s: float | None = Field(default=None, ge=0)
    tenant: str | None = None


class PhasedSpec(_Spec):
    """A synthetic trace whose mix changes.

    Attributes:
        phases: in order of writing, not of time.
        repeat: how often the whole list is played; each time begins at the end of the one before.
    """

    phases: list[Phase] = Field(min_length=1)
    repeat: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        if len(self.phases) * self.repeat > MAX_SETS:
            raise ValueError(f"phases times repeat must be at most {MAX_SETS}")
        for phase in self.phases:
            if any(
                phase.seconds / (level.period_s or phase.seconds) > MAX_SETS
                for level in phase.prefixes
            ):
                raise ValueError(f"a phase must have at most {MAX_SETS} periods of a prefix level")
        return self

    @model_validator(mode="after")
    def _tenants_agree(self) -> Self:
        known: dict[str, list[PrefixLevel]] = {}
        for phase in self.phases:
            if phase.tenant and known.setdefault(phase.tenant, phase.prefixes) != phase.prefixes:
                raise ValueError(f"phases of tenant {phase.tenant!r} must state the same prefixes")
        return self


def burst_grid_point(
    prefix_tokens: int, rows: int, *, private_tokens: int = 256, output_tokens: int = 128
) -> WorkloadSpec:
    """One point of the paper's grid: `rows` requests at once behind one shared prefix."""
    return WorkloadSpec(
        requests=rows,
        arrivals=BurstArrivals(kind="burst", size=rows, period_s=1.0),
        prefixes=[PrefixLevel(count=1, tokens=ConstantLength(tokens=prefix_tokens))],
        private_tokens=ConstantLength(tokens=private_tokens),
        output_tokens=ConstantLength(tokens=output_tokens),
    )
