"""`granikv serve`: SGLang's own server with GraniKV in it."""

import os
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from granikv.cli.screen import say
from granikv.core.errors import ConfigError
from granikv.core.validation import explain


def command(
    context: typer.Context,
    *,
    model: Annotated[str, typer.Argument(help="Model folder or Hugging Face name.")],
    hot_fraction: Annotated[
        float, typer.Option("--hot-fraction", "--fp", help="Share of the KV slots that is HOT.")
    ] = 0.2,
    admission: Annotated[
        str, typer.Option(help="Which prefixes get a slab: paper, shared or value.")
    ] = "shared",
    dispatch: Annotated[
        str,
        typer.Option(help="cost, threshold, paged, cascade, dense, cascade_global, cascade_cold."),
    ] = "cost",
    repartition: Annotated[
        str,
        typer.Option(help="What moves the boundary: static, watermark, marginal or FILE.py:NAME."),
    ] = "static",
    policy_interval_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds between two looks of that policy.")
    ] = 1.0,
    move_tokens_per_step: Annotated[
        int, typer.Option(min=1, help="Most tokens that a move copies between two steps.")
    ] = 4096,
    kernels: Annotated[
        str, typer.Option(help="granikv, or fa3 for FlashAttention-3's pair of kernels.")
    ] = "granikv",
    deterministic: Annotated[
        bool, typer.Option(help="The same bits whatever is promoted or moved; shares no reads.")
    ] = False,
    gpu: Annotated[
        str | None, typer.Option(help="Whose parameters the dispatcher uses; found by default.")
    ] = None,
    dispatch_table: Annotated[
        Path | None, typer.Option(help="A file of `granikv dispatch-table` to use instead.")
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Folder for run records.")] = None,
    check_steps: Annotated[
        int, typer.Option(min=0, help="Of so many steps one is computed twice; 0 for none.")
    ] = 0,
    check_against: Annotated[
        str, typer.Option(help="What it is compared with: paged (ours) or fa3.")
    ] = "paged",
) -> None:
    """Serve MODEL with SGLang and GraniKV; SGLang's own flags follow after `--`."""
    from granikv.core.policies import make_policy
    from granikv.sglang_plugin.config import BACKEND, VARIABLES, LiveConfig

    chosen: dict[str, Any] = {
        "hot_fraction": hot_fraction, "admission": admission, "dispatch": dispatch,
        "repartition": repartition, "policy_interval_s": policy_interval_s,
        "move_tokens_per_step": move_tokens_per_step, "kernels": kernels,
        "deterministic": deterministic, "gpu": gpu, "dispatch_table": dispatch_table,
        "record": record, "check_steps": check_steps, "check_against": check_against,
    }  # fmt: skip
    try:
        settings = LiveConfig.model_validate(
            {name: value for name, value in chosen.items() if value is not None}
        )
    except ValidationError as error:
        raise ConfigError(f"Cannot serve like this: {explain(error, LiveConfig)}.") from None
    make_policy(repartition)
    _check_sglang()
    others = {k: v for k, v in os.environ.items() if not k.startswith(VARIABLES)}
    line = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", model,
        "--attention-backend", BACKEND, "--radix-cache-backend", BACKEND, *context.args,
    ]  # fmt: skip
    say(shlex.join(line[1:]))
    os.execve(sys.executable, line, others | settings.to_variables())


def _check_sglang() -> None:
    from granikv.sglang_plugin.config import SGLANG_VERSION

    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = "none"
    if found != SGLANG_VERSION:
        raise ConfigError(
            f"GraniKV serves with SGLang {SGLANG_VERSION}, found {found}; "
            "pip install 'granikv[sglang]'."
        )
