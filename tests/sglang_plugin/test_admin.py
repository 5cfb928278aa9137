"""Other choices on a running server: what is accepted, and what then holds."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang.srt.mem_cache.radix_cache", reason="needs sglang 0.5.17")

from tree_support import MarkedServer  # noqa: E402

from granikv.core.admission import PaperAdmission, SharedAdmission  # noqa: E402
from granikv.core.errors import ConfigError  # noqa: E402
from granikv.core.marginal import MarginalPolicy  # noqa: E402
from granikv.sglang_plugin import admin  # noqa: E402
from granikv.sglang_plugin.allocator import HotColdTokenAllocator  # noqa: E402
from granikv.sglang_plugin.config import LiveConfig  # noqa: E402
from granikv.sglang_plugin.radix_cache import GraniRadixCache  # noqa: E402
from granikv.sglang_plugin.repartition import LiveRepartitioner  # noqa: E402


@pytest.fixture
def scheduler(monkeypatch):
    allocator = HotColdTokenAllocator(
        200, torch.int64, "cpu", None, False, hot_tokens=50, admission=SharedAdmission()
    )
    scheduler = MarkedServer(allocator, GraniRadixCache).scheduler
    planner = SimpleNamespace(dispatcher=SimpleNamespace(table="table", row_split="off"))
    backend = SimpleNamespace(decode_backend=SimpleNamespace(planner=planner))
    scheduler.planner = planner
    scheduler.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend))
    scheduler.ps = SimpleNamespace(tp_size=1)
    scheduler.model_config = SimpleNamespace(context_len=1000)
    scheduler.is_fully_idle = lambda: True

    def flush():
        scheduler.tree_cache.reset()
        allocator.clear()

    scheduler.flush_cache = flush
    scheduler.tree_cache.repartitioner = LiveRepartitioner(scheduler, LiveConfig())
    monkeypatch.setattr(
        admin,
        "Dispatcher",
        lambda table, choice, split: SimpleNamespace(table=table, choice=choice, row_split=split),
    )
    return scheduler


def _set(scheduler, **choices):
    request = SimpleNamespace(server_args=admin.to_numbers(choices))
    return admin.set_internal_state(None, scheduler, request).updated


def test_choices_take_hold(scheduler):
    assert _set(scheduler, hot_fraction=0.7, admission="paper", dispatch="cascade_cold")
    allocator = scheduler.token_to_kv_pool_allocator
    assert (allocator.core.hot_tokens, allocator.available_size()) == (140, 60)
    assert isinstance(allocator.directory._admission, PaperAdmission)
    assert vars(scheduler.planner.dispatcher) == {
        "table": "table", "choice": "cascade_cold", "row_split": "off",
    }  # fmt: skip
    assert scheduler.max_req_len == 58
    assert _set(scheduler, repartition="marginal")
    assert isinstance(scheduler.tree_cache.repartitioner._policy, MarginalPolicy)
    assert _set(scheduler, dispatch="paged")
    assert scheduler.planner.dispatcher.choice == "paged"
    assert allocator.core.hot_tokens == 140


@pytest.mark.parametrize(
    "numbers",
    [
        {"granikv_hot_fraction": 0},
        {"granikv_hot_fraction": 1.0},
        {"granikv_admission": 1.5},
        {"granikv_admission": -1},
        {"granikv_dispatch": 99},
        {"granikv_hot_fracton": 0.5},
    ],
)
def test_what_is_no_choice_changes_nothing(scheduler, numbers):
    answer = admin.set_internal_state(None, scheduler, SimpleNamespace(server_args=numbers))
    assert not answer.updated
    assert scheduler.token_to_kv_pool_allocator.core.hot_tokens == 50


def test_a_busy_server_keeps_what_it_has(scheduler):
    scheduler.is_fully_idle = lambda: False
    assert not _set(scheduler, hot_fraction=0.7)
    assert scheduler.token_to_kv_pool_allocator.core.hot_tokens == 50


def test_ranks_may_not_be_told_to_read_their_clocks(scheduler):
    scheduler.ps.tp_size = 2
    assert not _set(scheduler, admission="value")
    assert _set(scheduler, admission="shared")


def test_other_state_is_sglangs(scheduler):
    request = SimpleNamespace(server_args={"pp_max_micro_batch_size": 8})
    assert admin.set_internal_state(lambda *_: "theirs", scheduler, request) == "theirs"


def test_a_name_that_is_none_is_refused_before_it_is_sent():
    with pytest.raises(ConfigError, match=r"admission=shard .* use paper, shared, value"):
        admin.to_numbers({"admission": "shard"})
    with pytest.raises(ConfigError, match=r"kernels=fa3 .* use hot_fraction, admission, dispatch"):
        admin.to_numbers({"kernels": "fa3"})
