"""Every command has help and is documented; help loads nothing heavy."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from granikv.cli.main import app

ROOT = Path(__file__).parents[2]


def walk(command: Any, path: str = "granikv") -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", {})
    if not children:
        yield path, command
    for name, child in children.items():
        yield from walk(child, f"{path} {name}")


COMMANDS = dict(walk(typer.main.get_command(app)))


def test_all_commands_are_there():
    assert sorted(COMMANDS) == [
        "granikv bench kernels",
        "granikv bench serve",
        "granikv bench sim",
        "granikv calibrate",
        "granikv dispatch-table",
        "granikv fit",
        "granikv plan",
        "granikv policies",
        "granikv serve",
        "granikv simulate",
        "granikv trace convert",
        "granikv trace cut",
        "granikv trace generate",
        "granikv trace info",
        "granikv validate ablation",
        "granikv validate paper",
        "granikv validate runs",
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_command_has_help(granikv, name):
    ended = granikv(*name.split()[1:], "--help")
    assert ended.code == 0
    assert COMMANDS[name].help.split(".")[0] in " ".join(ended.out.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help(name):
    options = [p for p in COMMANDS[name].params if p.name != "help"]
    assert options
    assert all(option.help for option in options)


@pytest.mark.parametrize("page", ["README.md", "docs/cli.md"])
@pytest.mark.parametrize("name", COMMANDS)
def test_command_is_documented(name, page):
    assert name in (ROOT / page).read_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_documented(name):
    page = (ROOT / "docs/cli.md").read_text()
    flags = {flag for p in COMMANDS[name].params for flag in p.opts if flag.startswith("--")}
    assert {flag for flag in flags if f"`{flag}" not in page} <= {"--help"}


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from granikv.cli.main import main; main(['plan', '--help']);"
        "heavy = {'numpy', 'polars', 'scipy', 'plotly', 'simpy', 'yaml', 'joblib'};"
        "sys.exit(f'loaded {heavy & set(sys.modules)}' if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_version(granikv):
    ended = granikv("--version")
    assert (ended.code, ended.out.split()[0]) == (0, "granikv")
