import numpy as np
import pytest

from granikv.kernels.layouts import cut_windows, fill_page_table
from granikv.kernels.shapes import Decode, Heads

LLAMA = Heads(32, 8)
SHAPES = [
    Decode(LLAMA, 8, 100),
    Decode(LLAMA, 12, 77, 16, 512, 3),
    Decode(LLAMA, 6, 130, 1, 256, 2, contiguous=False),
    Decode(LLAMA, 1, 0, 1, 64, 1),
]


def _table(shape, first_page, window_pages=4096):
    shared = shape.prefixes * shape.prefix_pages
    begin = shared if shape.contiguous else 0
    order = np.random.default_rng(0).permutation(window_pages - begin).astype(np.int32) + begin
    table = np.full((shape.rows, shape.prefix_pages + shape.private_pages), -7, dtype=np.int32)
    ramp = np.arange(max(shared, 1), dtype=np.int32)
    fill_page_table(table, shape, ramp, order, first_page)
    return table


@pytest.mark.parametrize("shape", SHAPES)
def test_every_entry_is_written_inside_the_window(shape):
    table = _table(shape, first_page=1000)
    assert table.min() >= 1000
    assert table.max() < 1000 + 4096


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_share_a_prefix_and_nothing_else(shape):
    table = _table(shape, first_page=1)
    assert np.unique(table).size == shape.pages
    for row in range(shape.rows):
        twin = row % max(shape.prefixes, 1)
        same = table[row, : shape.prefix_pages] == table[twin, : shape.prefix_pages]
        assert same.all()


def test_contiguous_prefix_starts_where_its_segment_says():
    shape = SHAPES[1]
    table = _table(shape, first_page=1)
    for prefix in range(3):
        first = 1 + prefix * 32
        assert table[prefix, :32].tolist() == list(range(first, first + 32))
    assert shape.columns()["segments_json"].startswith("[[16, 512, 4], [528,")


def test_scattered_prefix_is_not_consecutive():
    table = _table(SHAPES[2], first_page=1)
    assert (np.diff(table[0, :256]) != 1).any()


@pytest.mark.parametrize(("needed", "calls"), [(10, 4), (400, 4), (999, 32), (1, 1)])
def test_windows_do_not_overlap_and_hold_a_call(needed, calls):
    windows = cut_windows(1001, needed, calls)
    assert 1 <= windows.number <= calls
    assert windows.pages >= needed
    assert windows.first_page(0) == 1
    assert windows.first_page(windows.number - 1) + windows.pages <= 1001
    assert windows.first_page(windows.number) == windows.first_page(0)


def test_a_batch_larger_than_the_pool_is_refused():
    with pytest.raises(ValueError, match="needed_pages"):
        cut_windows(100, 100, 4)
