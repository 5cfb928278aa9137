"""Paper claims: the figures of arXiv 2608.15584 as data, and those that no simulation can answer.

The figures are known from a public summary of the paper, not from its text, so `place` names the
part of that summary. GPU: A100-SXM4-40GB; baseline: stock SGLang, unless a claim says otherwise.
"""

from dataclasses import dataclass
from typing import Literal

PAPER = "arXiv 2608.15584"
CAVEAT = (
    f"The figures of {PAPER} are known here from a public summary, not from its full text.",
    "Its throughput method is disputed: a public survey says that the authors announced an error "
    "in their throughput measurement and a correction to come (second hand, one source).",
    "So these are claims to compare with, no acceptance tests. Nothing was tuned to meet them.",
)

Unit = Literal["x", "ms", "us", "tokens/s", "share", "rows", "steps"]


@dataclass(frozen=True, slots=True)
class Claim:
    """One published figure, or the range that its words allow.

    Attributes:
        low: least value that agrees with the paper; equal to `high` for a plain figure.
        high: greatest value that does.
        unit: "x" is a ratio, "share" a fraction of 1, "rows" effective rows (rows x group).
        is_input: a shipped A100 parameter was set from this very figure, so that agreement is no
            prediction.
    """

    id: str
    place: str
    text: str
    low: float
    high: float
    unit: Unit
    is_input: bool = False

    def ratio(self, prediction: float) -> float:
        """Prediction / claim; of a range, the end that is nearest, and 1 inside of it."""
        nearest = min(max(prediction, self.low), self.high)
        return prediction / nearest if nearest else 1.0

    def words(self) -> str:
        """The figure with its unit."""
        if self.low == self.high:
            return in_unit(self.low, self.unit)
        if self.low == 0:
            return f"at most {in_unit(self.high, self.unit)}"
        return f"{_number(self.low, self.unit)} to {in_unit(self.high, self.unit)}"


@dataclass(frozen=True, slots=True)
class Unsimulated:
    """A figure that no simulation here can say anything about, and the reason."""

    id: str
    place: str
    text: str
    reason: str


def in_unit(value: float, unit: Unit) -> str:
    """A number as people read it."""
    suffix = {"x": "x", "share": " %"}.get(unit, f" {unit}")
    return f"{_number(value, unit)}{suffix}"


def _number(value: float, unit: Unit) -> str:
    if unit == "x":
        return f"{value:.2f}"
    if unit == "share":
        return f"{value * 100:.0f}"
    digits = 1 if unit == "ms" and value < 100 else 0
    return f"{value:,.{digits}f}"


def _plain(
    id: str, place: str, text: str, value: float, unit: Unit = "x", is_input: bool = False
) -> Claim:
    return Claim(id, place, text, value, value, unit, is_input)


_HEADLINE = "headline throughput"
_SHORT = "short prefixes"
_STORAGE = "storage layer alone"
_LATENCY = "latency, Llama, B = 256, 8K"
_KERNEL = "prefix kernel, B = 256, 8K"
_DISPATCH = "dispatch"
_SWEEP = "B sweep"
_SEVERAL = "k prefixes, Llama TP1, B = 256"

CLAIMS: tuple[Claim, ...] = (
    _plain("headline.llama", _HEADLINE, "Llama-3.1-8B TP1, 16K, over stock", 2.16),
    _plain("headline.qwen14", _HEADLINE, "Qwen2.5-14B TP2, 16K, over stock", 1.98),
    _plain("headline.qwen32", _HEADLINE, "Qwen2.5-32B TP4, 16K, over stock", 1.57),
    _plain("headline.short", _HEADLINE, "worst of three, 512, over stock", 0.97),
    _plain("headline.monotone", _HEADLINE, "longer L_p that raise the gain", 1.0, "share"),
    _plain("short.corner", _SHORT, "worst: Qwen2.5-14B, 512, B = 512", 0.70),
    _plain("short.grid", _SHORT, "worst of the grid, 512, B <= 256", 0.97),
    Claim("storage.serving", _STORAGE, "single prefix, end to end", 1.05, 1.15, "x"),
    _plain("storage.kernel", _STORAGE, "prefix kernel, reread pages / slab", 15.6),
    _plain("tpot.stock", _LATENCY, "TPOT p50 of stock", 109.0, "ms", is_input=True),
    _plain("tpot.granikv", _LATENCY, "TPOT p50 of GraniKV", 42.0, "ms", is_input=True),
    Claim("ttft", _LATENCY, "TTFT p50, GraniKV / stock", 0.9, 1.1, "x"),
    _plain("kernel.llama", _KERNEL, "cascade / dense, Llama TP1", 3.66, is_input=True),
    _plain("kernel.qwen32", _KERNEL, "cascade / dense, Qwen2.5-32B TP4", 1.24),
    _plain("kernel.dense", _KERNEL, "dense launch, Llama TP1", 442.0, "us", is_input=True),
    _plain("kernel.launches", _KERNEL, "dense launches in 15 s (here: steps)", 83.0, "steps"),
    # "Almost all" has no number in the summary; nine tenths is this project's reading.
    Claim("dispatch.above", _DISPATCH, "steps that are dense, M_eff >= 1024", 0.9, 1.0, "share"),
    Claim("dispatch.below", _DISPATCH, "steps that are dense, M_eff < 1024", 0.0, 0.13, "share"),
    _plain("dispatch.at", _DISPATCH, "TPOT dense / cascade, M_eff = 1024", 0.67),
    Claim("dispatch.under", _DISPATCH, "TPOT dense / cascade, M_eff = 512", 0.97, 1.03, "x"),
    Claim(
        "dispatch.crossover", _DISPATCH, "M_eff from which dense is faster", 512.0, 1024.0, "rows"
    ),
    # "Peak or near it" has no number either; 3 % is the paper's own scale in the next claim.
    Claim("sweep.peak", _SWEEP, "throughput at B = 256 / best B", 0.97, 1.0, "x"),
    Claim("sweep.1024", _SWEEP, "throughput at B = 1024 / B = 256", 0.97, 0.99, "x"),
    _plain("several.four", _SEVERAL, "k = 4 of 8K each, over stock", 1.36),
    _plain("several.four.cascade", _SEVERAL, "k = 4 of 8K each, over cascade", 1.38),
    _plain("several.many.stock", _SEVERAL, "k = 64 of 8K each, stock", 300.0, "tokens/s"),
    _plain("several.many.cascade", _SEVERAL, "k = 64 of 8K each, cascade", 300.0, "tokens/s"),
    _plain("several.many.granikv", _SEVERAL, "k = 64 of 8K each, GraniKV", 300.0, "tokens/s"),
    _plain("several.many.loss", _SEVERAL, "GraniKV, lost from k = 1 to 64", 0.87, "share"),
    _plain("mixed.four", _SEVERAL, "k = 4, unequal, over stock", 1.95),
    _plain("mixed.four.cascade", _SEVERAL, "k = 4, unequal, cascade / stock", 0.99),
    _plain("mixed.eight", _SEVERAL, "k = 8, unequal, over stock", 1.82),
)

NOT_SIMULATED: tuple[Unsimulated, ...] = (
    Unsimulated(
        "kernel.totals",
        _KERNEL,
        "11058 -> 3021 ms (Llama TP1), 20298 -> 16423 ms (Qwen2.5-32B TP4)",
        "they are sums over a profile whose number of launches is not known (3021 ms are 6,835 "
        "launches of 442 us, not 83); their ratios are simulated",
    ),
    Unsimulated(
        "dispatch.wrapper",
        _DISPATCH,
        "the wrapper takes < 1 us of CPU a step (< 0.2 %)",
        "it is a time of the paper's own code on its host; the simulator charges nothing for it",
    ),
    Unsimulated(
        "dispatch.m_sat",
        _DISPATCH,
        "M_sat = 1024 on an A100",
        "it is a parameter here, taken from the paper",
    ),
    Unsimulated(
        "sweep.graphs",
        _SWEEP,
        "B = 1024 costs a few hundred MB of graph buffers",
        "graph buffers are no part of the model beyond what SGLang reserves for them",
    ),
    Unsimulated(
        "output",
        "design",
        "output equals the unmodified engine's",
        "a simulation computes no tokens",
    ),
    Unsimulated(
        "grid",
        "synthetic grid",
        "L_p in {512 .. 8K} x B in {8 .. 256}, three configurations",
        "the summary gives no figure for a cell; the predictions have a table of their own",
    ),
    Unsimulated(
        "production",
        "workloads seen in production",
        "shared prefixes up to 23K tokens, 85-97 % of prompt tokens shared",
        "they describe traffic, not a server",
    ),
)
