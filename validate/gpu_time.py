"""gpu_time: what a server's decode steps spend GPU time on, by kind of kernel.

    python -m granikv.validate.gpu_time MODEL --variant granikv --engine '{"tp_size": 2}' --out DIR

One batch behind a common prefix decodes, and PyTorch's profiler writes each rank's kernels of some
steps to DIR. One JSON object, printed and kept there: per rank the microseconds by kind, of any
kernel at all (`busy`: what overlaps counts once) and from the first kernel to the last (`span`).
Communication contains waiting: a rank that is early spins in its all-reduce until the other one
comes, so the least of all ranks is what the exchange itself takes.
"""

import argparse
import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from granikv.validate import workloads
from granikv.validate.drive import ONLY_ENDS
from granikv.validate.servers import serving, variant_of

# What a kernel's name contains, the first that fits: names of NCCL, SGLang, FlashAttention-3,
# ours (granikv.kernels) and cuBLAS. FlashInfer's norms have "flash" in their names, so no more.
_KINDS = (
    (
        "communication",
        ("nccl", "all_reduce", "allreduce", "all_gather", "allgather", "multimem", "cross_device"),
    ),
    (
        "attention",
        ("flash::", "prefix_pass", "private_pass", "stream_pass", "fused_step", "merge_pass"),
    ),
    ("products", ("gemm", "nvjet", "cutlass", "splitk", "cublas")),
)
_OTHER = "other"
_ANSWER = "gpu_time.json"
_GPU_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
_TAIL = 64  # output tokens beyond the steps: the profiler starts and ends late


def kind_of(name: str) -> str:
    """The kind of a kernel."""
    lower = name.lower()
    fits = (kind for kind, parts in _KINDS if any(part in lower for part in parts))
    return next(fits, _OTHER)


def times_us(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Microseconds by kind, `busy` and `span` of the GPU events of a Chrome trace.

    Raises:
        ValueError: there are none.
    """
    kernels = [event for event in events if event.get("cat") in _GPU_EVENTS]
    if not kernels:
        raise ValueError("The trace has no kernels; the profiler needs CUPTI.")
    spans = sorted((float(k["ts"]), float(k["ts"]) + float(k["dur"])) for k in kernels)
    busy, end = 0.0, spans[0][0]
    for begin, until in spans:
        busy += max(until - max(begin, end), 0.0)
        end = max(end, until)
    kinds: Counter[str] = Counter()
    for kernel in kernels:
        kinds[kind_of(kernel["name"])] += float(kernel["dur"])
    return {**kinds, "busy": busy, "span": end - spans[0][0]}


async def decode(client: Any, prefix_tokens: int, rows: int, steps: int, out: Path) -> None:
    """Decode one batch, and have some steps profiled once every row has its first token."""
    rng = workloads.rng_of(0, "gpu_time")
    sent = workloads.batch(((prefix_tokens, rows),), 64, rng)
    for number, prompts in enumerate((sent.prefixes, sent.prompts, sent.prompts)):
        async for _ in client.stream(prompts, 1, ONLY_ENDS, _names(len(prompts), f"{number}")):
            pass
    started: set[int] = set()
    async for chunk in client.stream(sent.prompts, steps + _TAIL, ONLY_ENDS, _names(rows, "last")):
        started.add(chunk.index)
        if len(started) == rows and chunk.status is None:
            await client.profile(out, steps)
            started.clear()


def _names(rows: int, name: str) -> list[str]:
    return [f"{name}.{row}." for row in range(rows)]


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="GPU time of decode steps by kind of kernel.")
    parser.add_argument("model", help="folder with a config.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for the traces")
    parser.add_argument("--variant", default="granikv")
    parser.add_argument("--engine", default="{}", help="more arguments of sglang.Engine, as JSON")
    parser.add_argument("--prefix", type=int, default=8192, help="tokens that all rows share")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20, help="to profile")
    chosen = parser.parse_args(argv)
    variant = variant_of(chosen.variant).given(json.loads(chosen.engine))
    with serving(variant, chosen.model) as server:
        server.run(decode(server.client, chosen.prefix, chosen.rows, chosen.steps, chosen.out))
        facts = server.facts
    ranks = {
        path.name: times_us(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
        for path in sorted(chosen.out.glob("*.trace.json.gz"))
    }
    asked = {name: getattr(chosen, name) for name in ("variant", "prefix", "rows", "steps")}
    answer = json.dumps(asked | {"ranks": ranks, **facts})
    (chosen.out / _ANSWER).write_text(answer + "\n")
    print(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
