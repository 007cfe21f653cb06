"""What vLLM 0.33 offers beside ours, built through its own classes: MoE experts and linear kernels.

Peers that take MXFP8 weights get the same codes and scales as ours. Block-FP8, channel-FP8 and bf16 peers get the same
weights in their own format: what a user could pick by giving up MXFP8. Everything that can't be imported, built or run
on this device is named once and left out.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gemm_timing as timing
import torch

from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8, quantize_mxfp8

BF16 = torch.bfloat16
TOP_K = 8
_DISTINCT = 8
"""Experts drawn at random; further ones are these with their rows moved."""


@contextlib.contextmanager
def vllm_session() -> Iterator[bool]:
    """Inside, vLLM's classes find the config, the forward context and the workspace they expect; False without vLLM."""
    try:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.forward_context import set_forward_context
        from vllm.v1.worker.workspace import init_workspace_manager
    except Exception as error:  # an import of compiled parts may fail in any way
        print(f"left out: all peers of vLLM: {timing.describe(error)}", flush=True)
        yield False
        return
    init_workspace_manager(torch.device("cuda", torch.cuda.current_device()))
    config = VllmConfig()
    with torch.no_grad(), set_current_vllm_config(config), set_forward_context(None, config):
        yield True


@contextlib.contextmanager
def _model_dtype() -> Iterator[None]:
    """vLLM reads a model's dtype from torch's default."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def _in_model_dtype(call: Callable) -> Callable:
    def wrapped(argument: Any) -> torch.Tensor:
        with _model_dtype():
            return call(argument)

    return wrapped


# ---- experts ----


@dataclass(frozen=True)
class MoeWeights:
    """MXFP8 weights of local experts, gate rows before up rows in w13."""

    w13: torch.Tensor  # [E, 2I, H] float8_e4m3fn
    w13_scales: torch.Tensor  # [E, 2I, H/32] uint8
    w2: torch.Tensor  # [E, H, I]
    w2_scales: torch.Tensor  # [E, H, I/32]
    top_k: int = TOP_K

    @property
    def num_experts(self) -> int:
        """E."""
        return self.w13.shape[0]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.w13.shape[2]

    @property
    def intermediate_size(self) -> int:
        """I."""
        return self.w2.shape[2]


def random_experts(
    num_experts: int, hidden_size: int, intermediate_size: int, *, seed: int, top_k: int = TOP_K
) -> MoeWeights:
    """Quantized normal weights of the usual size."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def one(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.empty(num_experts, rows, columns, dtype=torch.float8_e4m3fn, device="cuda")
        scales = torch.empty(num_experts, rows, columns // 32, dtype=torch.uint8, device="cuda")
        for e in range(num_experts):
            if e < _DISTINCT:
                plain = torch.randn(rows, columns, generator=generator, device="cuda", dtype=torch.float32) * 0.02
                codes[e], scales[e] = quantize_mxfp8(plain.to(BF16))
            else:
                shift = 7 * (e // _DISTINCT)
                codes.view(torch.uint8)[e] = codes.view(torch.uint8)[e % _DISTINCT].roll(shift, 0)
                scales[e] = scales[e % _DISTINCT].roll(shift, 0)
        return codes, scales

    return MoeWeights(*one(2 * intermediate_size, hidden_size), *one(hidden_size, intermediate_size), top_k)


def copied(weights: MoeWeights) -> MoeWeights:
    """The same weights in other memory."""
    parts = (weights.w13, weights.w13_scales, weights.w2, weights.w2_scales)
    return MoeWeights(*(part.clone() for part in parts), weights.top_k)


@dataclass(frozen=True)
class Routing:
    """One step's tokens and where they go."""

    x: torch.Tensor  # [M, H] bf16
    topk_ids: torch.Tensor  # [M, top_k] int32
    topk_weights: torch.Tensor  # [M, top_k] fp32

    @property
    def experts_hit(self) -> int:
        """How many experts get a token."""
        return len(self.topk_ids.unique())


def balanced_routing(num_tokens: int, num_experts: int, hidden_size: int, *, seed: int, top_k: int = TOP_K) -> Routing:
    """Every expert gets the same number of tokens, or the next one.

    A token's experts are distinct where their number is a multiple of top_k, and nearly always otherwise.
    """
    generator = torch.Generator().manual_seed(seed)
    assignments = num_tokens * top_k
    whole = [torch.randperm(num_experts, generator=generator) for _ in range(-(-assignments // num_experts))]
    ids = torch.cat(whole)[:assignments].view(num_tokens, top_k)
    ids = ids[torch.randperm(num_tokens, generator=generator)]  # neighbours of one permutation don't stay together
    weights = torch.rand(num_tokens, top_k, generator=generator, dtype=torch.float32) + 0.1
    weights = weights / weights.sum(-1, keepdim=True)
    x = torch.randn(num_tokens, hidden_size, generator=generator, dtype=torch.float32)
    return Routing(x.to("cuda", BF16), ids.to("cuda", torch.int32), weights.cuda())


def drawn_routing(
    num_tokens: int, num_experts: int, hidden_size: int, *, seed: int, top_k: int = TOP_K, skew: float = 0.0
) -> Routing:
    """Every token draws its experts by itself, none twice.

    Args:
        skew: the expert of rank r is drawn in proportion to r to the power of minus this; 0: all alike.
    """
    generator = torch.Generator().manual_seed(seed)
    popularity = torch.arange(1, num_experts + 1).float().pow(-skew)[torch.randperm(num_experts, generator=generator)]
    ids = torch.multinomial(popularity.expand(num_tokens, -1), top_k, generator=generator)
    weights = torch.rand(num_tokens, top_k, generator=generator, dtype=torch.float32) + 0.1
    x = torch.randn(num_tokens, hidden_size, generator=generator, dtype=torch.float32)
    weights = weights / weights.sum(-1, keepdim=True)
    return Routing(x.to("cuda", BF16), ids.to("cuda", torch.int32), weights.cuda())


MoeCall = Callable[[Routing], torch.Tensor]
MXFP8_EXPERTS = ("marlin", "humming_indexed", "humming_grouped")
OTHER_EXPERTS = ("bf16_triton", "fp8_block_triton", "fp8_block_deepgemm", "fp8_channel_cutlass")


def expert_bytes(name: str, weights: MoeWeights) -> float:
    """Bytes of one expert's weights in a peer's format."""
    elements = 3 * weights.hidden_size * weights.intermediate_size
    return elements * (2.0 if name == "bf16_triton" else 1.0 if name.startswith("fp8") else timing.FP8_BLOCK_BYTES)


def build_experts(name: str, weights: MoeWeights) -> MoeCall:
    """vLLM's whole expert layer, bf16 in and out: routing, w13, activation, w2, weighted sum.

    Raises:
        Exception: whatever vLLM says when it can't.
    """
    with _model_dtype():
        return _in_model_dtype(_experts(name, weights))


def _experts(name: str, weights: MoeWeights) -> MoeCall:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    if name == "bf16_triton":
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

        w13, w2 = (_plain(c, s) for c, s in ((weights.w13, weights.w13_scales), (weights.w2, weights.w2_scales)))
        return lambda r: fused_experts(
            r.x,
            w13,
            w2,
            r.topk_weights,
            r.topk_ids,
            activation=MoEActivation.SILU,
            global_num_experts=weights.num_experts,
        )
    if name in MXFP8_EXPERTS:
        kernel, w13, w2 = _mxfp8_experts(name, weights)
    else:
        kernel, w13, w2 = _fp8_experts(name, weights)
    return lambda r: kernel.apply(
        r.x, w13, w2, r.topk_weights, r.topk_ids, MoEActivation.SILU, weights.num_experts, None, False
    )


def _plain(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    out = torch.empty(codes.shape, dtype=BF16, device=codes.device)
    for e in range(codes.shape[0]):
        out[e] = dequantize_mxfp8(codes[e], scales[e], dtype=BF16)
    return out


def _moe_config(weights: MoeWeights, backend: str) -> Any:
    from vllm.model_executor.layers.fused_moe import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    return FusedMoEConfig(
        num_experts=weights.num_experts,
        experts_per_token=weights.top_k,
        hidden_dim=weights.hidden_size,
        intermediate_size=weights.intermediate_size,
        num_local_experts=weights.num_experts,
        num_logical_experts=weights.num_experts,
        activation=MoEActivation.SILU,
        device=weights.w13.device,
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=BF16,
        moe_backend=backend,
        max_num_tokens=8192,
    )


def _expert_layer(config: Any, weights: MoeWeights, block_shape: list[int] | None) -> Any:
    """A RoutedExperts with the attributes that vLLM's loaders read, and no parameters yet."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    layer = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(layer)
    experts = weights.num_experts
    attributes = {
        "layer_name": "model.layers.0.mlp.experts",
        "moe_config": config,
        "quant_config": None,
        "params_dtype": BF16,
        "orig_dtype": BF16,
        "num_experts": experts,
        "local_num_experts": experts,
        "global_num_experts": experts,
        "hidden_size": weights.hidden_size,
        "intermediate_size_per_partition": weights.intermediate_size,
        "activation": config.activation,
        "top_k": weights.top_k,
        "w13_input_scale": None,
        "w2_input_scale": None,
        "apply_router_weight_on_input": False,
        "weight_block_size": block_shape,
    }
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def _mxfp8_experts(name: str, weights: MoeWeights) -> tuple[Any, torch.Tensor, torch.Tensor]:
    from vllm.model_executor.layers.quantization.online.mxfp8 import Mxfp8OnlineMoEMethod

    if name.startswith("humming"):
        os.environ["VLLM_HUMMING_MOE_GEMM_TYPE"] = name.removeprefix("humming_")
    config = _moe_config(weights, name.split("_")[0])
    method = Mxfp8OnlineMoEMethod(moe=config)
    if name.startswith("humming"):
        from vllm.model_executor.layers.fused_moe.experts import fused_humming_moe as humming

        grouped = name == "humming_grouped"
        method.experts_cls = humming.HummingGroupedExperts if grouped else humming.HummingIndexedExperts
    layer = _expert_layer(config, weights, [1, 32])
    parts = (weights.w13, weights.w2, weights.w13_scales, weights.w2_scales)
    method._setup_kernel(layer, *(part.clone() for part in parts), None, None)
    return method.moe_kernel, layer.w13_weight.data, layer.w2_weight.data


def _fp8_experts(name: str, weights: MoeWeights) -> tuple[Any, torch.Tensor, torch.Tensor]:
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as oracle

    if name == "fp8_block_triton":
        from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts as experts_class

        backend = oracle.Fp8MoeBackend.TRITON
    elif name == "fp8_block_deepgemm":
        from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import DeepGemmExperts as experts_class

        backend = oracle.Fp8MoeBackend.DEEPGEMM
    else:
        from vllm.model_executor.layers.fused_moe.experts.cutlass_moe import CutlassExpertsFp8 as experts_class

        backend = oracle.Fp8MoeBackend.VLLM_CUTLASS
    channel = name == "fp8_channel_cutlass"
    block_shape = None if channel else [128, 128]
    config = _moe_config(weights, "auto")
    layer = _expert_layer(config, weights, block_shape)
    quantize = quantize_channels if channel else quantize_blocks
    w13, w13_scales = _each(quantize, weights.w13, weights.w13_scales)
    w2, w2_scales = _each(quantize, weights.w2, weights.w2_scales)
    w13, w2, w13_scales, w2_scales = oracle.convert_to_fp8_moe_kernel_format(
        backend, layer, w13, w2, w13_scales, w2_scales, None, None
    )
    quant_config = oracle.make_fp8_moe_quant_config(
        backend,
        w13_scales,
        w2_scales,
        None,
        None,
        block_shape=block_shape,
        per_act_token_quant=channel,
        per_out_ch_quant=channel,
    )
    return oracle.make_fp8_moe_kernel(quant_config, config, experts_class, backend), w13, w2


def _each(quantize: Callable, codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    results = [quantize(dequantize_mxfp8(c, s)) for c, s in zip(codes, scales, strict=True)]
    codes = torch.stack([r[0].view(torch.uint8) for r in results]).view(torch.float8_e4m3fn)
    return codes, torch.stack([r[1] for r in results])


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 with a float32 scale for 128x128 elements."""
    n, k = weight.shape
    blocks = weight.float().view(n // 128, 128, k // 128, 128)
    scales = blocks.abs().amax((1, 3)) / 448
    return (blocks / scales[:, None, :, None]).view(n, k).to(torch.float8_e4m3fn), scales


def quantize_channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 with a float32 scale for every row."""
    scales = weight.float().abs().amax(-1, keepdim=True) / 448
    return (weight.float() / scales).to(torch.float8_e4m3fn), scales


# ---- linear layers ----

LinearCall = Callable[[torch.Tensor], torch.Tensor]
MXFP8_LINEAR = ("marlin", "humming", "vllm_default")
OTHER_LINEAR = ("bf16_cublas", "fp8_block_deepgemm", "fp8_block_triton", "fp8_channel_cutlass", "fp8_channel_torch")
NEEDS_NO_VLLM = ("bf16_cublas", "fp8_channel_torch")


def linear_bytes(name: str, n: int, k: int) -> float:
    """Bytes of a weight in a peer's format."""
    return n * k * (2.0 if name == "bf16_cublas" else 1.0 if name.startswith("fp8") else timing.FP8_BLOCK_BYTES)


def build_linear(name: str, codes: torch.Tensor, scales: torch.Tensor) -> LinearCall:
    """A linear layer, bf16 in and out, the quantization of its tokens included; weight ``[N, K]`` in MXFP8.

    Raises:
        Exception: whatever vLLM says when it can't.
    """
    with _model_dtype():
        return _in_model_dtype(_linear(name, codes, scales))


def _linear(name: str, codes: torch.Tensor, scales: torch.Tensor) -> LinearCall:
    if name in MXFP8_LINEAR:
        return _mxfp8_linear(name, codes, scales)
    plain = dequantize_mxfp8(codes, scales)
    if name == "bf16_cublas":
        weight = plain.to(BF16)
        return lambda x: torch.nn.functional.linear(x, weight)
    if name in ("fp8_channel_torch", "fp8_channel_cutlass"):
        weight, weight_scales = quantize_channels(plain)
        return (_torch_channels if name == "fp8_channel_torch" else _cutlass_channels)(weight, weight_scales)
    return _block_fp8(name, *quantize_blocks(plain))


def default_linear_name(n: int, k: int) -> str:
    """The class that vLLM takes by itself for an MXFP8 linear layer of that shape."""
    from vllm.model_executor.kernels.linear import init_mxfp8_linear_kernel

    return type(init_mxfp8_linear_kernel(weight_shape=(n, k))).__name__


def _mxfp8_linear(name: str, codes: torch.Tensor, scales: torch.Tensor) -> LinearCall:
    from vllm.model_executor.kernels import linear as kernels

    n, k = codes.shape
    if name == "vllm_default":
        kernel = kernels.init_mxfp8_linear_kernel(weight_shape=(n, k))
    else:
        from vllm.model_executor.kernels.linear.mxfp8.humming import HummingMxfp8LinearKernel
        from vllm.model_executor.kernels.linear.mxfp8.marlin import MarlinMxfp8LinearKernel
        from vllm.model_executor.kernels.linear.mxfp8.Mxfp8LinearKernel import Mxfp8LinearLayerConfig

        kernel_class = {"marlin": MarlinMxfp8LinearKernel, "humming": HummingMxfp8LinearKernel}[name]
        config = Mxfp8LinearLayerConfig(weight_shape=(n, k))
        for supported, reason in (kernel_class.is_supported(), kernel_class.can_implement(config)):
            if not supported:
                raise RuntimeError(reason)
        kernel = kernel_class(config)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(codes.clone(), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scales.clone(), requires_grad=False)
    attributes = {
        "input_size": k,
        "output_size": n,
        "input_size_per_partition": k,
        "output_size_per_partition": n,
        "output_partition_sizes": [n],
        "logical_widths": [n],
        "params_dtype": BF16,
        "orig_dtype": BF16,
        "has_bias": False,
        "bias": None,
        "input_scale": None,
        "prefix": "model.layers.0.self_attn.linear",
    }
    for attribute, value in attributes.items():
        setattr(layer, attribute, value)
    kernel.process_weights_after_loading(layer)
    return lambda x: kernel.apply_weights(layer, x)


def _torch_channels(weight: torch.Tensor, weight_scales: torch.Tensor) -> LinearCall:
    """cuBLAS or CUTLASS through torch; tokens quantized by a compiled function, one scale a row."""
    scales = weight_scales.t().contiguous()

    def call(x: torch.Tensor) -> torch.Tensor:
        codes, token_scales = _compiled_row_quantizer()(x)
        return torch._scaled_mm(codes, weight.t(), scale_a=token_scales, scale_b=scales, out_dtype=BF16)

    return call


_compiled: dict[str, Callable] = {}


def _compiled_row_quantizer() -> Callable:
    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = x.abs().amax(-1, keepdim=True).float() / 448
        return (x.float() / scales).to(torch.float8_e4m3fn), scales

    return _compiled.setdefault("rows", torch.compile(quantize, dynamic=True))


def _cutlass_channels(weight: torch.Tensor, weight_scales: torch.Tensor) -> LinearCall:
    from vllm import _custom_ops as ops

    def call(x: torch.Tensor) -> torch.Tensor:
        codes, token_scales = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
        return ops.cutlass_scaled_mm(codes, weight.t(), token_scales, weight_scales, BF16)

    return call


def _block_fp8(name: str, weight: torch.Tensor, weight_scales: torch.Tensor) -> LinearCall:
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    if name == "fp8_block_triton":

        def with_triton(x: torch.Tensor) -> torch.Tensor:
            codes, token_scales = fp8_utils.per_token_group_quant_fp8(x, 128, use_ue8m0=False)
            return fp8_utils.w8a8_triton_block_scaled_mm(
                codes, weight, token_scales, weight_scales, [128, 128], output_dtype=BF16
            )

        return with_triton
    from vllm.utils import deep_gemm

    if not deep_gemm.is_deep_gemm_supported():
        raise RuntimeError("vLLM finds no DeepGEMM for this device")
    weight, weight_scales = fp8_utils.deepgemm_post_process_fp8_weight_block(
        wq=weight, ws=weight_scales, quant_block_shape=(128, 128), use_e8m0=False
    )

    def with_deep_gemm(x: torch.Tensor) -> torch.Tensor:
        codes, token_scales = fp8_utils.per_token_group_quant_fp8(
            x, 128, column_major_scales=True, tma_aligned_scales=True, use_ue8m0=False
        )
        out = torch.empty(x.shape[0], weight.shape[0], dtype=BF16, device=x.device)
        deep_gemm.fp8_gemm_nt((codes, token_scales), (weight, weight_scales), out, is_deep_gemm_e8m0_used=False)
        return out

    return with_deep_gemm
