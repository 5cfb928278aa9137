"""Tensor-parallel ranks make the same calls at other times; they must fill the same slots."""

import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang.srt.mem_cache.radix_cache", reason="needs sglang 0.5.17")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # noqa: E402
from tree_support import PROMPT, MarkedServer  # noqa: E402

from granikv.core.admission import PaperAdmission, SharedAdmission  # noqa: E402
from granikv.sglang_plugin.allocator import HotColdTokenAllocator  # noqa: E402
from granikv.sglang_plugin.promotion import promote_ready  # noqa: E402
from granikv.sglang_plugin.radix_cache import GraniRadixCache  # noqa: E402

STEP = st.one_of(
    st.tuples(st.just("admit"), PROMPT),
    st.tuples(st.just("decode"), st.integers(0, 1)),
    st.tuples(st.just("finish"), st.booleans()),
    st.tuples(st.just("evict"), st.integers(1, 30)),
    st.tuples(st.just("promote"), st.none()),
)


def _rank(admission, seconds):
    allocator = HotColdTokenAllocator(
        120, torch.int64, "cpu", None, False, hot_tokens=40, admission=admission
    )
    clock = iter(seconds)
    return MarkedServer(allocator, lambda params: GraniRadixCache(params, lambda: next(clock)))


def _do(server, step, argument):
    if step == "admit" and server.free_rows:
        server.admit(argument, chunk=7)
    elif step == "decode":
        for req in list(server.running):
            server.decode(req, argument)
    elif step == "finish" and server.running:
        server.finish(server.running[0], argument)
    elif step == "evict":
        server.tree.evict(EvictParams(num_tokens=argument))
    elif step == "promote":
        promote_ready(server.scheduler)


def _places(server):
    """Slots of every HOT node, by the tokens of its path."""
    return {
        tuple(token for node in server.tree.path(hot) for token in node.key.token_ids): tuple(
            hot.value.tolist()
        )
        for hot in server.tree.hot_nodes()
    }


@given(
    st.sampled_from([SharedAdmission(min_tokens=2), PaperAdmission()]),
    st.lists(STEP, min_size=5, max_size=40),
    st.randoms(use_true_random=False),
)
def test_ranks_fill_the_same_slots_whatever_their_clocks_say(admission, steps, random):
    jumps = (random.uniform(1e-6, 3.0) for _ in itertools.count())
    ranks = [_rank(admission, itertools.count(1.0)), _rank(admission, itertools.accumulate(jumps))]
    for step, argument in steps:
        for rank in ranks:
            _do(rank, step, argument)
        assert _places(ranks[0]) == _places(ranks[1])
        cold_free = [rank.allocator.available_size() for rank in ranks]
        assert cold_free[0] == cold_free[1]
