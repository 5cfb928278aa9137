"""`granikv trace ...`: what is printed and what is written."""

import json
from pathlib import Path

import pytest

from granikv.traces.source import open_trace
from granikv.validate.workloads import from_lines

ROOT = Path(__file__).parents[2]
MOONCAKE = ROOT / "traces/data/mooncake-conversation.jsonl.gz"


def test_info(granikv, workload):
    ended = granikv("trace", "info", workload)
    assert ended.code == 0
    words = " ".join(ended.out.split())
    assert "requests 40" in words
    assert "shared prefixes 2;" in words
    # All but the first request of each prefix find 4,096 of their 4,224 tokens.
    assert f"{38 * 4096 / (40 * 4224):.2%}" in words


def test_info_of_a_part(granikv):
    ended = granikv("trace", "info", MOONCAKE, "--end", 60)
    expected = sum(1 for request in open_trace(MOONCAKE) if request.arrival_s < 60)
    assert f"requests {expected} " in " ".join(ended.out.split())


def test_convert_keeps_every_request(granikv, workload, tmp_path):
    out = tmp_path / "out.jsonl.gz"
    ended = granikv("trace", "convert", workload, out)
    assert ended.code == 0
    assert f"Written: {out}, 40 requests" in ended.out
    assert list(open_trace(out)) == list(open_trace(workload))


def test_a_plain_trace_is_what_a_live_server_is_sent(granikv, workload, tmp_path):
    plain, canonical = tmp_path / "plain.jsonl", tmp_path / "canonical.jsonl"
    assert granikv("trace", "convert", workload, plain, "--to", "plain").code == 0
    assert granikv("trace", "convert", workload, canonical).code == 0
    with plain.open() as lines:
        sent = list(from_lines(lines, seed=0))
    kept = list(open_trace(canonical))
    assert [(one.request_id, one.arrival_s, one.output_tokens) for one in sent] == [
        (one.request_id, one.arrival_s, one.output_tokens) for one in kept
    ]
    assert [len(one.input_ids) for one in sent] == [one.prompt_tokens for one in kept]
    # Prompts begin alike where their first runs are the same.
    first = [one.prompt[0] for one in kept]
    length = min(run.length for run in first)
    same = {run.segment for run in first}
    assert len({tuple(one.input_ids[:length]) for one in sent}) == len(same) < len(sent)
    assert [one.prompt for one in open_trace(plain)] == [one.prompt for one in kept]


def test_convert_to_mooncake(granikv, workload, tmp_path):
    out = tmp_path / "out.jsonl"
    assert granikv("trace", "convert", workload, out, "--to", "mooncake").code == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 40
    assert {len(row["hash_ids"]) for row in rows} == {4224 // 512 + 1}


def test_convert_to_mooncake_needs_whole_blocks(granikv, workload, tmp_path):
    out = tmp_path / "out.jsonl"
    options = ("--to", "mooncake", "--to-block-size", 1000)
    ended = granikv("trace", "convert", workload, out, *options)
    assert ended.code == 1
    assert ended.error.count("\n") == 1
    assert list(tmp_path.iterdir()) == [workload]


def test_cut(granikv, workload, tmp_path):
    out = tmp_path / "out.jsonl"
    options = ("--max-requests", 10, "--speedup", 2, "--prepend-prefix", 64)
    assert granikv("trace", "cut", workload, out, *options).code == 0
    before, after = list(open_trace(workload)), list(open_trace(out))
    assert len(after) == 10
    for old, new in zip(before, after, strict=False):
        assert new.arrival_s == pytest.approx(old.arrival_s / 2)
        assert new.prompt_tokens == old.prompt_tokens + 64


def test_generate_is_seeded(granikv, workload, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert granikv("trace", "generate", workload, tmp_path / name, "--seed", seed).code == 0
    texts = [(tmp_path / name).read_text() for name in "abc"]
    assert texts[0] == texts[1] != texts[2]


def test_generate_takes_a_workload_only(granikv, tmp_path):
    ended = granikv("trace", "generate", MOONCAKE, tmp_path / "out.jsonl")
    assert ended.code == 1
    assert ended.error.count("\n") == 1


@pytest.mark.parametrize("place", ["missing/out.jsonl", "."])
def test_place_that_cannot_be_written(granikv, workload, tmp_path, place):
    ended = granikv("trace", "convert", workload, tmp_path / place)
    assert (ended.code, ended.error.count("\n")) == (1, 1)


def test_a_trace_is_not_written_over_itself(granikv, workload):
    before = workload.read_text()
    ended = granikv("trace", "convert", workload, workload)
    assert ended.code == 1
    assert workload.read_text() == before


def test_interrupt_leaves_no_half_file(granikv, workload, tmp_path, monkeypatch):
    def stop(requests, path):
        path.write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr("granikv.traces.writers.write_trace", stop)
    ended = granikv("trace", "convert", workload, tmp_path / "out.jsonl")
    assert ended.code == 130
    assert "was not written" in ended.error
    assert list(tmp_path.iterdir()) == [workload]


def test_bench_prints_figures_beside_goals(granikv, monkeypatch):
    from granikv.sim.bench import Measurement

    def measure(*, quick, repeats, on_case):
        assert (quick, repeats) == (True, 1)
        on_case("a case")
        return [Measurement("a case", "1.5 s", "<= 2 s")]

    monkeypatch.setattr("granikv.sim.bench.run_benchmarks", measure)
    ended = granikv("bench", "sim", "--quick", "--repeats", 1)
    assert ended.code == 0
    assert ended.out.split()[-7:] == ["a", "case", "1.5", "s", "<=", "2", "s"]
