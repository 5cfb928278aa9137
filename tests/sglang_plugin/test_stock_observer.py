"""Run records of a server with SGLang's own tree: what they say, and who gets none."""

import json
from array import array
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang.srt.mem_cache.radix_cache", reason="needs sglang 0.5.17")

import observer_support as support  # noqa: E402
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

from granikv.core.errors import ConfigError  # noqa: E402
from granikv.core.step import StepPlan  # noqa: E402
from granikv.sglang_plugin import stock_observer  # noqa: E402
from granikv.sglang_plugin.stock_observer import StockObserver  # noqa: E402
from granikv.traces.live_records import convert  # noqa: E402
from granikv.traces.records import read_run  # noqa: E402

SIZE = 160


@pytest.fixture
def stock():
    """SGLang's tree; graphs of 1, 4 and 8 rows."""
    allocator = TokenToKVPoolAllocator(SIZE, torch.int64, "cpu", None, False)
    tree = RadixCache(CacheInitParams(False, None, allocator, 1))
    runner = SimpleNamespace(decode_cuda_graph_runner=SimpleNamespace(capture_bs=[1, 4, 8]))
    return support.make_scheduler(tree, tp_worker=SimpleNamespace(model_runner=runner))


@pytest.fixture
def observer(monkeypatch, tmp_path, stock):
    """Of that server; the hooks are called here, not by SGLang."""
    monkeypatch.setenv("GRANIKV_OBSERVE", str(tmp_path))
    monkeypatch.setattr("granikv.sglang_plugin.watch._at_exit", lambda _: None)
    monkeypatch.setattr(stock_observer, "check_in_place", lambda _: None)
    observer = StockObserver()
    observer.after_init(None, stock)
    return observer


def run(observer, scheduler, batch, has_graph=False):
    result = SimpleNamespace(can_run_cuda_graph=has_graph)
    assert observer.around_run_batch(lambda *_: result, scheduler, batch) is result
    observer.after_process_batch_result(None, scheduler, batch)


def recorded(observer, folder):
    observer.close()
    convert(folder)
    found = read_run(folder)
    return found.header, found.steps.collect(), found.requests.collect()


def test_rows_read_all_their_tokens_in_the_graph_that_holds_them(observer, stock, tmp_path):
    run(observer, stock, support.extend(1, (12, 0), (3, 9)))
    run(observer, stock, support.decode(2, rows=3), has_graph=True)
    run(observer, stock, support.decode(3, rows=3))
    header, steps, _ = recorded(observer, tmp_path)
    assert (header.kind, header.size_tokens, header.hot_tokens) == ("live", SIZE, 0)
    assert header.flags["GRANIKV_OBSERVE"] == str(tmp_path)
    columns = ("kind", "rows", "padded_rows", "prefill_tokens", "private_tokens")
    assert steps.select(columns).rows() == [
        ("extend", 2, 2, 15, 0), ("decode", 3, 4, 0, 60), ("decode", 3, 3, 0, 60),
    ]  # fmt: skip
    assert steps["segments_json"].to_list() == ["[]"] * 3
    paged = StepPlan(()).to_json()
    plans = [json.loads(plan) for plan in steps["plan_json"]]
    assert plans == [{"extend": [[12, 0], [3, 9]]}, paged, paged]


def test_a_mixed_step_counts_its_decoding_rows_as_one_new_token_each(observer, stock, tmp_path):
    """SGLang says so of the batch."""
    batch = support.batch_of(
        ForwardMode.MIXED, 1, 3, extend_lens=[8, 1, 1], prefix_lens=[0, 20, 30]
    )  # fmt: skip
    run(observer, stock, batch)
    _, steps, _ = recorded(observer, tmp_path)
    assert steps.select("kind", "rows", "prefill_tokens").rows() == [("extend", 3, 10)]
    assert json.loads(steps["plan_json"][0]) == {"extend": [[8, 0], [1, 20], [1, 30]]}


def test_pools_are_those_of_sglang(observer, stock, tmp_path, monkeypatch):
    tree = stock.tree_cache
    allocator = tree.token_to_kv_pool_allocator
    for first in (0, 100):
        key = RadixKey(array("q", range(first, first + 20)))
        tree.insert(InsertParams(key=key, value=allocator.alloc(20)))
    run(observer, stock, support.decode(1))
    delete = RadixCache._delete_leaf
    monkeypatch.setattr(
        RadixCache,
        "_delete_leaf",
        lambda tree, node: observer.after_delete_leaf(delete(tree, node), tree, node),
    )
    tree.evict(EvictParams(num_tokens=20))
    batch = SimpleNamespace(tree_cache=tree)
    observer.after_retract_decode(([None, None], 0.5, []), batch)
    run(observer, stock, support.decode(2))
    _, steps, _ = recorded(observer, tmp_path)
    assert steps["cold_free"].to_list() == [SIZE - 40, SIZE - 20]
    assert steps["evictions"].to_list() == [0, 1]
    assert steps["retractions"].to_list() == [0, 2]
    for column in ("hot_used", "hot_misses", "migrated_tokens"):
        assert steps[column].to_list() == [0, 0]


def test_requests_are_recorded_when_they_end(observer, stock, tmp_path):
    tree = stock.tree_cache
    node = tree.root_node
    observer.after_release_kv_cache(None, support.request("7", node), tree)
    observer.after_release_kv_cache(None, support.request("8", node, 1, True), tree)
    _, _, requests = recorded(observer, tmp_path)
    columns = ("id", "prompt_tokens", "output_tokens", "cached_tokens", "hot_tokens", "status")
    assert requests.select(columns).rows() == [
        (7, 12, 3, 10, 0, "finished"), (8, 12, 1, 10, 0, "aborted"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding"),
        ({"pp_size": 2}, "--pp-size"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"disaggregation_mode": "decode"}, "disaggregated"),
    ],
)
def test_steps_that_records_cannot_describe_are_refused(observer, stock, flags, named):
    for name, value in flags.items():
        object.__setattr__(stock.server_args, name, value)
    with pytest.raises(ConfigError, match=f"GRANIKV_OBSERVE does not go with {named}"):
        observer.after_init(None, stock)


def test_a_wrong_variable_stops_the_server(observer, stock, monkeypatch):
    monkeypatch.setenv("GRANIKV_OBSERV", "folder")
    with pytest.raises(ConfigError, match="unknown key observ, did you mean observe"):
        observer.after_init(None, stock)


def test_a_hook_that_has_not_taken_hold_stops_the_server(stock, monkeypatch, tmp_path):
    monkeypatch.setenv("GRANIKV_OBSERVE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"could not hook into .*RadixCache._delete_leaf"):
        StockObserver().after_init(None, stock)
