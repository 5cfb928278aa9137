"""Output of SGLang's bench_serving: lengths of the requests that a benchmark sent.

Source: sglang bench_serving, `--output-file` with `--output-details`. The file is opened for
appending (one object per run) and holds no send times, so arrivals must be made anew.
"""

from collections.abc import Iterator
from typing import Any

from granikv.core.errors import TraceFormatError
from granikv.traces.readers.arrivals import made_arrivals
from granikv.traces.readers.reading import Reading, Timed
from granikv.traces.request import Request, Run
from granikv.traces.segments import private_segment


def read(reading: Reading) -> Iterator[Timed]:
    """Requests of one benchmark run, in the order of its arrays."""
    record = _run(reading)
    prompts, outputs = record.get("input_lens"), record.get("output_lens")
    if (
        not isinstance(prompts, list)
        or not isinstance(outputs, list)
        or len(prompts) != len(outputs)
    ):
        raise reading.error(
            "input_lens", "no lengths of single requests", "run the benchmark with --output-details"
        )
    times = made_arrivals(reading)
    for prompt, output in zip(prompts, outputs, strict=True):
        lengths = {"input_lens": prompt, "output_lens": output}
        admitted = reading.admit(
            reading.integer(lengths, "input_lens"), reading.integer(lengths, "output_lens")
        )
        if admitted is None:
            continue
        request_id, prompt_tokens, output_tokens = admitted
        runs = (Run(private_segment(request_id), prompt_tokens),)
        yield next(times), Request(request_id, 0.0, runs, output_tokens)


def _run(reading: Reading) -> dict[str, Any]:
    wanted = reading.options.bench_run
    chosen: dict[str, Any] | None = None
    for number, record in enumerate(reading.json_rows()):
        if wanted is None and number:
            raise TraceFormatError(
                f"{reading.path} holds several benchmark runs; choose one with bench_run "
                "(0 is the first)."
            )
        if number == (wanted or 0):
            chosen = record
    if chosen is None:
        raise TraceFormatError(
            f"{reading.path} has no benchmark run {wanted or 0}; choose another."
        )
    return chosen
