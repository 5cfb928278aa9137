"""The kernels compile for sm_80 and sm_90 and fit into their shared memory; needs no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

_PROGRAM = Path(__file__).with_name("compile_decode.py")

# Most shared memory of one block. Source: CUDA C++ Programming Guide, technical specifications by
# compute capability (163 KiB on 8.0, 227 KiB on 9.0).
_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}

_CASES = [
    (80, (32, 8, 128, "bfloat16")),
    (80, (8, 1, 256, "float16")),
    (90, (32, 8, 128, "bfloat16")),
    (90, (40, 8, 128, "float16")),
    (90, (16, 1, 64, "bfloat16")),
    (90, (6, 2, 96, "float16")),
    (90, (8, 1, 256, "bfloat16")),
]


@pytest.mark.parametrize(("capability", "case"), _CASES, ids=str)
def test_every_launch_compiles(capability, case, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, str(_PROGRAM), str(capability), *map(str, case)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    compiled = json.loads(done.stdout.splitlines()[-1])
    names = {name for name, _, _ in compiled}
    passes = {"prefix_pass", "private_pass", "stream_pass_kernel", "merge_pass"}
    assert passes | {"plan_step", "fused_step"} <= names
    assert ("prefix_pass_kernel" in names) == (capability == 90 and case[2] != 96)
    for name, shared, target in compiled:
        assert shared <= _SHARED_BYTES[capability], f"{name} needs {shared} bytes"
        assert target.startswith(f"sm_{capability}")
