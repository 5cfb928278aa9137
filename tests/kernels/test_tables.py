import pytest

torch = pytest.importorskip("torch")

from granikv.core.step import Mode  # noqa: E402
from granikv.kernels import tables as tables_module  # noqa: E402
from granikv.kernels.tables import SharedSegment, tables_of  # noqa: E402

SYSTEM = SharedSegment(base=1, length=40, rows=(0, 1, 3), mode=2)
TENANT = SharedSegment(base=57, length=9, rows=(3, 0), mode=1)


def _tables(segments=(SYSTEM, TENANT), private=((7, 8), (), (9,), (10, 11, 12)), **changes):
    room = {"modes": None, "rows": 6, "width": 4, "groups": 3, "device": "cpu", **changes}
    return tables_of(segments, private, **room)


def test_a_row_has_its_segments_outermost_first():
    tables = _tables()
    assert tables.segment_base.tolist() == [
        [1, 57, 0, 0],
        [1, 0, 0, 0],
        [0, 0, 0, 0],
        [1, 57, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 0],
    ]
    assert tables.segment_length[0].tolist() == [40, 9, 0, 0]
    assert tables.segment_group[3].tolist() == [0, 1, 0, 0]


def test_private_slots_are_filled_with_what_no_kernel_may_read():
    tables = _tables()
    assert tables.private_slots.tolist()[:3] == [[7, 8, -1, -1], [-1] * 4, [9, -1, -1, -1]]
    assert tables.private_length.tolist() == [2, 0, 1, 3, 0, 0]


def test_padding_rows_are_empty():
    tables = _tables()
    assert (tables.segment_length[4:] == 0).all()
    assert (tables.private_length[4:] == 0).all()


def test_modes_are_the_segments_own_unless_given():
    assert _tables().group_mode.tolist() == [2, 1, 0]
    assert _tables(modes=[0, 2]).group_mode.tolist() == [0, 2, 0]


def test_mode_numbers_are_those_of_the_plan():
    assert tables_module.MODE_PAGED == Mode.PAGED
    assert tables_module.MODE_CASCADE == Mode.CASCADE
    assert tables_module.MODE_DENSE == Mode.DENSE


def test_tables_are_contiguous_int32():
    tables = _tables()
    for name in tables.__dataclass_fields__:
        table = getattr(tables, name)
        assert table.dtype == torch.int32
        assert table.is_contiguous()
    assert (tables.rows, tables.width, tables.groups) == (6, 4, 3)


def test_a_batch_without_segments_or_live_rows_is_a_batch():
    tables = _tables((), ())
    assert int(tables.segment_length.sum() + tables.private_length.sum()) == 0


def test_copy_keeps_addresses():
    tables, other = _tables(), _tables((TENANT,), ((3,),))
    addresses = [getattr(tables, name).data_ptr() for name in tables.__dataclass_fields__]
    tables.copy_from(other)
    assert [getattr(tables, name).data_ptr() for name in tables.__dataclass_fields__] == addresses
    for name in tables.__dataclass_fields__:
        assert torch.equal(getattr(tables, name), getattr(other, name))


def test_copy_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"private_slots must be \[6, 4\], got \[6, 5\]"):
        _tables().copy_from(_tables(width=5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 3}, "private_slots must be of at most 3 rows, got 4"),
        ({"width": 2}, "at most 2, got 3"),
        ({"private": ((1, -1),)}, "must not be negative, got -1"),
        ({"groups": 1}, "segments must be at most 1, got 2"),
        ({"modes": [0]}, "modes must be 2, got 1"),
        ({"modes": [0, 3]}, "mode must be one of"),
        ({"segments": (SharedSegment(-1, 4, (0,)),)}, "base >= 0"),
        ({"segments": (SharedSegment(1, 0, (0,)),)}, "length >= 1"),
        ({"segments": (SharedSegment(1, 4, (6,)),)}, r"in \[0, 6\), got 6"),
        ({"segments": (SharedSegment(1, 4, (1, 1)),)}, "distinct"),
        ({"segments": (SYSTEM,) * 5, "groups": 5}, "segments of a row must be at most 4, got 5"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        _tables(**changes)
