"""Paper steps: figures of one decode step or one kernel, straight from the cost model.

Attention passes run as the paper's engine runs them: one launch for the prefix, one for the rest.
"""

from granikv.core.step import Mode, Segment, StepPlan, StepShape
from granikv.cost_models.piecewise import piece_at
from granikv.cost_models.step import StepCost

PRIVATE_TOKENS = 256  # a row's own tokens; the paper's figure for these cells is not known
_SLAB = 1  # a base above 0: the segment is contiguous


def prefix_pass_us(cost: StepCost, mode: Mode, length: int, rows: int) -> float:
    """One launch of the prefix kernel, in us; a paged one is the stock engine's."""
    cost = cost.in_engine(is_stock=mode == Mode.PAGED)
    return cost.attention.alone_pass_ns(mode, length, rows) / 1e3


def cascade_over_dense(cost: StepCost, length: int, rows: int) -> float:
    """Prefix kernel time, cascade / dense."""
    return prefix_pass_us(cost, Mode.CASCADE, length, rows) / prefix_pass_us(
        cost, Mode.DENSE, length, rows
    )


def step_ms(cost: StepCost, mode: Mode, length: int, rows: int) -> float:
    """A whole decode step of rows behind one prefix, each with 256 tokens of its own, in ms; a
    paged one is the stock engine's.
    """
    cost = cost.in_engine(is_stock=mode == Mode.PAGED)
    shape = StepShape(
        rows,
        rows,
        rows * PRIVATE_TOKENS,
        PRIVATE_TOKENS,
        (Segment(_SLAB, length, rows),),
        *cost.heads[:3],
    )
    return cost.step_ns(shape, StepPlan((mode,))) / 1e6


def dense_over_cascade(cost: StepCost, length: int, rows: int) -> float:
    """Time of a decode step, dense / cascade."""
    return step_ms(cost, Mode.DENSE, length, rows) / step_ms(cost, Mode.CASCADE, length, rows)


def crossover_rows(cost: StepCost, length: int, most_rows: int = 1024) -> int:
    """Least effective rows (rows x group) from which a dense step is faster than a cascade one.

    Raises:
        ValueError: it never is, up to `most_rows` rows.
    """
    for rows in range(1, most_rows + 1):
        if dense_over_cascade(cost, length, rows) < 1:
            return rows * cost.heads.q // cost.heads.kv
    raise ValueError(f"dense must become faster by {most_rows} rows, but it never does")


def shared_reread(cost: StepCost, length: int, rows: int) -> float:
    """Paged kernel over the same physical pages for each row / dense kernel over a slab."""
    return prefix_pass_us(cost, Mode.PAGED, length, rows) / prefix_pass_us(
        cost, Mode.DENSE, length, rows
    )


def private_reread(cost: StepCost, length: int, rows: int) -> float:
    """The same where no row profits from another's reads: each row's prefix costs as private
    pages do.
    """
    stock_cost = cost.in_engine(is_stock=True)
    line = stock_cost.attention.paged.line(rows)
    _, a, b = line[piece_at(line, rows * length)]
    return (a + b * rows * length) / 1e3 / prefix_pass_us(cost, Mode.DENSE, length, rows)
