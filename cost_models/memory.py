"""KV capacity: how many tokens fit beside the weights, by the server's own rule."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from granikv.core.errors import ConfigError
from granikv.cost_models.hardware import Hardware
from granikv.cost_models.models import ModelShape


@dataclass(frozen=True, slots=True)
class ServerDefaults:
    """What SGLang 0.5.17 sets when the user does not, by the GPU's memory and the TP degree.

    Attributes:
        chunked_prefill_tokens: most new tokens of one extend step.
        graph_max_rows: largest decode batch that has a CUDA graph.
        graph_rows: batch sizes that have one, ascending; a step is padded up to the next.
        reserved_mib: memory kept for activations and graphs.
        mem_fraction_static: share of the GPU's memory for weights and KV.
    """

    chunked_prefill_tokens: int
    graph_max_rows: int
    graph_rows: tuple[int, ...]
    reserved_mib: float
    mem_fraction_static: float

    def padded_rows(self, rows: int) -> int:
        """The batch size of a step of `rows` rows: the next graph, or itself above the largest."""
        for size in self.graph_rows:
            if size >= rows:
                return size
        return rows


@dataclass(frozen=True, slots=True)
class Capacity:
    """KV capacity of one rank (and so of the server), with the numbers that lead to it.

    The CUDA context and other processes are not subtracted (together below 1 GiB on a clean GPU),
    so a real server's log shows a little less: give its number where one is known.
    """

    size_tokens: int
    mem_fraction_static: float
    gpu_bytes: int
    weights_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int


def server_defaults(hardware: Hardware, tp: int = 1, prefill_graphs: bool = True) -> ServerDefaults:
    """The server's defaults on this GPU.

    Args:
        hardware: the GPU.
        tp: tensor-parallel degree.
        prefill_graphs: whether extend steps have CUDA graphs, the default on CUDA; each size
            reserves 8 MiB.

    Source: SGLang 0.5.17, srt/server_args.py, _handle_gpu_memory_settings and reserve_for_graph_mb.
    """
    chunked, max_rows = _sizes_by_memory(hardware.hbm_mib, tp)
    reserved = 512 + max(chunked, 2048) * 1.5 + tp / 8 * 1024 + max_rows * 2
    if prefill_graphs:
        reserved += 8 * len(prefill_graph_tokens(chunked))
    if hardware.hbm_mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    fraction = round((hardware.hbm_mib - reserved) / hardware.hbm_mib, 3)
    return ServerDefaults(chunked, max_rows, graph_rows(max_rows), reserved, fraction)


def graph_rows(max_rows: int) -> tuple[int, ...]:
    """Decode batch sizes that the server captures graphs for, up to and with `max_rows`.

    Source: SGLang 0.5.17, srt/server_args.py, _generate_decode_cuda_graph_batch_sizes.
    """
    sizes = {1, 2, 4, 8, 12, max_rows}
    sizes.update(range(16, 257, 8), range(272, 512, 16), range(512, max_rows + 1, 32))
    return tuple(sorted(size for size in sizes if size <= max_rows))


@cache
def prefill_graph_tokens(chunked_prefill_size: int) -> tuple[int, ...]:
    """Sizes of extend steps, in new tokens, that the server captures graphs for.

    Source: SGLang 0.5.17, srt/server_args.py, _generate_prefill_cuda_graph_batch_sizes.
    """
    sizes = [
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
        *range(4608, chunked_prefill_size + 1, 512),
    ]
    return tuple(size for size in sizes if size <= chunked_prefill_size)


def padded_tokens(tokens: int, sizes: Sequence[int]) -> int:
    """Tokens of the graph that runs an extend step: the next of the ascending `sizes`; 0 where none
    is large enough, and the step runs without a graph.
    """
    place = bisect_left(sizes, tokens)
    return sizes[place] if place < len(sizes) else 0


def kv_capacity_tokens(
    model: ModelShape,
    hardware: Hardware,
    tp: int = 1,
    mem_fraction: float | None = None,
    prefill_graphs: bool = True,
) -> Capacity:
    """KV tokens that fit: `gpu memory * mem_fraction - weights`, over the bytes of one token.

    Args:
        model: the model.
        hardware: one GPU of the group.
        tp: tensor-parallel degree; every rank holds the same number of tokens.
        mem_fraction: share of memory for weights and KV; the server's default when None.
        prefill_graphs: whether extend graphs take memory too.

    Raises:
        ConfigError: the weights leave no room; the message has bytes needed and available.
        ValueError: `mem_fraction` is not in (0, 1].
    """
    if mem_fraction is None:
        mem_fraction = server_defaults(hardware, tp, prefill_graphs).mem_fraction_static
    if not 0 < mem_fraction <= 1:
        raise ValueError(f"mem_fraction must be in (0, 1], got {mem_fraction}")
    weights = model.weights_bytes(tp)
    static_bytes = int(hardware.hbm_bytes * mem_fraction)
    per_token = model.kv_bytes_per_token(tp)
    if static_bytes < weights + per_token:
        raise ConfigError(
            f"{model.name} at tp {tp} needs {weights + per_token} bytes on each GPU for weights "
            f"and one KV token, but {hardware.name} has {static_bytes} at mem_fraction "
            f"{mem_fraction}; raise tp or choose a larger GPU."
        )
    kv_bytes = static_bytes - weights
    return Capacity(
        kv_bytes // per_token, mem_fraction, hardware.hbm_bytes, weights, kv_bytes, per_token
    )


def _sizes_by_memory(gpu_mib: int, tp: int) -> tuple[int, int]:
    """Chunked prefill size in tokens and largest decode graph in rows."""
    if gpu_mib < 20 * 1024:
        return 2048, 8
    if gpu_mib < 35 * 1024:
        return 2048, 24 if tp < 4 else 80
    if gpu_mib < 60 * 1024:
        return 4096, 32 if tp < 4 else 160
    if gpu_mib < 160 * 1024:
        return 8192, 256 if tp < 4 else 512
    return 16384, 512
