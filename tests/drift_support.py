"""Loads whose best split changes, and how policies compare with fixed splits and an oracle on them.

`python tests/drift_support.py` prints the tables of docs/policies.md.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from sim_support import Result, real_cost, run

from granikv.planner.oracle import OracleOptions, find_oracle
from granikv.planner.trials import Bench, Schedule, Trial, constant, try_policy, try_schedule
from granikv.sim.config import ServerConfig
from granikv.sim.metrics import Summary, summarise
from granikv.traces.generate import generate
from granikv.traces.phases import generate_phases
from granikv.traces.request import Request
from granikv.traces.spec import Phase, PhasedSpec, WorkloadSpec

SIZE_TOKENS = 200_000
FRACTIONS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
POLICIES = ("watermark", "marginal")
# Policies start where a server that knows nothing of its load would.
START_FRACTION = 0.2
WINDOW_S = 5.0
JITTER_S = 1e-3
PREFIX_COUNTS = (1, 2, 4, 8, 16, 32, 64)


def _spec(requests: int, rate_per_s: float, **fields: object) -> WorkloadSpec:
    arrivals = {"kind": "poisson", "rate_per_s": rate_per_s}
    return WorkloadSpec.model_validate({"requests": requests, "arrivals": arrivals, **fields})


def prefix_heavy(requests: int, rate_per_s: float, count: int = 6) -> WorkloadSpec:
    """Prefixes of 16K tokens, read by many short requests: six want 98K tokens to be HOT."""
    return _spec(
        requests,
        rate_per_s,
        prefixes=[{"count": count, "tokens": 16384}],
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


def many_prefixes(count: int) -> WorkloadSpec:
    """A thousand short requests behind `count` prefixes of 8K tokens, all equally likely."""
    return _spec(
        1000,
        20.0,
        prefixes=[{"count": count, "tokens": 8192, "popularity": {"kind": "uniform"}}],
        private_tokens=256,
        output_tokens=256,
    )


def phase(spec: WorkloadSpec, seconds: float, start_s: float | None = None) -> Phase:
    """A load for a while; its number of requests does not count."""
    mix = spec.model_dump(exclude={"requests"})
    return Phase.model_validate({**mix, "seconds": seconds, "start_s": start_s})


def phases(parts: Sequence[tuple[WorkloadSpec, float]], seed: int) -> Iterator[Request]:
    """The parts one after the other, each cut after so many seconds; none shares with another."""
    return generate_phases(PhasedSpec(phases=[phase(*part) for part in parts]), seed)


def _heavy(seconds: float, rate_per_s: float, count: int, start_s: float | None = None) -> Phase:
    return phase(prefix_heavy(1, rate_per_s, count), seconds, start_s)


def _suffix(seconds: float, rate_per_s: float, start_s: float | None = None) -> Phase:
    return phase(suffix_heavy(1, rate_per_s), seconds, start_s)


def _loads() -> dict[str, PhasedSpec]:
    morning, night = _heavy(60.0, 30.0, 6), _suffix(60.0, 4.0)
    large, busy = _heavy(60.0, 30.0, 8), _suffix(60.0, 6.0)
    # Every 15 s a set of its own: count of prefixes and rate.
    sets = ((1, 4.0), (2, 8.0), (3, 12.0), (4, 14.0), (4, 14.0), (2, 8.0), (1, 4.0))
    day = [_heavy(25.0, rate, count, 15.0 * i) for i, (count, rate) in enumerate(sets)]
    tenants = [
        _heavy(45.0, 12.0, 3, 10.0),
        _heavy(45.0, 12.0, 3, 40.0),
        _heavy(30.0, 12.0, 2, 70.0),
    ]
    drifting = phase(drifting_set(1, 25.0, 20.0), 100.0)
    listed = {
        "a day that drifts": [_suffix(120.0, 1.5, 0.0), *day],
        "tenants come and go": [_suffix(120.0, 2.5, 0.0), *tenants],
        "morning and night": [morning, night],
        "night and morning": [night, morning],
        "large morning and night": [large, busy],
        "night and large morning": [busy, large],
        "prefix-heavy": [_heavy(90.0, 30.0, 6)],
        "suffix-heavy": [_suffix(90.0, 4.0)],
        "mixed": [_suffix(90.0, 2.0, 0.0), _heavy(90.0, 12.0, 3, 0.0)],
        "new prefixes every 20 s": [drifting],
    }
    flips = [_heavy(6.0, 30.0, 6), _suffix(6.0, 4.0)]
    specs = {name: PhasedSpec(phases=parts) for name, parts in listed.items()}
    return {**specs, "flips every 6 s": PhasedSpec(phases=flips, repeat=10)}


LOADS = _loads()


def load(name: str, seed: int) -> list[Request]:
    """The requests of one of `LOADS`."""
    return list(generate_phases(LOADS[name], seed))


def measure(requests: list[Request], repartition: str, fp: float) -> Summary:
    """Llama-3.1-8B on an H200 whose pool is cut so that the split matters."""
    config = ServerConfig(size_tokens=SIZE_TOKENS, hot_fraction=fp, repartition=repartition)
    return _finished(run(requests, config, real_cost()))


def _finished(result: Result) -> Summary:
    assert result.outcome.finished == result.outcome.sent
    return summarise(result.requests, result.steps)


def throughput(requests: list[Request], repartition: str, fp: float = START_FRACTION) -> float:
    """Output tokens per second."""
    return measure(requests, repartition, fp).throughput_tokens_per_s


def best_static(requests: list[Request]) -> tuple[float, float]:
    """Output tokens per second of the best fixed fraction, and that fraction."""
    return max((throughput(requests, "static", fp), fp) for fp in FRACTIONS)


def _bench(requests: list[Request]) -> Bench:
    server = ServerConfig(size_tokens=SIZE_TOKENS, hot_fraction=START_FRACTION)
    return Bench(requests, server, real_cost())


def oracle(requests: list[Request], simulations: int) -> Trial:
    """The best schedule that was found, and its output tokens per second."""
    options = OracleOptions(FRACTIONS, POLICIES, WINDOW_S, simulations)
    return find_oracle(_bench(requests), options).best


def jittered(requests: list[Request], seed: int) -> list[Request]:
    """The same load to anybody but a simulation: each arrival at most `JITTER_S` off."""
    draw = random.Random(seed)
    moved = [
        replace(r, arrival_s=max(0.0, r.arrival_s + draw.uniform(-JITTER_S, JITTER_S)))
        for r in requests
    ]
    moved.sort(key=lambda request: request.arrival_s)
    return [replace(request, request_id=number) for number, request in enumerate(moved)]


def _show_jitter(requests: list[Request], schedule: Schedule, fp: float, count: int) -> None:
    """Means over jittered loads: how much of an oracle's gain is tuned to one trace alone."""
    benches = [_bench(jittered(requests, seed)) for seed in range(count)]
    split = constant(fp, int(fp * SIZE_TOKENS), 1)
    means = {
        "oracle's schedule": fmean(try_schedule(bench, schedule).score for bench in benches),
        "best fixed": fmean(try_schedule(bench, split).score for bench in benches),
        "marginal": fmean(try_policy(bench, "marginal", START_FRACTION).score for bench in benches),
    }
    cells = [f"{label} {score:,.0f}" for label, score in means.items()]
    print(f"  {count} times with arrivals {JITTER_S * 1e3:g} ms off:", ", ".join(cells), flush=True)


def _show_load(name: str, seed: int, simulations: int, jitters: int) -> None:
    requests = load(name, seed)
    best, fp = best_static(requests)
    cells = [f"{name}, {seed}", f"{best:,.0f} ({fp:g})"]
    cells += [f"{throughput(requests, 'static'):,.0f}"]
    top = oracle(requests, simulations) if simulations else None
    if top is not None:
        cells += [f"{top.score:,.0f} ({top.score / best:.2f}x)"]
    for policy in POLICIES:
        summary = measure(requests, policy, START_FRACTION)
        score = summary.throughput_tokens_per_s
        cells += [f"{score:,.0f} ({score / best:.2f}x)", f"{summary.migrated_tokens:,}"]
    print("|", " | ".join(cells), "|", flush=True)
    if top is not None and jitters:
        _show_jitter(requests, top.schedule, fp, jitters)


def _show_prefixes(size_tokens: int) -> None:
    """What GraniKV with a policy gives against the stock engine, by the number of prefixes."""
    for count in PREFIX_COUNTS:
        requests = list(generate(many_prefixes(count), 0))
        stock = ServerConfig(system="sglang", size_tokens=size_tokens)
        fixed = ServerConfig(size_tokens=size_tokens, hot_fraction=START_FRACTION)
        moving = fixed.model_copy(update={"repartition": "marginal"})
        results = [run(requests, config, real_cost()) for config in (stock, fixed, moving)]
        scores = [_finished(result).throughput_tokens_per_s for result in results]
        last = results[-1]
        cells = [f"{count}", *(f"{score:,.0f}" for score in scores)]
        cells += [f"{scores[-1] / scores[0]:.2f}x", f"{last.outcome.boundaries[0][-1][1]:,}"]
        cells += [f"{_share(last, 'hot_tokens'):.0%}", f"{_share(last, 'cached_tokens'):.0%}"]
        cells += [f"{_share(results[0], 'cached_tokens'):.0%}"]
        print("|", " | ".join(cells), "|", flush=True)


def _share(result: Result, column: str) -> float:
    """Of prompt tokens."""
    return float(result.requests[column].sum()) / float(result.requests["prompt_tokens"].sum())


def main() -> None:
    """Print one row for each load and seed, or for each number of prefixes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="how many, from 0")
    parser.add_argument("--load", choices=list(LOADS), action="append", help="default: all")
    parser.add_argument("--oracle", type=int, default=0, help="simulations of the oracle's search")
    parser.add_argument("--jitter", type=int, default=0, help="loads to try the oracle's on")
    parser.add_argument("--prefixes", type=int, metavar="SIZE_TOKENS", help="1 to 64 prefixes")
    options = parser.parse_args()
    if options.prefixes:
        _show_prefixes(options.prefixes)
        return
    for name in options.load or LOADS:
        for seed in range(options.seeds):
            _show_load(name, seed, options.oracle, options.jitter)


if __name__ == "__main__":
    main()
