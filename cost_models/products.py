"""Products: matrix products, small kernels and collectives of a step, on one rank."""

from granikv.cost_models import roofline
from granikv.cost_models.ideal import Peaks
from granikv.cost_models.models import ModelShape
from granikv.cost_models.params import Terms
from granikv.cost_models.passes import AllReduceTime, GemmTime
from granikv.cost_models.roofline import Rates


class Products:
    """What a step computes for each of its tokens, attention aside."""

    def __init__(
        self, terms: Terms, peaks: Peaks, rates: Rates, model: ModelShape, tp: int
    ) -> None:
        """One model at one tensor-parallel degree."""
        self._rates, self._model = rates, model
        self._all_reduce = AllReduceTime(terms.all_reduce, peaks, tp)
        self._gemms = [GemmTime(terms.gemm, peaks, gemm) for gemm in model.gemms(tp)]
        self._lm_head = GemmTime(terms.gemm, peaks, model.lm_head(tp))
        self._elementwise_bytes_per_token = _elementwise_bytes_per_token(model, tp)
        # One entry for each number of tokens that a step can have, so a bounded number.
        self._layers_by_tokens: dict[int, float] = {}
        self._decode_by_rows: dict[int, float] = {}

    def decode_ns(self, rows: int) -> float:
        """Matrix products and element-wise kernels of a decode step, all layers and the head."""
        cached = self._decode_by_rows.get(rows)
        if cached is None:
            cached = self._decode_by_rows[rows] = self.extend_ns(rows, rows)
        return cached

    def extend_ns(self, tokens: int, requests: int) -> float:
        """The same of an extend step: the head is asked for the last token of each request."""
        return self._layers_ns(tokens) + self._lm_head.ns(requests)

    def collective_ns(self, tokens: int) -> float:
        """All-reduces of a step of that many tokens: two a layer under tensor parallelism."""
        num_bytes = tokens * self._model.hidden * self._model.dtype_bytes
        return 2 * self._model.layers * self._all_reduce.ns(num_bytes)

    def _layers_ns(self, tokens: int) -> float:
        cached = self._layers_by_tokens.get(tokens)
        if cached is None:
            layer = sum([gemm.ns(tokens) for gemm in self._gemms])
            traffic_bytes = tokens * self._elementwise_bytes_per_token
            layer += roofline.elementwise_ns(self._rates, traffic_bytes)
            cached = self._layers_by_tokens[tokens] = self._model.layers * layer
        return cached


def _elementwise_bytes_per_token(model: ModelShape, tp: int) -> int:
    """Traffic of one token and layer outside matrix products and attention.

    Two norms with residual (two reads, two writes each), rotary embedding and KV write, gated
    activation.
    """
    q_width = model.q_heads_per_rank(tp) * model.head_dim
    kv_width = model.kv_heads_per_rank(tp) * model.head_dim
    elements = 8 * model.hidden + 2 * (q_width + 2 * kv_width) + 3 * model.intermediate // tp
    return elements * model.dtype_bytes
