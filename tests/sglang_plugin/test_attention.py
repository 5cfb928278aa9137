"""The attention backend on the real tree, in Triton's interpreter, against float64 row by row."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang.srt.mem_cache.radix_cache", reason="needs sglang 0.5.17")

import tree_support  # noqa: E402
import triton  # noqa: E402

from granikv.core.admission import SharedAdmission  # noqa: E402
from granikv.core.dispatch import Dispatcher  # noqa: E402
from granikv.core.errors import ConfigError  # noqa: E402
from granikv.core.step import Mode  # noqa: E402
from granikv.cost_models.dispatch_table import build_cost_table  # noqa: E402
from granikv.cost_models.hardware import load_hardware  # noqa: E402
from granikv.cost_models.models import load_model  # noqa: E402
from granikv.cost_models.params import load_params  # noqa: E402
from granikv.cost_models.step import StepCost  # noqa: E402
from granikv.kernels.decode import SharedPrefixDecode  # noqa: E402
from granikv.kernels.shapes import Heads  # noqa: E402
from granikv.sglang_plugin.allocator import HotColdTokenAllocator  # noqa: E402
from granikv.sglang_plugin.attention import GraniDecodeBackend  # noqa: E402
from granikv.sglang_plugin.promotion import promote_ready  # noqa: E402
from granikv.sglang_plugin.radix_cache import GraniRadixCache  # noqa: E402
from granikv.sglang_plugin.step_check import StepCheck  # noqa: E402
from granikv.sglang_plugin.step_plan import StepPlanner  # noqa: E402
from granikv.sglang_plugin.step_tables import StepTables  # noqa: E402

INTERPRETED = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"
)
HEADS = Heads(4, 2, 64)
SIZE = 1500
GROUPS = 64


@pytest.fixture(scope="module")
def table():
    hardware = load_hardware("h200-sxm")
    cost = StepCost(load_params("h200-sxm"), load_model("llama-3.1-8b"), hardware, 1)
    return build_cost_table(cost)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(tree_support, "CONTEXT", 400)
    allocator = HotColdTokenAllocator(
        SIZE, torch.float16, "cpu", None, False,
        hot_tokens=600, admission=SharedAdmission(min_tokens=8),
    )  # fmt: skip
    return tree_support.MarkedServer(allocator, GraniRadixCache)


def _prompts(seed=0):
    """Nested and unshared: three rows on one long prefix, two of them on more, one alone."""
    rng = np.random.default_rng(seed)
    first, second, *own = (rng.integers(2, 1000, n).tolist() for n in (150, 40, 7, 5, 9, 30))
    return [first + second + own[0], first + second + own[1], first + own[2], own[3]]


def _admit(server, prompts, promote=True):
    for prompt in prompts:
        assert server.admit(prompt, chunk=1000)
    if promote:
        promote_ready(server.scheduler)
    return server.running


class Pool:
    """KV of one layer, as SGLang's pool gives it."""

    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        shape = (SIZE + 1, HEADS.kv, HEADS.dim)
        self.k, self.v = (torch.randn(shape, generator=generator).half() for _ in range(2))

    def get_kv_buffer(self, _layer):
        return self.k, self.v

    def set_kv_buffer(self, _layer, location, k, v, *_scales):
        self.k[location.loc], self.v[location.loc] = k.view_as(self.k[location.loc]), v.view_as(
            self.v[location.loc]
        )  # fmt: skip


def _layer(**other):
    return SimpleNamespace(
        **{
            "layer_id": 0, "logit_cap": 0.0, "sliding_window_size": -1, "scaling": HEADS.dim**-0.5,
            "is_cross_attention": False, "v_head_dim": HEADS.dim, "k_scale": None, "v_scale": None,
        } | other
    )  # fmt: skip


def _backend(server, table, choice="cascade", share=True, check=0):
    slots = server.rows.req_to_token
    tables = StepTables(len(slots), GROUPS, slots)
    pool = Pool()
    width = slots.shape[1]

    def operator():
        return SharedPrefixDecode(len(slots), HEADS, GROUPS, width, torch.float16, "cpu")

    planner = StepPlanner(Dispatcher(table, choice), HEADS, overlaps=("serial",), share=share)
    checker = StepCheck(check, operator()) if check else None
    return GraniDecodeBackend(pool, planner, operator(), tables, None, checker)


def _batch(reqs, padded):
    """What a graph's replay shows a backend: padding rows are request 0 with one token."""
    lengths = [len(req.origin_input_ids) for req in reqs]
    padding = padded - len(reqs)
    return SimpleNamespace(
        batch_size=padded,
        req_pool_indices=torch.tensor([req.req_pool_idx for req in reqs] + [0] * padding),
        seq_lens=torch.tensor(lengths + [1] * padding),
        seq_lens_cpu=np.array(lengths),
        out_cache_loc=torch.tensor([], dtype=torch.int64),
    )


def _run(backend, server, reqs, padded=None):
    batch = _batch(reqs, padded or len(reqs))
    q = torch.randn(batch.batch_size, HEADS.q * HEADS.dim).half()
    backend.plan_step(server.tree, reqs, batch.seq_lens_cpu)
    backend.init_forward_metadata(batch)
    out = backend.forward_decode(q, None, None, _layer(), batch)
    return q, out


def _reference(server, pool, reqs, q):
    rows = []
    for req, query in zip(reqs, q.double(), strict=False):
        slots = server.rows.req_to_token[req.req_pool_idx, : len(req.origin_input_ids)].long()
        k, v = pool.k[slots].double(), pool.v[slots].double()
        heads = query.view(HEADS.kv, -1, HEADS.dim)
        weights = torch.einsum("hgd,thd->hgt", heads, k) * HEADS.dim**-0.5
        rows.append(torch.einsum("hgt,thd->hgd", weights.softmax(-1), v).flatten())
    return torch.stack(rows)


@INTERPRETED
@pytest.mark.parametrize("choice", ["paged", "cascade", "dense", "cost", "threshold"])
def test_every_row_attends_to_its_own_tokens(server, table, choice):
    reqs = _admit(server, _prompts())
    backend = _backend(server, table, choice)
    q, out = _run(backend, server, reqs, padded=7)
    assert [tuple(s)[1:] for s in backend.last_step.shape.segments] == [(150, 3), (40, 2)]
    want = _reference(server, backend.token_to_kv_pool, reqs, q)
    assert (out[: len(reqs)].double() - want).abs().max() < 4e-3


@INTERPRETED
@pytest.mark.parametrize("promote", [True, False])
def test_shared_prefixes_may_be_cascades_wherever_they_lie(server, table, promote):
    reqs = _admit(server, _prompts(), promote)
    backend = _backend(server, table, "cascade_cold")
    q, out = _run(backend, server, reqs, padded=7)
    segments = backend.last_step.shape.segments
    assert sorted(s[1:] for s in segments) == [(40, 2), (150, 3)]
    assert [s.base == 0 for s in segments] == [not promote] * 2
    assert set(backend.last_step.plan.modes) == {Mode.CASCADE}
    want = _reference(server, backend.token_to_kv_pool, reqs, q)
    assert (out[: len(reqs)].double() - want).abs().max() < 4e-3


@INTERPRETED
def test_cascade_global_reads_together_what_the_whole_batch_shares(server, table):
    reqs = list(_admit(server, _prompts(), promote=False))
    backend = _backend(server, table, "cascade_global")
    for batch, segments in ((reqs[:3], [(0, 150, 3)]), (reqs, [])):
        q, out = _run(backend, server, batch)
        step = backend.last_step
        assert [tuple(s) for s in step.shape.segments] == segments
        assert step.plan.modes == (Mode.CASCADE,) * len(segments)
        want = _reference(server, backend.token_to_kv_pool, batch, q)
        assert (out.double() - want).abs().max() < 4e-3


@INTERPRETED
def test_steps_follow_one_another_on_the_same_tables(server, table):
    reqs = _admit(server, _prompts())
    backend = _backend(server, table)
    for batch in (reqs, reqs[::-1], reqs[:2], [reqs[3]], reqs):
        q, out = _run(backend, server, list(batch), padded=len(batch) + 1)
        want = _reference(server, backend.token_to_kv_pool, batch, q)
        assert (out[: len(batch)].double() - want).abs().max() < 4e-3


@INTERPRETED
def test_new_keys_and_values_are_stored_before_they_are_read(server, table):
    (req,) = _admit(server, _prompts()[3:])
    backend = _backend(server, table)
    batch = _batch([req], 1)
    last = int(server.rows.req_to_token[req.req_pool_idx, len(req.origin_input_ids) - 1])
    batch.out_cache_loc = torch.tensor([last])
    k, v = (torch.randn(1, HEADS.kv * HEADS.dim).half() for _ in range(2))
    q = torch.randn(1, HEADS.q * HEADS.dim).half()
    backend.plan_step(server.tree, [req], batch.seq_lens_cpu)
    backend.init_forward_metadata(batch)
    out = backend.forward_decode(q, k, v, _layer(), batch)
    assert torch.equal(backend.token_to_kv_pool.k[last].flatten(), k[0])
    want = _reference(server, backend.token_to_kv_pool, [req], q)
    assert (out.double() - want).abs().max() < 4e-3


def test_segments_are_planned_anew_only_when_they_may_have_changed(server, table):
    reqs = list(_admit(server, _prompts()))
    backend = _backend(server, table)
    lengths = np.array([len(req.origin_input_ids) for req in reqs])

    def planned():
        backend.plan_step(server.tree, reqs, lengths)
        return backend.last_step.tables

    first = planned()
    assert planned() is first
    for version in ("paths_version", "hot_version"):
        before = planned()
        setattr(server.tree, version, getattr(server.tree, version) + 1)
        assert planned() is not before
    again = planned()
    reqs.append(reqs.pop(0))  # never by SGLang: it makes a new list
    assert planned() is again
    reqs = list(reqs)
    assert planned() is not again


def test_without_sharing_every_row_reads_all_it_has(server, table):
    reqs = _admit(server, _prompts())
    backend = _backend(server, table, share=False)
    lengths = np.array([len(req.origin_input_ids) for req in reqs])
    backend.plan_step(server.tree, reqs, lengths)
    step = backend.last_step
    assert step.shape.segments == ()
    assert step.shape.private_tokens == lengths.sum()
    assert (step.variant, backend.planner.variants) == ("stream", ("stream",))


def test_dense_segments_choose_the_graph_variant(server, table):
    reqs = _admit(server, _prompts())
    lengths = np.array([len(req.origin_input_ids) for req in reqs])
    for choice, mode, variant in (
        ("dense", Mode.DENSE, "serial"),
        ("cascade", Mode.CASCADE, "stream"),
        ("paged", Mode.PAGED, "stream"),
    ):
        backend = _backend(server, table, choice)
        backend.plan_step(server.tree, reqs, lengths)
        assert set(backend.last_step.plan.modes) == {mode}
        assert backend.variant == variant


@INTERPRETED
def test_the_check_sees_a_wrong_result_and_no_other(server, table, caplog):
    reqs = _admit(server, _prompts())
    backend = _backend(server, table, check=2)
    _run(backend, server, reqs)
    assert not backend.runs_eagerly
    _run(backend, server, reqs)
    assert backend.runs_eagerly
    assert (backend.check.steps, backend.check.failures) == (1, 0)
    assert backend.check.largest_error < 2**-8

    run = backend._operator.run

    def broken(*arguments):
        out = run(*arguments)
        out[1] *= 1.1
        return out

    backend._operator.run = broken
    for _ in range(2):
        _run(backend, server, reqs)
    assert (backend.check.steps, backend.check.failures) == (2, 1)
    assert backend.check.largest_error == pytest.approx(0.1, rel=0.1)
    assert "layer 0 of a step with 4 rows differs" in caplog.text


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"logit_cap": 30.0}, "a logit cap"),
        ({"sliding_window_size": 128}, "a sliding window"),
        ({"scaling": 1.0}, "another softmax scale"),
        ({"is_cross_attention": True}, "cross attention"),
    ],
)
def test_layers_that_no_kernel_computes_are_refused(server, table, other, message):
    backend = _backend(server, table)
    with pytest.raises(ConfigError, match=message):
        backend.forward_decode(None, None, None, _layer(**other), None)
