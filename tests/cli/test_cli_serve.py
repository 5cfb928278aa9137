"""`granikv serve` hands over to SGLang's server, or says in a sentence why not."""

import pytest

from granikv.cli import serve
from granikv.cli.main import main
from granikv.sglang_plugin.config import SGLANG_VERSION


@pytest.fixture
def started(monkeypatch):
    """What the process would become."""
    calls = []
    monkeypatch.setattr(serve.os, "execve", lambda *call: calls.append(call))
    monkeypatch.setattr(serve, "version", lambda _: SGLANG_VERSION)
    return calls


def test_flags_and_variables_reach_sglang(started, monkeypatch):
    monkeypatch.setenv("GRANIKV_DISPATCH", "paged")  # the command line alone decides
    arguments = ["serve", "a/model", "--fp", "0.35", "--admission", "paper", "--deterministic"]
    assert main([*arguments, "--", "--tp-size", "2", "--port", "1"]) == 0
    ((_, line, environment),) = started
    assert line[1:5] == ["-m", "sglang.launch_server", "--model-path", "a/model"]
    assert line[5:9] == ["--attention-backend", "granikv", "--radix-cache-backend", "granikv"]
    assert line[9:] == ["--tp-size", "2", "--port", "1"]
    ours = {name: value for name, value in environment.items() if name.startswith("GRANIKV_")}
    assert ours == {
        "GRANIKV_HOT_FRACTION": "0.35",
        "GRANIKV_ADMISSION": "paper",
        "GRANIKV_DETERMINISTIC": "True",
    }
    assert "PATH" in environment


def test_a_policy_of_ones_own_goes_along(started, monkeypatch, tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def observe(self, window):\n        return None\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = ["--repartition", "mine.py:Mine", "--policy-interval-s", "0.5"]
    assert main(["serve", "m", *arguments, "--move-tokens-per-step", "64"]) == 0
    ((_, _, environment),) = started
    assert environment["GRANIKV_REPARTITION"] == "mine.py:Mine"
    assert environment["GRANIKV_POLICY_INTERVAL_S"] == "0.5"
    assert environment["GRANIKV_MOVE_TOKENS_PER_STEP"] == "64"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fp", "1.5"], "hot_fraction: .* less than 1"),
        (["--admission", "shard"], "did you mean 'shared'"),
        (["--dispatch", "fast"], "dispatch: "),
        (["--kernels", "fa2"], "kernels: "),
        (["--repartition", "marginl"], "did you mean 'marginal'"),
        (["--repartition", "none.py:Mine"], "none.py"),
        (["--policy-interval-s", "0"], "policy_interval_s: "),
    ],
)
def test_a_wrong_choice_starts_nothing(started, capsys, arguments, message):
    assert main(["serve", "m", *arguments]) == 1
    assert not started
    error = capsys.readouterr().err
    assert "Traceback" not in error
    import re

    assert re.search(message, error), error


def test_without_the_right_sglang_it_says_what_to_install(started, monkeypatch, capsys):
    monkeypatch.setattr(serve, "version", lambda _: "0.5.18")
    assert main(["serve", "m"]) == 1
    assert not started
    assert "0.5.17, found 0.5.18; pip install 'granikv[sglang]'" in capsys.readouterr().err
