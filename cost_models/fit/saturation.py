"""fit_saturation: `M_sat`, the effective rows from which dense attention was measured fastest."""

from dataclasses import dataclass

import numpy as np
import polars as pl

from granikv.cost_models.fit.fused import CELL

LEAST_LENGTH = 2048  # shorter prefixes are hardly worth a pass of their own in any mode
_LEAST_CELLS = 3  # of one number of effective rows


@dataclass(frozen=True, slots=True)
class Saturation:
    """A threshold, and how well whole calls obey it.

    Attributes:
        m_sat: least measured `rows x group` from which on dense was at least as fast.
        below: next smaller measured one, where it was not; None when dense won everywhere.
        least, most: lowest and highest measured one.
        lengths: shortest and longest prefix.
        without_a_length: thresholds, lowest and highest, when one prefix length is left out; None
            where some such threshold does not exist.
        median_loss, worst_loss: time of the mode that the threshold chooses over the best one's,
            less one, over all cells.
        cells: batches compared.
        rows: calls compared.
    """

    m_sat: int
    below: int | None
    least: int
    most: int
    lengths: tuple[int, int]
    without_a_length: tuple[int, int] | None
    median_loss: float
    worst_loss: float
    cells: int
    rows: int


def fit_saturation(frame: pl.DataFrame) -> Saturation | None:
    """Compare the best dense call with the best other one on each batch of one prefix.

    The threshold is the least number of effective rows from which on, at every measured number, the
    median ratio over prefix and private lengths is at most 1. None when there is no such number, or
    too few batches ran in both ways.

    Args:
        frame: rows of `own_rows.operator_rows`.
    """
    one = (pl.col("prefixes") == 1) & (pl.col("sharers") == pl.col("rows"))
    calls = frame.filter(one & (pl.col("length") >= LEAST_LENGTH))
    is_dense = pl.col("mode") == "dense"
    cells = (
        calls.group_by(CELL)
        .agg(
            pl.col("length").first(),
            dense=pl.col("time_us").filter(is_dense).min(),
            other=pl.col("time_us").filter(~is_dense).min(),
            calls=pl.len(),
        )
        .drop_nulls()
        .with_columns(
            effective=pl.col("rows") * pl.col("num_q_heads") // pl.col("num_kv_heads"),
            ratio=pl.col("dense") / pl.col("other"),
        )
    )
    found = _threshold(cells)
    if found is None:
        return None
    numbers: list[int] = cells["effective"].unique().sort().to_list()
    lengths: list[int] = cells["length"].unique().sort().to_list()
    without = [_threshold(cells.filter(pl.col("length") != length)) for length in lengths]
    sure = [number for number in without if number is not None]
    ratio = cells["ratio"].to_numpy()
    chosen = np.where(cells["effective"].to_numpy() >= found, ratio, 1.0)
    loss = chosen / np.minimum(ratio, 1.0) - 1
    return Saturation(
        found,
        max((number for number in numbers if number < found), default=None),
        numbers[0],
        numbers[-1],
        (lengths[0], lengths[-1]),
        (min(sure), max(sure)) if len(sure) == len(without) else None,
        float(np.median(loss)),
        float(loss.max()),
        cells.height,
        int(cells["calls"].sum()),
    )


def _threshold(cells: pl.DataFrame) -> int | None:
    by_number = (
        cells.group_by("effective")
        .agg(pl.col("ratio").median(), count=pl.len())
        .filter(pl.col("count") >= _LEAST_CELLS)
        .sort("effective", descending=True)
    )
    found = None
    for number, ratio, _ in by_number.iter_rows():
        if ratio > 1:
            break
        found = int(number)
    return found
