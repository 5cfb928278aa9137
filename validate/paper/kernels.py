"""Paper questions about latency, kernels and dispatch: single steps, and runs of one server."""

from collections.abc import Callable, Iterator, Sequence

from granikv.core.step import Mode
from granikv.validate.paper import steps
from granikv.validate.paper.outcomes import Outcome, Question
from granikv.validate.paper.runs import step_cost
from granikv.validate.paper.settings import (
    CUT,
    LLAMA,
    MEANS,
    QWEN14,
    QWEN32,
    Cell,
    Lengths,
    with_granikv,
)

_ROWS = 256
_LONG = 8192
_PROFILE_S = 15.0
_KERNEL = "one launch"
_STEP = "one step, 256 own tokens"


def kernel_questions() -> Iterator[Question]:
    """All of them.

    What the dispatcher did is asked with the short lengths only: with the long ones KV runs out
    before a batch reaches M_sat.
    """
    yield from _one_launch()
    yield from _one_step()
    for lengths in (CUT, MEANS):
        yield from _latency(lengths)
    yield from _dispatch(MEANS)


def _asked(claim: str, setting: str, figure: Callable[..., float], *arguments: object) -> Question:
    """A question to the cost model alone."""
    return Question(claim, setting, (), lambda _: figure(*arguments))


def _one_launch() -> Iterator[Question]:
    llama, qwen32 = step_cost(LLAMA), step_cost(QWEN32)
    cell = _LONG, _ROWS
    yield _asked("kernel.llama", _KERNEL, steps.cascade_over_dense, llama, *cell)
    yield _asked("kernel.qwen32", _KERNEL, steps.cascade_over_dense, qwen32, *cell)
    yield _asked("kernel.dense", _KERNEL, steps.prefix_pass_us, llama, Mode.DENSE, *cell)
    for pages, figure in (("shared", steps.shared_reread), ("private", steps.private_reread)):
        yield _asked("storage.kernel", f"{_KERNEL}, {pages} pages", figure, llama, *cell)


def _one_step() -> Iterator[Question]:
    llama = step_cost(LLAMA)
    yield _asked("tpot.stock", _STEP, steps.step_ms, llama, Mode.PAGED, _LONG, _ROWS)
    yield _asked("tpot.granikv", _STEP, steps.step_ms, llama, Mode.DENSE, _LONG, _ROWS)
    yield _asked("dispatch.at", _STEP, steps.dense_over_cascade, llama, _LONG, _ROWS)
    yield _asked("dispatch.under", _STEP, steps.dense_over_cascade, llama, _LONG, _ROWS // 2)
    yield _asked("dispatch.crossover", _STEP, steps.crossover_rows, llama, _LONG)


def _latency(lengths: Lengths) -> Iterator[Question]:
    stock, ours = with_granikv(Cell(LLAMA, "sglang", (_LONG,), _ROWS, lengths))
    setting = f"{lengths.name}, saturated"
    yield Question("tpot.stock", setting, (stock,), _tpot_ms)
    yield Question("tpot.granikv", setting, (ours,), _tpot_ms)
    rate_per_s = lengths.light_per_s
    light = Cell(LLAMA, "sglang", (_LONG,), _ROWS, lengths, rate_per_s)
    setting = f"{lengths.name}, {rate_per_s:g} a second"
    yield Question("ttft", setting, with_granikv(light), _ttft_ratio)


def _dispatch(lengths: Lengths) -> Iterator[Question]:
    for claim, rows in (("dispatch.above", _ROWS), ("dispatch.below", _ROWS // 2)):
        for served in (LLAMA, QWEN14):
            cell = Cell(served, "granikv", (_LONG,), rows, lengths)
            setting = f"{lengths.name}, {served.model}, B = {rows}"
            yield Question(claim, setting, (cell,), lambda o: o[0].dense_share)
    cell = Cell(LLAMA, "granikv", (_LONG,), _ROWS, lengths)
    setting = f"{lengths.name}, B = 256"
    yield Question("kernel.launches", setting, (cell,), lambda o: o[0].dense_per_s * _PROFILE_S)


def _tpot_ms(outcomes: Sequence[Outcome]) -> float:
    return outcomes[0].tpot_p50_s * 1e3


def _ttft_ratio(outcomes: Sequence[Outcome]) -> float:
    return outcomes[1].ttft_p50_s / outcomes[0].ttft_p50_s
