"""The prefix pass through FlashAttention-3, with its kernel replaced by one of tensors."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from decode_support import (  # noqa: E402
    INTERPRETED,
    SMALL,
    Shared,
    attend,
    check,
    make_batch,
    mixed_batch,
    operator,
)

from granikv.kernels import fa3  # noqa: E402

pytestmark = INTERPRETED


class _VarlenInTorch:
    """FA3's call in float64, after its documentation; what it must not be asked for is NaN."""

    def flash_attn_varlen_func(
        self, q, k, v, q_starts, k_starts, *, max_seqlen_q, max_seqlen_k, seqused_k,
        softmax_scale, num_splits, return_softmax_lse,
    ):  # fmt: skip
        out = torch.full_like(q, float("nan"), dtype=torch.float64)
        lse = torch.full((q.shape[1], q.shape[0]), float("nan"), dtype=torch.float64)
        group = q.shape[1] // k.shape[1]
        ends = q_starts[1:].tolist()
        starts = zip(q_starts.tolist(), ends, k_starts.tolist(), seqused_k.tolist(), strict=False)
        for first, end, slot, tokens in starts:
            assert end - first <= max_seqlen_q
            assert tokens <= max_seqlen_k
            if tokens == 0 or end == first:
                continue
            keys = k[slot : slot + tokens].double().repeat_interleave(group, 1)
            values = v[slot : slot + tokens].double().repeat_interleave(group, 1)
            scores = torch.einsum("qhd,thd->hqt", q[first:end].double(), keys) * softmax_scale
            lse[:, first:end] = torch.logsumexp(scores, -1)
            out[first:end] = torch.einsum("hqt,thd->qhd", scores.softmax(-1), values)
        return out.to(torch.float32), lse.to(torch.float32)


def test_fa3_gets_every_dense_segment_and_nothing_else(monkeypatch):
    """Its kernel needs a card; what goes in and what becomes of its results does not."""
    monkeypatch.setattr(fa3, "load", _VarlenInTorch)
    check(mixed_batch(), prefix="fa3")
    shared = [Shared(200, (0, 2, 3)), Shared(150, (1, 5), "cascade"), Shared(260, (4, 1))]
    batch = make_batch(SMALL, shared, [5, 0, 17, 1, 30, 2], rows=8, groups=16)
    decode = operator(batch)
    check(batch, decode, prefix="fa3")
    check(batch.with_tables([], batch.private_slots), decode, prefix="fa3")
    with pytest.raises(NotImplementedError, match="needs a CUDA device"):
        attend(batch, decode, prefix="fa3", overlap="split")
    with pytest.raises(NotImplementedError, match="splits segments"):
        attend(batch, operator(batch, deterministic=True), prefix="fa3")
