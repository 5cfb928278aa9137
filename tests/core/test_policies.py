"""The choice of a repartition policy: by name, or a user's own from a file."""

from pathlib import Path

import pytest

from granikv.core.errors import ConfigError
from granikv.core.policies import make_policy
from granikv.core.repartition import StaticPolicy

OWN = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Own:
    step: int = 7

    def observe(self, window):
        return self.step

class NeedsMore:
    def __init__(self, step): ...

class Mute:
    pass

number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_static_is_a_name():
    assert isinstance(make_policy("static"), StaticPolicy)


def test_every_policy_is_a_new_object(file):
    for name in ("marginal", f"{file}:Own"):
        assert make_policy(name) is not make_policy(name)


def test_an_edited_file_is_read_again(file):
    assert make_policy(f"{file}:Own").observe(None) == 7
    file.write_text(OWN.replace("step: int = 7", "step: int = 12"))
    assert make_policy(f"{file}:Own").observe(None) == 12


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("statik", "did you mean 'static'"),
        ("zzz", "choose one of static, watermark, marginal, or path/to/file.py:Name"),
        ("{file}", "lacks a class; write .*own.py:NAME"),
        ("{file}:Other", "own.py has no class 'Other'; define it"),
        ("{file}:number", "own.py has no class 'number'"),
        ("{file}:NeedsMore", "NeedsMore of .*own.py cannot be built without arguments .*step"),
        ("{file}:Mute", r"Mute of .*own.py has no method observe; add observe\(self, window\)"),
        ("{file}.gone.py:Own", "own.py.gone.py does not exist; check the path"),
    ],
)
def test_what_cannot_be_used(file, name, message):
    with pytest.raises(ConfigError, match=message):
        make_policy(name.format(file=file))


def test_a_policy_that_fails_later_is_named_with_its_line(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    file.write_text("class Own:\n    def observe(self, window):\n        return window.no_such\n")
    policy = make_policy("own.py:Own")
    with pytest.raises(ConfigError, match=r"Own of .*own\.py failed in line 3 \(AttributeError: "):
        policy.observe(None)


@pytest.mark.parametrize(
    ("text", "message"),
    [("def broken(:\n", "SyntaxError"), ("import no_such_module_here\n", "ModuleNotFoundError")],
)
def test_a_file_that_cannot_run(file, text, message):
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"own.py cannot be loaded .{message}: .*; correct it"):
        make_policy(f"{file}:Own")
