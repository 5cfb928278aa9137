"""Other choices without a restart: hot fraction, policies and dispatch of an idle server.

They travel in SGLang's own request `set_internal_state`, which carries numbers only: a name is sent
as its place among the names of its option.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

from granikv.core.admission import ADMISSIONS, make_admission
from granikv.core.dispatch import DISPATCH_CHOICES, DispatchChoice, Dispatcher
from granikv.core.errors import ConfigError
from granikv.core.policies import POLICIES
from granikv.sglang_plugin.radix_cache import GraniRadixCache

logger = logging.getLogger(__name__)

READS_CLOCK = "value"  # the admission whose decisions depend on seconds, which differ by rank

_PREFIX = "granikv_"
_NAMES: dict[str, tuple[str, ...]] = {
    "admission": ADMISSIONS,
    "dispatch": DISPATCH_CHOICES,
    "repartition": POLICIES,
}


def to_numbers(choices: Mapping[str, str | float]) -> dict[str, float]:
    """The `server_args` of a request that makes these choices.

    Raises:
        ConfigError: an option cannot be changed like this, or has no such value.
    """
    numbers: dict[str, float] = {}
    for option, value in choices.items():
        if option == "hot_fraction":
            numbers[_PREFIX + option] = float(value)
        elif option in _NAMES and value in _NAMES[option]:
            numbers[_PREFIX + option] = _NAMES[option].index(str(value))
        else:
            names = ", ".join(_NAMES.get(option, ("hot_fraction", *_NAMES)))
            raise ConfigError(f"{option}={value} cannot be set on a running server; use {names}")
    return numbers


def set_internal_state(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Around `Scheduler.set_internal_state`: our own options, the rest as in SGLang."""
    ours = {
        name.removeprefix(_PREFIX): value
        for name, value in request.server_args.items()
        if name.startswith(_PREFIX)
    }
    if not ours or not isinstance(scheduler.tree_cache, GraniRadixCache):
        return original(scheduler, request)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    updated = scheduler.is_fully_idle() and _are_valid(ours, scheduler.ps.tp_size)
    if updated:
        _apply(scheduler, ours)
    else:
        logger.warning("GraniKV keeps its settings: %s needs an idle server and valid values", ours)
    return SetInternalStateReqOutput(updated=updated)


def limit_requests(scheduler: Any) -> None:
    """Refuse, with SGLang's own sentence, what COLD could never hold: HOT is the tree's alone.

    While the boundary moves, what the smaller COLD could not.
    """
    core = scheduler.token_to_kv_pool_allocator.core
    hot_tokens = core.hot_tokens if core.move is None else core.move.new_hot_tokens
    cold_tokens = core.size_tokens - max(core.hot_tokens, hot_tokens)
    longest = min(scheduler.model_config.context_len - 1, cold_tokens - 2)
    scheduler.max_req_len = longest
    scheduler.max_req_input_len = longest - 5  # the room SGLang leaves


def _are_valid(choices: Mapping[str, float], tp_size: int) -> bool:
    named = {option: value for option, value in choices.items() if option != "hot_fraction"}
    if any(value not in range(len(_NAMES.get(option, ()))) for option, value in named.items()):
        return False
    if tp_size > 1 and named.get("admission") == ADMISSIONS.index(READS_CLOCK):
        return False
    return 0 < choices.get("hot_fraction", 0.5) < 1


def _apply(scheduler: Any, choices: Mapping[str, float]) -> None:
    if "dispatch" in choices:
        planner = scheduler.tp_worker.model_runner.attn_backend.decode_backend.planner
        old, choice = planner.dispatcher, DISPATCH_CHOICES[int(choices["dispatch"])]
        planner.dispatcher = Dispatcher(old.table, cast(DispatchChoice, choice), old.row_split)
    allocator = scheduler.token_to_kv_pool_allocator
    if "hot_fraction" in choices:
        allocator.configure(hot_tokens=int(choices["hot_fraction"] * allocator.size))
    if "admission" in choices:
        allocator.configure(admission=make_admission(ADMISSIONS[int(choices["admission"])]))
    if "repartition" in choices:
        scheduler.tree_cache.repartitioner.choose(POLICIES[int(choices["repartition"])])
    scheduler.flush_cache()
    limit_requests(scheduler)
    words = {
        option: _NAMES[option][int(value)] if option in _NAMES else value
        for option, value in choices.items()
    }
    logger.info("GraniKV settings changed: %s", words)
