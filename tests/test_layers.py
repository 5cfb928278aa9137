"""Who may import whom: arrows only point down, and the core of it all needs no accelerator."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import granikv

_PACKAGE = Path(granikv.__file__).parent

# What a folder's modules may import beside the standard library and itself; a name allows what is
# below it. What stands in `_LAZY` is allowed inside functions only.
_ALLOWED: dict[str, frozenset[str]] = {
    "core": frozenset({"numpy"}),
    "kernels": frozenset({"numpy", "torch", "triton", "granikv.cost_models.rows"}),
    "cost_models": frozenset({"numpy", "scipy", "polars", "pydantic", "yaml", "granikv.core"}),
    "traces": frozenset({"numpy", "polars", "pydantic", "yaml", "granikv.core"}),
    "sim": frozenset(
        {
            "simpy",
            "numpy",
            "polars",
            "pydantic",
            "granikv.core",
            "granikv.cost_models",
            "granikv.traces",
        }
    ),
    "planner": frozenset(
        {
            "numpy",
            "scipy",
            "polars",
            "pydantic",
            "plotly",
            "joblib",
            "granikv.core",
            "granikv.cost_models",
            "granikv.traces",
            "granikv.sim",
        }
    ),
    "sglang_plugin": frozenset(
        {"numpy", "pydantic", "torch", "sglang", "granikv.core", "granikv.kernels"}
    ),
    "validate": frozenset(
        {
            "numpy",
            "scipy",
            "polars",
            "pydantic",
            "plotly",
            "joblib",
            "granikv.core",
            "granikv.cost_models",
            "granikv.traces",
            "granikv.sim",
        }
    ),
    "cli": frozenset(
        {
            "numpy",
            "polars",
            "pydantic",
            "rich",
            "typer",
            "granikv.core",
            "granikv.cost_models",
            "granikv.planner",
            "granikv.sim",
            "granikv.traces",
            "granikv.validate",
        }
    ),
}
_LAZY: dict[str, frozenset[str]] = {
    "cost_models": frozenset({"plotly", "aiconfigurator_core"}),
    "kernels": frozenset({"sgl_kernel", "flashinfer", "flash_attn", "pynvml"}),
    "sglang_plugin": frozenset({"granikv.cost_models"}),
    "validate": frozenset({"aiohttp", "safetensors", "sglang", "torch", "granikv.sglang_plugin"}),
    "cli": frozenset({"granikv.kernels", "granikv.sglang_plugin"}),
}
# The places in core that speak about what a user chose or wrote in a file.
_CORE_EDGE = {name: frozenset({"pydantic"}) for name in ("config.py", "validation.py")}

_BARE_NAMES = ("sim", "kernels", "cost_models", "traces", "validate", "core", "planner", "cli")


def _modules() -> Iterator[tuple[str, Path]]:
    """Every module below `granikv`, through the links, with the folder that it belongs to."""
    for folder, _, files in os.walk(_PACKAGE, followlinks=True):
        relative = Path(folder).relative_to(_PACKAGE)
        for name in files:
            if name.endswith(".py"):
                yield (relative.parts[0] if relative.parts else ""), Path(folder, name)


_MODULES = sorted(_modules())


def _imports(path: Path) -> Iterator[tuple[str, bool, int]]:
    """(imported name, whether inside a function, line); `from a import b` counts as `a.b`."""
    tree = ast.parse(path.read_text(), str(path))
    functions = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        is_lazy = any(first < node.lineno <= last for first, last in functions)
        for name in names:
            yield name, is_lazy, node.lineno


def _is_within(name: str, allowed: frozenset[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)


def test_every_folder_has_a_rule() -> None:
    assert {folder for folder, _ in _MODULES} - {""} <= set(_ALLOWED)
    assert {"core", "sim", "cost_models", "traces", "planner", "cli"} <= {f for f, _ in _MODULES}


@pytest.mark.parametrize("folder", sorted(_ALLOWED))
def test_imports_point_down(folder: str) -> None:
    own = frozenset({f"granikv.{folder}", "granikv.__version__"})
    wrong = []
    for _, path in (module for module in _MODULES if module[0] == folder):
        edge = _CORE_EDGE.get(path.name, frozenset()) if folder == "core" else frozenset()
        for name, is_lazy, line in _imports(path):
            allowed = _ALLOWED[folder] | own | edge
            if is_lazy:
                allowed |= _LAZY.get(folder, frozenset())
            if name.split(".")[0] in sys.stdlib_module_names or _is_within(name, allowed):
                continue
            wrong.append(f"{path.relative_to(_PACKAGE)}:{line} imports {name}")
    assert wrong == []


def test_nobody_imports_a_folder_by_its_bare_name_or_relatively() -> None:
    wrong = [
        f"{path.relative_to(_PACKAGE)}:{line} imports {name}"
        for _, path in _MODULES
        for name, _, line in _imports(path)
        if name.startswith(".") or name.split(".")[0] in _BARE_NAMES
    ]
    assert wrong == []


def test_the_package_itself_imports_nothing() -> None:
    assert list(_imports(_PACKAGE / "__init__.py")) == []


def test_core_reads_no_clock_and_rolls_no_dice() -> None:
    """Time is an argument and every rank must give the same answers."""
    forbidden = frozenset({"time", "datetime", "random", "secrets", "uuid", "numpy.random"})
    wrong = [
        f"{path.name}:{line} imports {name}"
        for folder, path in _MODULES
        if folder == "core"
        for name, _, line in _imports(path)
        if _is_within(name, forbidden)
    ]
    assert wrong == []


_LOAD_ALL = """
import importlib, importlib.util, pkgutil, sys
import granikv.core, granikv.sim
for package in (granikv.core, granikv.sim):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
heavy = {name.split(".")[0] for name in sys.modules} & {"torch", "triton", "sglang"}
assert not heavy, heavy
"""

_FIND_BARE = """
import importlib.util
from pathlib import Path
import granikv
home = Path(granikv.__file__).resolve().parent.parent
for name in {names!r}:
    spec = importlib.util.find_spec(name)
    assert spec is None or not Path(str(spec.origin)).resolve().is_relative_to(home), spec
"""


def _python(code: str, cwd: Path) -> None:
    """Run code in a new interpreter that sees what is installed, and nothing of this folder."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_core_and_sim_load_without_torch(tmp_path: Path) -> None:
    _python(_LOAD_ALL, tmp_path)


def test_the_folders_are_not_importable_by_their_bare_names(tmp_path: Path) -> None:
    _python(_FIND_BARE.format(names=_BARE_NAMES), tmp_path)
