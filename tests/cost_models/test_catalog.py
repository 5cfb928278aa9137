"""Shipped files by name, users' files by path, and helpful refusals."""

from pathlib import Path

import pytest
import yaml

from granikv.core.errors import ConfigError
from granikv.cost_models.catalog import shipped_names
from granikv.cost_models.hardware import load_hardware
from granikv.cost_models.models import load_model
from granikv.cost_models.params import load_params

GPUS = ["a100-sxm4-40gb", "a100-sxm4-80gb", "h100-sxm", "h200-sxm"]


def test_every_gpu_has_hardware_and_parameters() -> None:
    assert shipped_names("hardware", ".yaml") == GPUS
    assert shipped_names("params", ".json") == GPUS
    for gpu in GPUS:
        hardware = load_hardware(gpu)
        assert hardware.name == gpu == load_params(gpu).gpu
        numbers = set(type(hardware).model_fields) - {"name", "sources"}
        assert set(hardware.sources) == numbers


def test_unknown_name_gets_the_nearest_and_the_list() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean h200-sxm\? Known: a100.*h100"):
        load_hardware("h200-smx")
    with pytest.raises(ConfigError, match=r"Did you mean llama-3.1-8b\?"):
        load_model("llama3.1-8b")


def test_names_ignore_case() -> None:
    assert load_hardware("H200-SXM") == load_hardware("h200-sxm")


def test_own_hardware_file(tmp_path: Path) -> None:
    body = load_hardware("h200-sxm").model_dump() | {"name": "mine", "hbm_mib": 1000}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(body))
    assert load_hardware(str(path)).hbm_bytes == 1000 * 2**20


def test_hardware_file_with_a_typo_is_refused(tmp_path: Path) -> None:
    body = load_hardware("h200-sxm").model_dump() | {"hbm_mb": 1}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(body))
    with pytest.raises(ConfigError, match="hbm_mb"):
        load_hardware(str(path))
