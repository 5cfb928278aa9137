"""`GRANIKV_OBSERVE`: run records of a server with SGLang's own backends, which stays what it is."""

from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from granikv.core.errors import ConfigError
from granikv.sglang_plugin.config import OBSERVE, LiveConfig
from granikv.sglang_plugin.hooks import Hook, check_in_place
from granikv.sglang_plugin.pools import StockPools
from granikv.sglang_plugin.watch import StepHooks, WatchedServer


class StockObserver(StepHooks[WatchedServer]):
    """Hooks that record a stock server; nothing else of GraniKV is in it."""

    def __init__(self) -> None:
        super().__init__()
        self._pools: StockPools | None = None
        self._hooks = (
            *super().hooks(),
            (
                "sglang.srt.mem_cache.radix_cache.RadixCache._delete_leaf",
                self.after_delete_leaf,
                HookType.AFTER,
            ),
        )

    def after_init(self, _result: None, scheduler: Any, *_: Any, **__: Any) -> None:
        """After `Scheduler.__init__`: begin to record.

        Raises:
            ConfigError: a variable or the folder is wrong, a hook has not taken hold, or steps of
                this server are more than prefill and decode.
        """
        settings = LiveConfig.from_environment()
        if problems := _without_records(scheduler.server_args):
            raise ConfigError(
                f"{OBSERVE} does not go with {', '.join(problems)}, whose steps run "
                "records cannot describe; leave one of them out"
            )
        check_in_place(self._hooks)
        self._pools = StockPools(scheduler.tree_cache.token_to_kv_pool_allocator)
        self._server = WatchedServer(scheduler, self._pools, settings, settings.observe)

    def after_delete_leaf(self, _result: None, tree: Any, *_: Any, **__: Any) -> None:
        """After `RadixCache._delete_leaf`: count what is evicted."""
        if self._pools is not None and self._of_tree(tree):
            self._pools.evicted_nodes += 1

    def hooks(self) -> tuple[Hook, ...]:
        """Those of every recording, and one that counts evictions."""
        return self._hooks


def _without_records(server_args: Any) -> list[str]:
    """What of a server's flags step records have no columns for, as the user wrote it."""
    found = {
        "speculative decoding": server_args.speculative_algorithm is not None,
        "--pp-size above 1": server_args.pp_size > 1,
        "--enable-dp-attention": server_args.enable_dp_attention,
        "--enable-pdmux": server_args.enable_pdmux,
        "disaggregated prefill": server_args.disaggregation_mode not in (None, "null"),
    }
    return [name for name, is_there in found.items() if is_there]
