"""The plugin in the real SGLang package: found, registered, hooked in, and honest about limits."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang.srt.mem_cache.radix_cache", reason="needs sglang 0.5.17")

from sglang.srt.mem_cache.allocator import (  # noqa: E402
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)

from granikv.core.admission import SharedAdmission  # noqa: E402
from granikv.core.errors import ConfigError  # noqa: E402
from granikv.sglang_plugin import plugin  # noqa: E402
from granikv.sglang_plugin.allocator import HotColdTokenAllocator  # noqa: E402
from granikv.sglang_plugin.server import build_attention  # noqa: E402

# In a process of its own: SGLang loads plugins once a process, and hooks stay.
_LOAD = """
import argparse, json, sys
from granikv.sglang_plugin import hooks, plugin
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.mem_cache.registry import registered_radix_cache_backends
from sglang.srt.server_args import ServerArgs

def missing():
    return [target for target, hook, _ in plugin._HOOKS if not hooks.is_in_place(target, hook)]

before = missing()
load_plugins()
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
flags = ["--model-path", "m", "--attention-backend", "granikv", "--radix-cache-backend", "granikv"]
parsed = parser.parse_args(flags)
print(json.dumps({
    "backends": registered_radix_cache_backends(), "before": before, "after": missing(),
    "parsed": parsed.attention_backend, "hooked": sorted(HookRegistry._patched),
}))
"""


def _load(**variables):
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("GRANIKV_", "SGLANG_"))}
    done = subprocess.run(
        [sys.executable, "-c", _LOAD],
        capture_output=True,
        text=True,
        check=False,
        env=plain | variables,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_sglang_finds_the_plugin_its_hooks_take_hold_and_flags_parse():
    loaded = _load()
    assert plugin.BACKEND in loaded["backends"]
    assert len(loaded["before"]) == len(plugin._HOOKS)
    assert loaded["after"] == []
    assert loaded["parsed"] == plugin.BACKEND


def test_a_stock_server_that_is_observed_has_the_hooks_that_record_and_no_other():
    loaded = _load(GRANIKV_OBSERVE="folder")
    assert [name.rpartition("sglang.srt.")[2] for name in loaded["hooked"]] == [
        "managers.schedule_batch.ScheduleBatch.retract_decode",
        "managers.scheduler.Scheduler.__init__",
        "managers.scheduler.Scheduler.on_idle",
        "managers.scheduler.Scheduler.process_batch_result",
        "managers.scheduler.Scheduler.run_batch",
        "mem_cache.common.release_kv_cache",
        "mem_cache.radix_cache.RadixCache._delete_leaf",
    ]
    assert loaded["parsed"] == plugin.BACKEND  # is refused by us, with a sentence


def test_our_backends_are_not_observed(monkeypatch):
    monkeypatch.setenv("GRANIKV_OBSERVE", "folder")
    with pytest.raises(ConfigError, match=r"GRANIKV_OBSERVE records .* `granikv serve --record`"):
        plugin.build_tree(_context())
    with pytest.raises(ConfigError, match=r"GRANIKV_OBSERVE records .* `granikv serve --record`"):
        build_attention(SimpleNamespace(server_args=SimpleNamespace(radix_cache_backend=None)))


def test_a_hook_that_has_not_taken_hold_stops_the_server():
    """SGLang logs what goes wrong while a plugin loads, and goes on."""
    with pytest.raises(ConfigError, match=r"could not hook into .*KVCacheConfigurator"):
        plugin.build_tree(_context())


def test_another_version_of_sglang_is_refused(monkeypatch):
    monkeypatch.setattr(plugin.sglang, "__version__", "0.5.18")
    with pytest.raises(ConfigError, match=r"0\.5\.17, found 0\.5\.18"):
        plugin.register()


def _build(backend="granikv", shared=None, built=None):
    built = built or TokenToKVPoolAllocator(100, torch.int64, "cpu", None, False)
    configurator = SimpleNamespace(server_args=SimpleNamespace(radix_cache_backend=backend))
    arguments = {"token_to_kv_pool": "pool", "token_to_kv_pool_allocator": shared}
    return plugin.build_allocator(lambda *_, **__: built, configurator, **arguments), built


def test_the_allocator_is_ours_only_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("GRANIKV_HOT_FRACTION", "0.35")
    monkeypatch.setenv("GRANIKV_ADMISSION", "shared")
    ours, _ = _build()
    assert isinstance(ours, HotColdTokenAllocator)
    assert (ours.size, ours.core.hot_tokens, ours.available_size()) == (100, 35, 65)
    assert ours.get_kvcache() == "pool"
    assert isinstance(ours.directory._admission, SharedAdmission)
    for choice in ({"backend": None}, {"shared": "a draft model's"}):
        theirs, built = _build(**choice)
        assert theirs is built


def test_an_allocator_that_cannot_be_replaced_stops_the_server():
    paged = PagedTokenToKVPoolAllocator(64, 16, torch.int64, "cpu", None, False)
    with pytest.raises(ConfigError, match=r"--page-size 1 .* PagedTokenToKVPoolAllocator"):
        _build(built=paged)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("GRANIKV_HOT_FRACTON", "0.2", "did you mean hot_fraction"),
        ("GRANIKV_HOT_FRACTION", "1.5", "hot_fraction: .* less than 1"),
        ("GRANIKV_ADMISSION", "valeu", "did you mean 'value'"),
    ],
)
def test_a_wrong_variable_is_named(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        _build()


_PLAIN = {
    "page_size": 1,
    "speculative_algorithm": None,
    "pp_size": 1,
    "enable_dp_attention": False,
    "disaggregation_mode": "null",
    "kv_cache_dtype": "auto",
    "enable_lora": None,
    "enable_two_batch_overlap": False,
    "enable_pdmux": False,
    "enable_streaming_session": False,
}
_FLAGS = {
    "disable_radix_cache": False,
    "enable_hierarchical_cache": False,
    "is_hybrid_swa": False,
    "is_hybrid_ssm": False,
}


def _context(**changes):
    flags = {**_FLAGS, **{name: value for name, value in changes.items() if name in _FLAGS}}
    server = {**_PLAIN, **{name: value for name, value in changes.items() if name in _PLAIN}}
    tp_size = changes.get("tp_size", 1)
    return SimpleNamespace(server_args=SimpleNamespace(**server), tp_size=tp_size, **flags)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"page_size": 64}, "--page-size 64"),
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding"),
        ({"pp_size": 2}, "--pp-size"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"disaggregation_mode": "decode"}, "disaggregated"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"enable_streaming_session": True}, "--enable-streaming-session"),
        ({"disable_radix_cache": True}, "--disable-radix-cache"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"is_hybrid_swa": True}, "sliding windows"),
        ({"is_hybrid_ssm": True}, "state-space"),
    ],
)
def test_what_does_not_go_with_slabs_is_refused_by_name(change, named):
    with pytest.raises(ConfigError, match=named):
        plugin.build_tree(_context(**change))


def test_a_pool_that_is_sized_late_is_refused(monkeypatch):
    monkeypatch.setenv("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "1")
    with pytest.raises(ConfigError, match="SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1"):
        plugin.build_tree(_context())


def test_ranks_may_not_decide_by_their_own_clocks(monkeypatch):
    """A policy that weighs seconds is refused with the name of one that does not."""
    monkeypatch.setattr(plugin, "check_in_place", lambda _: None)
    monkeypatch.setenv("GRANIKV_ADMISSION", "value")
    with pytest.raises(ConfigError, match="GRANIKV_ADMISSION=shared"):
        plugin.build_tree(_context(tp_size=2))
    monkeypatch.delenv("GRANIKV_ADMISSION")  # the default
    with pytest.raises(AttributeError, match="params"):  # it goes on to build the tree
        plugin.build_tree(_context(tp_size=2))


def test_nothing_of_a_plain_server_is_refused():
    context = _context()
    assert plugin.unsupported(context.server_args, context) == []


def test_the_flags_it_looks_at_are_sglangs():
    """A flag that was renamed would be an AttributeError only once a server starts."""
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.server_args import ServerArgs

    assert {*_PLAIN, "radix_cache_backend"} <= set(ServerArgs.__dataclass_fields__)
    assert {*_FLAGS, "tp_size"} <= set(TreeCacheBuildContext.__dataclass_fields__)
