"""`granikv validate`: shipped records compare, errors that grew end it badly, nonsense is out."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = ROOT / "validate/data/runs/calibration/granikv.poisson-8192"
RESULTS = ROOT / "validate/data/serve.h200-sxm.jsonl"


def test_every_rung_of_a_shipped_run_is_shown(granikv, tmp_path: Path):
    ended = granikv("validate", str(RUN), "--out", str(tmp_path))
    assert ended.code == 0
    for rung in ("1. Steps", "2. Schedule", "3. Requests", "4. Distributions"):
        assert rung in ended.out
    figures = json.loads((tmp_path / "ladder.json").read_text())["figures"]
    assert figures["run granikv.poisson-8192 cached share"] < 0.001
    assert (tmp_path / "ladder.html").stat().st_size > 1_000_000


def test_an_error_that_has_grown_ends_badly(granikv, tmp_path: Path):
    out = tmp_path / "ladder.json"
    assert granikv("validate", str(RUN), "--out", str(tmp_path)).code == 0
    assert granikv("validate", str(RUN), "--baseline", str(out)).code == 0
    told = json.loads(out.read_text())
    name = "run granikv.poisson-8192 ttft_s p50"
    told["figures"][name] /= 2
    out.write_text(json.dumps(told))
    ended = granikv("validate", str(RUN), "--baseline", str(out))
    assert ended.code == 1
    assert name in ended.out


def test_a_baseline_of_other_runs_or_of_nothing_is_refused(granikv, tmp_path: Path):
    other = tmp_path / "other.json"
    other.write_text('{"figures": {"run elsewhere throughput": 0.1}}')
    ended = granikv("validate", str(RUN), "--baseline", str(other))
    assert ended.code == 1
    assert "compare other runs" in ended.error
    other.write_text("[]")
    ended = granikv("validate", str(RUN), "--baseline", str(other))
    assert ended.code == 1
    assert "is no ladder.json" in ended.error


def test_the_ablation_has_a_line_for_each_part(granikv):
    server = ["--model", "llama-3.1-8b", "--gpu", "h200-sxm", "--size-tokens", "845617"]
    ended = granikv("validate", "ablation", str(RESULTS), *server, "--cells", "8192x64")
    assert ended.code == 0
    for part in ("stock engine", "one cascade", "in COLD", "in HOT slabs", "full dispatch"):
        assert part in ended.out
    assert "4,104" in ended.out  # stock, as measured: the median of two servers, three times each
    bad = granikv("validate", "ablation", *server, "--cells", "poisson-8192")
    assert bad.code == 1
    assert "only steady cells" in bad.error
