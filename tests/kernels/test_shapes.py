import json

import pytest

from granikv.kernels.shapes import Decode, Extend, Gemm, Heads, PrefixPass, PrefixSuffix

LLAMA = Heads(32, 8)


def test_kv_bytes_count_k_and_v():
    assert LLAMA.kv_bytes == 4096  # 2 * 8 heads * 128 * 2 bytes


def test_private_decode_has_no_segment():
    columns = Decode(LLAMA, 4, 100, page_size=16).columns()
    assert columns["segments_json"] == "[]"
    assert columns["private_tokens"] == 400
    assert Decode(LLAMA, 4, 100, page_size=16).pages == 4 * 7


def test_prefixes_become_segments_of_equal_share():
    shape = Decode(LLAMA, 12, 77, 16, 512, 3)
    assert json.loads(str(shape.columns()["segments_json"])) == [
        [16, 512, 4],
        [528, 512, 4],
        [1040, 512, 4],
    ]
    assert shape.pages == 3 * 32 + 12 * 5


def test_scattered_prefix_has_base_zero():
    shape = Decode(LLAMA, 2, 8, 1, 64, 1, contiguous=False)
    assert shape.columns()["segments_json"] == "[[0, 64, 2]]"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((8, 64, 16, 100, 1), "whole pages"),
        ((8, 64, 1, 100, 0), "both"),
        ((8, 64, 1, 0, 2), "both"),
        ((8, 64, 1, 100, 3), "multiple"),
    ],
)
def test_impossible_batches_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        Decode(LLAMA, *sizes)


def test_extend_counts_cached_and_new_tokens_once():
    own = Extend(LLAMA, 4, 64, 1000).columns()
    assert (own["m"], own["private_tokens"], own["segments_json"]) == (256, 4 * 1064, "[]")
    shared = Extend(LLAMA, 4, 64, 1000, shared=True).columns()
    assert (shared["m"], shared["private_tokens"]) == (256, 4 * 64)
    assert shared["segments_json"] == "[[1, 1000, 4]]"


def test_pair_is_prefix_and_suffix():
    pair = PrefixSuffix(LLAMA, 8, 512, 256)
    assert pair.columns() == Decode(LLAMA, 8, 256, 1, 512, 1).columns()
    assert pair.guess_us() > pair.prefix.guess_us() + pair.suffix.guess_us()


@pytest.mark.parametrize(
    ("small", "large"),
    [
        (Gemm(8, 4096, 4096), Gemm(4096, 4096, 4096)),
        (Decode(LLAMA, 8, 256), Decode(LLAMA, 256, 256)),
        (Decode(LLAMA, 8, 256), Decode(LLAMA, 8, 256, 1, 512, 1)),
        (Extend(LLAMA, 1, 64, 512), Extend(LLAMA, 1, 64, 8192)),
        (PrefixPass(LLAMA, 8, 512), PrefixPass(LLAMA, 8, 8192)),
    ],
)
def test_more_work_is_never_guessed_shorter(small, large):
    assert small.guess_us() < large.guess_us()


def test_guess_is_near_a_measured_point():
    """FA3, 256 rows over one 16K prefix and 256 private tokens: 2480 us on an H200."""
    assert Decode(LLAMA, 256, 256, 1, 16384, 1).guess_us() == pytest.approx(2480, rel=0.3)
