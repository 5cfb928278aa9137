import pytest

from granikv.traces.segments import (
    BlockNames,
    Origin,
    generated_segment,
    is_private,
    local_segment,
    named,
    origin,
    private_segment,
)


def test_makers_never_meet():
    segments = [
        0,
        (1 << 60) - 1,
        named(Origin.WIDE, 0),
        local_segment(0, 0),
        local_segment((1 << 28) - 1, (1 << 32) - 1),
        private_segment(0),
        named(Origin.OUTPUT, 0),
        named(Origin.TURN, 0),
        named(Origin.PREPENDED, 0),
        generated_segment(0, 0, 0),
        generated_segment(15, (1 << 20) - 1, (1 << 36) - 1),
    ]
    assert len(set(segments)) == len(segments)
    assert all(0 <= segment < 1 << 63 for segment in segments)
    assert [origin(segment) for segment in segments[:4]] == [
        Origin.HASH,
        Origin.HASH,
        Origin.WIDE,
        Origin.LOCAL,
    ]
    assert [is_private(segment) for segment in segments].count(True) == 1


def test_wide_block_ids_that_differ_in_the_high_bits_stay_apart():
    names = BlockNames()
    low = 0x1234
    wide = [low | 1 << 32, low | 1 << 61, low | 1 << 62, low | 1 << 63]
    segments = names.segments([low, *wide])
    assert len(set(segments)) == 5
    assert segments[:2] == [low, low | 1 << 32]
    assert names.segments([low, *wide]) == segments
    assert all(segment < 1 << 63 for segment in segments)


@pytest.mark.parametrize("number", [-1, 1 << 60])
def test_a_number_must_fit(number):
    with pytest.raises(ValueError, match="60"):
        named(Origin.TURN, number)


def test_a_local_id_must_fit():
    with pytest.raises(ValueError, match="local block id"):
        local_segment(0, 1 << 32)
