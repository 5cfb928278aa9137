"""The dispatcher of a server: its cost table from the user's file or from shipped parameters."""

from typing import Any

import torch

from granikv.core.cost_table import CostTable
from granikv.core.dispatch import Dispatcher
from granikv.core.errors import ConfigError
from granikv.sglang_plugin.config import LiveConfig


def make_dispatcher(settings: LiveConfig, hf_config: Any, tp: int, device: Any) -> Dispatcher:
    """The dispatcher that the settings ask for.

    Args:
        settings: of the server.
        hf_config: the model's, as transformers gives it.
        tp: tensor-parallel degree.
        device: whose name says which parameters to use.

    Raises:
        ConfigError: the table cannot be read, or nothing is known about the GPU or model.
    """
    if settings.dispatch_table is not None:
        table = CostTable.load(settings.dispatch_table)
    else:
        table = _shipped_table(settings.gpu or _gpu_of(device), hf_config, tp)
    return Dispatcher(table, settings.dispatch, "off")


def _gpu_of(device: Any) -> str:
    from granikv.cost_models.hardware import hardware_name

    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "a CPU"
    try:
        return hardware_name(name)
    except ConfigError as error:
        raise ConfigError(
            f"{error} Set GRANIKV_GPU to the one most like it, or GRANIKV_DISPATCH_TABLE to a file "
            "of `granikv dispatch-table`."
        ) from None


def _shipped_table(gpu: str, hf_config: Any, tp: int) -> CostTable:
    from granikv.cost_models.dispatch_table import build_cost_table
    from granikv.cost_models.hardware import load_hardware
    from granikv.cost_models.models import from_hf_config
    from granikv.cost_models.params import load_params
    from granikv.cost_models.step import StepCost

    hardware = load_hardware(gpu)
    model = from_hf_config(hf_config.to_dict(), "served", "the server's config.json")
    return build_cost_table(StepCost(load_params(hardware.name), model, hardware, tp))
