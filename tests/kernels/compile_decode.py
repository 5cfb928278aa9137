"""Compile every kernel that a decode step launches, for a named target and without a GPU.

    python compile_decode.py CAPABILITY NUM_Q_HEADS NUM_KV_HEADS HEAD_DIM DTYPE

A program of its own: Triton must not be in interpreter mode. Launches are turned into compilations,
so that what is compiled is what the operator would launch. Prints a JSON list of
`[kernel, shared memory in bytes, PTX target]`.
"""

import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from granikv.kernels import decode as decode_module
from granikv.kernels.decode import SharedPrefixDecode
from granikv.kernels.shapes import Heads
from granikv.kernels.tables import SharedSegment, tables_of


class NoDriver:
    """Answers what Triton asks a driver before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        return torch.device("cpu")


def compile_launches(capability: int) -> dict[str, tuple[int, str]]:
    """From now on launches compile; what they compile is noted in the dictionary returned."""
    compiled: dict[str, tuple[int, str]] = {}
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        target = next(x for x in kernel.asm["ptx"].splitlines() if x.startswith(".target"))
        assert kernel.asm["cubin"]
        variant = f"{self.fn.__name__}{len(compiled)}"
        compiled[variant] = (kernel.metadata.shared, target.split()[1].rstrip(","))
        return kernel

    JITFunction.run = run
    driver.set_active(NoDriver(GPUTarget("cuda", capability, 32)))
    return compiled


def main() -> None:
    """Plan and run once in every launch that the target has."""
    capability = int(sys.argv[1])
    heads = Heads(*map(int, sys.argv[2:5]))
    dtype = getattr(torch, sys.argv[5])
    compiled = compile_launches(capability)
    decode_module._capability = lambda device: divmod(capability, 10)
    decode_module._sm_count = lambda device: 132
    tables = tables_of([SharedSegment(1, 200, (0, 1))], [[300], [301]], None, 4, 16, 8, "cpu")
    operator = SharedPrefixDecode(4, heads, 8, 16, dtype, "cpu")
    operator.plan(tables)
    q = torch.zeros(4, heads.q, heads.dim, dtype=dtype)
    k, v = torch.zeros(2, 400, heads.kv, heads.dim, dtype=dtype)
    out, lse = torch.zeros_like(q), torch.zeros(4, heads.q)
    args = (q, k, v, tables, out, lse)
    operator.run(*args, launch="fused")
    operator.plan(tables, prefix="triton")
    operator.run(*args)
    decode_module._on_card = lambda device: True  # where the Gluon kernel takes the private tiles
    operator.run(*args)
    if capability >= 90 and heads.dim != 96:  # not a box that the TMA pass has
        operator._side_stream = object()  # is forked only where a launch cannot depend
        for overlap in ("serial", "beside"):
            operator.plan(tables, overlap, "hopper")
            operator.run(*args)
    print(json.dumps([[name.rstrip("0123456789"), *what] for name, what in compiled.items()]))


if __name__ == "__main__":
    main()
