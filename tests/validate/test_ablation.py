"""Which live results stand beside which line of the ablation."""

from typing import Any

import pytest

from granikv.sim.config import ServerConfig
from granikv.validate.compare.ablation import ablate
from granikv.validate.compare.replay import cost_of

COLD = '{"dispatch": "cascade_cold", "hot_fraction": 1e-05}'
GRAPHS = '{"disable_prefill_cuda_graph": false}'


def result(variant: str, rate: float, **more: Any) -> dict[str, Any]:
    return {
        "status": "complete", "model": "llama-3.1-8b", "cell": "2048x8", "variant": variant,
        "variables": {}, "tokens_per_s": rate, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("row", "server"),
    [
        (result("granikv", 7.0), "granikv"),
        (result("granikv", 7.0, engine=GRAPHS), "granikv"),
        (result("granikv", 7.0, settings=COLD), "granikv-cold"),
        (result("granikv", 7.0, settings='{"dispatch": "cascade"}'), "granikv-cascade"),
        (result("granikv-cascade", 7.0, variables={"GRANIKV_DISPATCH": "cascade"}),
         "granikv-cascade"),
        (result("stock", 7.0), "stock"),
        (result("granikv", 7.0, settings='{"hot_fraction": 0.4}'), None),
        (result("granikv", 7.0, engine='{"max_total_tokens": 9}'), None),
        (result("granikv-fa3", 7.0, variables={"GRANIKV_KERNELS": "fa3"}), None),
        (result("stock-page64", 7.0), None),
    ],
)  # fmt: skip
def test_a_result_stands_beside_the_server_that_was_told_the_same(row: dict[str, Any], server: str):
    cost = cost_of("llama-3.1-8b", "h200-sxm", 1)
    rows = ablate(["2048x8"], ServerConfig(size_tokens=100_000), cost, [row])
    assert {one.server: one.live for one in rows if one.live is not None} == (
        {server: 7.0} if server else {}
    )
