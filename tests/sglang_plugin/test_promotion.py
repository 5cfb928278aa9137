"""What a promotion waits for: our kernels read rows while a step runs."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang.srt.mem_cache.radix_cache", reason="needs sglang 0.5.17")

from tree_support import MarkedServer, record_streams  # noqa: E402

from granikv.core.admission import SharedAdmission  # noqa: E402
from granikv.sglang_plugin import promotion  # noqa: E402
from granikv.sglang_plugin.allocator import HotColdTokenAllocator  # noqa: E402
from granikv.sglang_plugin.radix_cache import GraniRadixCache  # noqa: E402


@pytest.fixture
def server():
    admission = SharedAdmission(min_tokens=4)
    allocator = HotColdTokenAllocator(
        200, torch.int64, "cpu", None, False, hot_tokens=80, admission=admission
    )
    server = MarkedServer(allocator, GraniRadixCache)
    for last in (1, 2):
        assert server.admit([5, 6, 7, 8, 9, last], chunk=100)
    return server


@pytest.fixture
def events(server, monkeypatch):
    """What happens, in order, with the stream that it is on."""
    found, noted = record_streams(server.scheduler)
    monkeypatch.setattr(promotion, "remap", noted("rows", promotion.remap))
    monkeypatch.setattr(promotion, "copy_kv", noted("copy", promotion.copy_kv))
    return found


def test_rows_change_behind_the_running_step_and_kv_is_copied_before_the_next(server, events):
    promotion.promote_ready(server.scheduler)
    assert events == [
        "schedule waits for forward",
        "rows on schedule",
        "forward waits for schedule",
        "copy on forward",
    ]


def test_steps_that_do_not_overlap_have_one_stream(server, events):
    server.scheduler.enable_overlap = False
    promotion.promote_ready(server.scheduler)
    assert events == ["rows on schedule", "copy on schedule"]
