"""Choice: the dispatcher's answers over a grid, told in modes and in what they are worth."""

from granikv.core.step import Mode
from granikv.cost_models.choice import LENGTHS, ROWS, explore
from granikv.cost_models.dispatch_table import build_cost_table
from granikv.cost_models.models import load_model
from granikv.cost_models.params import load_params
from granikv.cost_models.step import StepCost

COST = StepCost(load_params("h200-sxm"), load_model("llama-3.1-8b"))
CHOICE = explore(COST, build_cost_table(COST))


def test_one_row_gains_nothing_and_many_rows_over_a_long_prefix_gain_much() -> None:
    # One row over contiguous slots is the work of one over a page table: every mode is a tie.
    assert all(line[0] < 1.05 for line in CHOICE.gains)
    last = ROWS.index(256)
    assert CHOICE.gains[LENGTHS.index(16_384)][last] > 4
    assert CHOICE.modes[LENGTHS.index(16_384)][last].startswith("dense")


def test_the_choice_is_hardly_ever_worse_than_the_stock_engine() -> None:
    """The dispatcher reads a coarser table than the cost model that judges it here."""
    assert min(min(line) for line in CHOICE.gains) > 0.95


def test_crossovers_are_where_dense_starts_to_win() -> None:
    for length, rows in CHOICE.crossovers.items():
        if rows is None or rows == 1:
            continue
        before, after = (
            [
                max(COST.attention.shared_pass(mode, length, count))
                + COST.attention.pass_latency_ns(mode)
                for mode in (Mode.DENSE, Mode.CASCADE)
            ]
            for count in (rows - 1, rows)
        )
        assert before[0] >= before[1]
        assert after[0] < after[1]


def test_a_fixed_mode_costs_somewhere() -> None:
    assert set(CHOICE.losses) == {"paged", "cascade", "dense"}
    assert CHOICE.losses["paged"] > 5
    assert all(loss >= 1 for loss in CHOICE.losses.values())
