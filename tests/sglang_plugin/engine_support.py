"""Whole engines of SGLang on a CPU, each in processes of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from granikv.sglang_plugin.request_log import REQUEST_COLUMNS
from granikv.sglang_plugin.step_log import STEP_COLUMNS

_FOLDER = Path(__file__).parent / "cpu_engine"
_ENGINE_GB = 2.5  # of memory, its three processes together
_TIMEOUT_S = 600

OURS = {"attention_backend": "granikv", "radix_cache_backend": "granikv"}
STOCK = {"attention_backend": "torch_native"}
ON_CPU: Mapping[str, Any] = {
    "load_format": "auto",
    "device": "cpu",
    "dtype": "float16",
    "disable_cuda_graph": True,
    "max_running_requests": 16,  # two lists of prompts: one may come before the other has left
    "chunked_prefill_size": 128,
    "log_level": "info",
}


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended.

    Attributes:
        code: its exit code.
        log: what it and its children printed.
        answers: for each list of prompts, what `cpu_engine/ask.py` tells of each answer.
        recording: folder of its records.
    """

    code: int
    log: str
    answers: list[list[dict[str, Any]]]
    recording: Path

    def requests(self) -> list[dict[str, Any]]:
        """Records of requests."""
        return self._lines("requests", REQUEST_COLUMNS)

    def steps(self) -> list[dict[str, Any]]:
        """Records of steps, with their segments, modes and extended requests as lists."""
        read = self._lines("steps", STEP_COLUMNS)
        for step in read:
            step["segments"] = json.loads(step.pop("segments_json"))
            plan = json.loads(step.pop("plan_json"))
            step["modes"], step["extend"] = plan.get("modes", []), plan.get("extend", [])
        return read

    def _lines(self, kind: str, columns: Sequence[str]) -> list[dict[str, Any]]:
        lines = (self.recording / f"{kind}-rank0.jsonl").read_text().splitlines()
        return [dict(zip(columns, json.loads(line), strict=True)) for line in lines]


@dataclass
class Engines:
    """Runs engines, as many at once as there are cores, and memory, for.

    A scheduler that fails takes its parent along, and all that descends from it: not these tests.

    Attributes:
        folder: for everything that is written.
        model: folder of the model.
    """

    folder: Path
    model: Path
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)

    def __post_init__(self) -> None:
        room = int(psutil.virtual_memory().available / 1e9 / _ENGINE_GB)
        # One more than cores: a starting or idle engine waits more than it computes.
        self._pool = ThreadPoolExecutor(max(1, min((os.cpu_count() or 1) + 1, room)))

    def ask(
        self,
        name: str,
        engine: Mapping[str, Any],
        to_do: Sequence[Mapping[str, Any]] = (),
        *,
        record: bool = False,
        **variables: str,
    ) -> Future[Ended]:
        """Start an engine and give it things to do (see `cpu_engine/ask.py`).

        Ours record in any case, because they are told to by a variable.
        """
        job = {
            "model": str(self.model),
            "engine": {**ON_CPU, **engine},
            "to_do": to_do,
            "record": str(self.folder / name) if record else None,
        }
        file = self.folder / f"{name}.job.json"
        file.write_text(json.dumps(job))
        command = [str(_FOLDER / "ask.py"), str(file), str(self._answers(name))]
        return self.run(name, command, **variables)

    def run(self, name: str, command: Sequence[str], **variables: str) -> Future[Ended]:
        """Start Python; `variables` join an environment without any of GraniKV or SGLang."""
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("GRANIKV_", "SGLANG_"))}
        paths = filter(None, (str(_FOLDER), os.environ.get("PYTHONPATH")))
        fixed = {
            "PYTHONPATH": os.pathsep.join(paths),
            "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(self.folder),
            "GRANIKV_GPU": "h200-sxm",
            "GRANIKV_RECORD": str(self.folder / name),
        }
        return self._pool.submit(self._run, name, command, plain | fixed | variables)

    def _run(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Ended:
        file = self.folder / f"{name}.log"
        with file.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *command],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.add(process)
        try:
            code = process.wait(_TIMEOUT_S)
        finally:
            _kill(process)
            self._running.discard(process)
        answers = self._answers(name)
        said = json.loads(answers.read_text()) if answers.exists() else []
        return Ended(code, file.read_text(errors="replace"), said, self.folder / name)

    def _answers(self, name: str) -> Path:
        return self.folder / f"{name}.answers.json"

    def close(self) -> None:
        """End everything that still runs."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in tuple(self._running):
            _kill(process)
        self._pool.shutdown()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The whole session, which children that lost their parent are still in."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
