"""The families whose providers are chosen at start-up."""

from vllm_rose_plugin.kernels.gemm.family import FAMILY as MXFP8_LINEAR
from vllm_rose_plugin.kernels.jit.providers import Family
from vllm_rose_plugin.kernels.moe_batched.family import FAMILY as MOE_BATCHED
from vllm_rose_plugin.kernels.moe_dispatch.family import LAUNCHES as MOE_DISPATCH_LAUNCHES
from vllm_rose_plugin.kernels.moe_experts.family import FAMILY as MOE_EXPERTS
from vllm_rose_plugin.kernels.mxfp8_quantize.family import FAMILY as MXFP8_QUANTIZE
from vllm_rose_plugin.kernels.qk_norm.family import FAMILY as QK_NORM
from vllm_rose_plugin.kernels.swiglu_quantize.family import FAMILY as SWIGLU_QUANTIZE

FAMILIES: tuple[Family, ...] = (
    MOE_EXPERTS,
    MOE_DISPATCH_LAUNCHES,
    MOE_BATCHED,
    MXFP8_LINEAR,
    MXFP8_QUANTIZE,
    QK_NORM,
    SWIGLU_QUANTIZE,
)
