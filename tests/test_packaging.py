"""The wheel: built from the sdist, it holds the data files and only `granikv` at the top."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

import granikv

_ROOT = Path(__file__).resolve().parent.parent
_DATA_FOLDERS = ("cost_models/data", "traces/data")


def _run(arguments: list[str], cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist of this checkout and the wheel that was made from it."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    shutil.copytree(
        _ROOT,
        source,
        symlinks=True,
        ignore=shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests"),
    )
    _run(["-m", "build", "--no-isolation", "--outdir", str(folder)], source)
    return folder


def _wheel_names(built: Path) -> list[str]:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if not name.endswith("/")]


def _shipped(folder: str, pattern: str) -> set[str]:
    return {
        path.relative_to(_ROOT / folder).as_posix()
        for path in (_ROOT / folder).rglob(pattern)
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_only_granikv_is_at_the_top(built: Path) -> None:
    tops = {PurePosixPath(name).parts[0] for name in _wheel_names(built)}
    assert tops == {"granikv", f"granikv-{granikv.__version__}.dist-info"}


@pytest.mark.parametrize("folder", _DATA_FOLDERS)
def test_all_data_files_are_in_the_wheel(built: Path, folder: str) -> None:
    prefix = f"granikv/{folder}/"
    inside = {n.removeprefix(prefix) for n in _wheel_names(built) if n.startswith(prefix)}
    assert inside == _shipped(folder, "*")
    assert inside


def test_all_modules_are_in_the_wheel(built: Path) -> None:
    names = set(_wheel_names(built))
    for folder in ("cost_models", "kernels", "sim", "traces", "validate"):
        assert {f"granikv/{folder}/{name}" for name in _shipped(folder, "*.py")} <= names
    for folder in ("core", "planner", "cli"):
        modules = _shipped(f"granikv/{folder}", "*.py")
        assert {f"granikv/{folder}/{name}" for name in modules} <= names
    assert "granikv/py.typed" in names
    files = {PurePosixPath(name).name for name in names}
    assert not [name for name in files if name.startswith("test") or name == "conftest.py"]


def test_the_wheel_names_the_command_and_its_licence(built: Path) -> None:
    info = f"granikv-{granikv.__version__}.dist-info"
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert (
            "granikv = granikv.cli.main:main" in archive.read(f"{info}/entry_points.txt").decode()
        )
        metadata = archive.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert f"Version: {granikv.__version__}" in metadata
    assert f"{info}/licenses/LICENSE" in _wheel_names(built)


def test_the_sdist_holds_files_and_no_links(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        links = [member.name for member in archive if member.issym() or member.islnk()]
    assert links == []


def test_an_unpacked_wheel_runs_from_an_empty_folder(built: Path, tmp_path: Path) -> None:
    """Imports, data files and a simulation, with nothing of the checkout in reach."""
    (wheel,) = built.glob("*.whl")
    target, empty = tmp_path / "target", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    code = (
        "import granikv\n"
        "from granikv.cost_models.models import load_model\n"
        "from granikv.cost_models.params import load_params\n"
        "from granikv.cost_models.step import StepCost\n"
        "from granikv.sim.config import ServerConfig\n"
        "from granikv.sim.run import MemorySink, simulate\n"
        "from granikv.traces.request import Request, Run\n"
        "cost = StepCost(load_params('h200-sxm'), load_model('llama-3.1-8b'))\n"
        "requests = [Request(i, 0.01 * i, (Run(1, 600), Run(2 + i, 9)), 5) for i in range(9)]\n"
        "outcome = simulate(requests, ServerConfig(size_tokens=9000), cost, MemorySink())\n"
        "print(granikv.__file__, outcome.finished)\n"
    )
    printed = _run(["-P", "-c", code], empty, PYTHONPATH=str(target))
    assert printed.split() == [str(target / "granikv" / "__init__.py"), "9"]
