"""Loads whose best split changes, and how policies compare with fixed splits on them.

`python tests/drift_support.py` prints the table of docs/policies.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sim_support import real_cost, run

from granikv.sim.config import ServerConfig
from granikv.sim.metrics import Summary, summarise
from granikv.traces.generate import generate
from granikv.traces.request import Request, Run
from granikv.traces.spec import WorkloadSpec

SIZE_TOKENS = 200_000
FRACTIONS = (0.05, 0.1, 0.2, 0.4, 0.6)
POLICIES = ("watermark", "marginal")
# Policies start where a server that knows nothing of its load would.
START_FRACTION = 0.2


def _spec(requests: int, rate_per_s: float, **fields: object) -> WorkloadSpec:
    arrivals = {"kind": "poisson", "rate_per_s": rate_per_s}
    return WorkloadSpec.model_validate({"requests": requests, "arrivals": arrivals, **fields})


def prefix_heavy(requests: int, rate_per_s: float) -> WorkloadSpec:
    """Six prefixes of 16K tokens, read by many short requests: 98K tokens want to be HOT."""
    return _spec(
        requests,
        rate_per_s,
        prefixes=[{"count": 6, "tokens": 16384}],
        private_tokens=200,
        output_tokens=300,
    )


def suffix_heavy(requests: int, rate_per_s: float) -> WorkloadSpec:
    """Nothing shared, 2K tokens in and 1K out: every token is wanted in COLD."""
    return _spec(requests, rate_per_s, private_tokens=2048, output_tokens=1024)


def drifting_set(requests: int, rate_per_s: float, period_s: float) -> WorkloadSpec:
    """Four prefixes of 8K tokens, replaced every `period_s`, beside 1K tokens of their own."""
    return _spec(
        requests,
        rate_per_s,
        prefixes=[{"count": 4, "tokens": 8192, "period_s": period_s}],
        private_tokens=1024,
        output_tokens=400,
    )


def phases(parts: Sequence[tuple[WorkloadSpec, float]], seed: int) -> Iterator[Request]:
    """The parts one after the other, each cut after so many seconds; none shares with another."""
    start_s, next_id = 0.0, 0
    for number, (spec, seconds) in enumerate(parts):
        for request in generate(spec, seed + number):
            if request.arrival_s >= seconds:
                break
            prompt = tuple(Run(hash((number, run.segment)), run.length) for run in request.prompt)
            yield replace(
                request,
                request_id=next_id,
                arrival_s=start_s + request.arrival_s,
                prompt=prompt,
                output_segment=None,
            )
            next_id += 1
        start_s += seconds


def measure(requests: list[Request], repartition: str, fp: float) -> Summary:
    """Llama-3.1-8B on an H200 whose pool is cut so that the split matters."""
    config = ServerConfig(size_tokens=SIZE_TOKENS, hot_fraction=fp, repartition=repartition)
    result = run(requests, config, real_cost())
    assert result.outcome.finished == result.outcome.sent
    return summarise(result.requests, result.steps)


def loads(seed: int) -> dict[str, list[Request]]:
    """The loads of the table."""
    morning, night = (prefix_heavy(10_000, 30.0), 60.0), (suffix_heavy(10_000, 4.0), 60.0)
    flips = [(prefix_heavy(10_000, 30.0), 6.0), (suffix_heavy(10_000, 4.0), 6.0)] * 10
    return {
        "morning and night": list(phases([morning, night], seed)),
        "night and morning": list(phases([night, morning], seed)),
        "flips every 6 s": list(phases(flips, seed)),
        "prefix-heavy": list(phases([(prefix_heavy(10_000, 30.0), 90.0)], seed)),
        "suffix-heavy": list(phases([(suffix_heavy(10_000, 4.0), 90.0)], seed)),
        "new prefixes every 20 s": list(phases([(drifting_set(10_000, 25.0, 20.0), 100.0)], seed)),
    }


def main() -> None:
    """Print output tokens per second, p50 TTFT and tokens moved of each server on each load."""
    for name, requests in loads(seed=0).items():
        print(f"\n{name}: {len(requests)} requests")
        for fp in FRACTIONS:
            _show(f"static {fp:g}", measure(requests, "static", fp))
        for policy in POLICIES:
            _show(policy, measure(requests, policy, START_FRACTION))


def _show(label: str, summary: Summary) -> None:
    print(
        f"  {label:12} {summary.throughput_tokens_per_s:8.0f} tokens/s"
        f"  TTFT {summary.ttft_s.mean:6.2f} s  TPOT {summary.tpot_s.p50 * 1e3:6.1f} ms"
        f"  HOT {summary.hot_share:5.1%}  retracted {summary.retractions:5}"
        f"  moved {summary.migrated_tokens:8}",
        flush=True,
    )


if __name__ == "__main__":
    main()
