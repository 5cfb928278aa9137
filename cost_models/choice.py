"""Choice: which mode the dispatcher takes by prefix length and batch size, and its worth."""

from dataclasses import dataclass

from granikv.core.cost_table import CostTable
from granikv.core.dispatch import Dispatcher
from granikv.core.step import Launch, Mode, Segment, StepPlan, StepShape
from granikv.cost_models.step import StepCost

ROWS = (1, 4, 16, 32, 64, 128, 256, 512)
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
PRIVATE_TOKENS = 256  # of each row
_LETTERS = {Mode.PAGED: "paged", Mode.CASCADE: "cascade", Mode.DENSE: "dense"}
_ONE_PREFIX_BASE = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """The dispatcher's answers over a grid of one prefix that all rows share.

    Attributes:
        rows, lengths: the grid.
        modes: `[lengths][rows]`, the mode, with a + where the launch is fused.
        gains: `[lengths][rows]`, step time of the stock engine over that of the chosen plan.
        crossovers: length to the fewest rows from which dense beats cascade in two calls, or None
            when it never does up to the largest batch.
        losses: worst step time of each fixed mode over that of the chosen plan.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    modes: tuple[tuple[str, ...], ...]
    gains: tuple[tuple[float, ...], ...]
    crossovers: dict[int, int | None]
    losses: dict[str, float]


def explore(cost: StepCost, table: CostTable) -> Choice:
    """Ask the dispatcher at every point of the grid and time its plans with the cost model."""
    dispatcher = Dispatcher(table)
    modes, gains = [], []
    losses = dict.fromkeys(_LETTERS.values(), 1.0)
    for length in LENGTHS:
        mode_line, gain_line = [], []
        for rows in ROWS:
            shape = _shape(cost, rows, length)
            plan = dispatcher.plan(shape)
            chosen_ns = cost.step_ns(shape, plan)
            mark = "+" if plan.launch == Launch.FUSED and plan.modes[0] != Mode.PAGED else ""
            mode_line.append(_LETTERS[plan.modes[0]] + mark)
            gain_line.append(cost.step_ns(shape, StepPlan((Mode.PAGED,))) / chosen_ns)
            for mode, name in _LETTERS.items():
                fixed_ns = cost.step_ns(shape, StepPlan((mode,)))
                losses[name] = max(losses[name], fixed_ns / chosen_ns)
        modes.append(tuple(mode_line))
        gains.append(tuple(gain_line))
    crossovers = {length: cost.attention.dense_wins_from(length, ROWS[-1]) for length in LENGTHS}
    return Choice(ROWS, LENGTHS, tuple(modes), tuple(gains), crossovers, losses)


def _shape(cost: StepCost, rows: int, length: int) -> StepShape:
    segments = (Segment(_ONE_PREFIX_BASE, length, rows),)
    private = rows * PRIVATE_TOKENS
    return StepShape(rows, rows, private, PRIVATE_TOKENS, segments, *cost.heads[:3])
