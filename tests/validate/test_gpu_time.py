"""The GPU time of a trace by kind: what overlaps is busy once, what is no kernel does not count."""

import pytest

from granikv.validate.gpu_time import kind_of, times_us


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("void sglang::cross_device_reduce_1stage<__nv_bfloat16, 2>", "communication"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"),
        ("fused_step", "attention"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_TNT", "products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", "products"),
        ("stream_pass_kernel", "attention"),
        ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>", "other"),
    ],
)
def test_kernels_have_kinds(name: str, kind: str):
    assert kind_of(name) == kind


def test_overlap_counts_once():
    def kernel(name: str, ts: float, dur: float, cat: str = "kernel") -> dict[str, object]:
        return {"name": name, "ts": ts, "dur": dur, "cat": cat}

    events = [
        kernel("gemm", 100, 10),
        kernel("merge_pass", 105, 10),  # half of it beside the product
        kernel("cudaLaunchKernel", 0, 500, "cuda_runtime"),
        kernel("gemm", 130, 5),
        kernel("merge_pass", 131, 2),  # wholly beside it
        {"name": "no event of a kernel"},
    ]
    assert times_us(events) == {"products": 15, "attention": 12, "busy": 20, "span": 35}


def test_a_trace_without_kernels_is_an_error():
    with pytest.raises(ValueError, match="no kernels"):
        times_us([{"name": "x", "cat": "cpu_op", "ts": 0, "dur": 1}])
