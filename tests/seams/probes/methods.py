"""Run every MXFP8 MoE method and the linear kernel of the vLLM on the path, through the plugin; print what happened."""

import json
import os
import sys
import tempfile

import torch
import vllm
import vllm.engine.arg_utils

import vllm_rose_plugin

CUDA_STARTS = []
torch.cuda._lazy_init = lambda: CUDA_STARTS.append(1)  # what every use of a CUDA context goes through
vllm_rose_plugin.register()

import importlib  # noqa: E402

from vllm.config import KernelConfig, VllmConfig, get_current_vllm_config, set_current_vllm_config  # noqa: E402
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.model_executor.kernels.linear import init_mxfp8_linear_kernel  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.config import (  # noqa: E402
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.oracle.mxfp8 import select_mxfp8_moe_backend  # noqa: E402
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod  # noqa: E402

from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8, quantize_mxfp8  # noqa: E402
from vllm_rose_plugin.layers import experts  # noqa: E402
from vllm_rose_plugin.seams.mxfp8_moe import METHODS  # noqa: E402
from vllm_rose_plugin.seams.seam import vllm_minor  # noqa: E402

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, TOKENS = 4, 64, 32, 2, 5


def moe_config(**changes):
    values = {
        "num_experts": EXPERTS,
        "experts_per_token": TOP_K,
        "hidden_dim": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_local_experts": EXPERTS,
        "num_logical_experts": EXPERTS,
        "activation": MoEActivation.SILU,
        "device": "cpu",
        "routing_method": RoutingMethodType.Renormalize,
        "moe_parallel_config": FusedMoEParallelConfig.make_no_parallel(),
        "in_dtype": torch.bfloat16,
        "moe_backend": "rose_cutedsl",
    }
    return FusedMoEConfig(**{**values, **changes})


class Layer(torch.nn.Module):
    """What the methods read of vLLM's RoutedExperts."""

    layer_name = "model.layers.7.mlp.experts"
    hidden_size = HIDDEN
    intermediate_size_per_partition = INTERMEDIATE
    activation = MoEActivation.SILU
    global_num_experts = local_num_experts = EXPERTS
    expert_map = None
    apply_router_weight_on_input = False

    def _expert_routing_tables(self):
        return None


def make(key, cls, config):
    if key == "modelopt":
        from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config

        minimax = ModelOptMxFp8Config.from_config({"quant_method": "mxfp8", "ignored_layers": ["lm_head"]})
        assert minimax.exclude_modules == ["lm_head"], minimax.exclude_modules
        return cls(minimax, config)
    if key == "online":
        return cls(moe=config)
    if key == "quark":
        from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp8Dynamic, kMxfp8Static

        return cls(config, kMxfp8Static, kMxfp8Dynamic)
    return cls(config)


def expected(x, w13, w2, topk_weights, topk_ids, on_input):
    """fp64, on dequantized weights and activations quantized where the kernels quantize."""

    def q(v):
        return dequantize_mxfp8(*quantize_mxfp8(v.float())).double()

    w13, w2 = (dequantize_mxfp8(*w).double() for w in (w13, w2))
    out = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for t in range(TOKENS):
        for weight, expert in zip(topk_weights[t], topk_ids[t], strict=True):
            token, scale = (x[t] * weight.to(x.dtype), 1.0) if on_input else (x[t], weight.double())
            gate, up = (w13[expert] @ q(token)).chunk(2)
            out[t] += scale * (w2[expert] @ q(torch.nn.functional.silu(gate) * up)).bfloat16().double()
    return out


def run_method(key, *, top_k=TOP_K, on_input=False):
    module, name, _ = METHODS[key]
    method = make(key, getattr(importlib.import_module(module), name), moe_config(experts_per_token=top_k))
    layer = Layer()
    layer.apply_router_weight_on_input = on_input
    method.create_weights(
        layer,
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size_per_partition=INTERMEDIATE,
        params_dtype=torch.bfloat16,
        weight_loader=lambda *a, **k: None,
    )
    generator = torch.Generator().manual_seed(3)
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator).bfloat16()
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator).bfloat16()
    if key == "online":
        for param, value in (("w13_weight", w13), ("w2_weight", w2)):  # created on the meta device
            setattr(layer, param, torch.nn.Parameter(value, requires_grad=False))
    else:
        for param, value in (("w13", w13), ("w2", w2)):
            codes, scales = quantize_mxfp8(value)
            getattr(layer, f"{param}_weight").data.view(torch.uint8).copy_(codes.view(torch.uint8))
            getattr(layer, f"{param}_weight_scale").data.copy_(scales)
    seen = []
    original = experts.RoseCuteDslExperts.process_weights_after_loading
    experts.RoseCuteDslExperts.process_weights_after_loading = lambda self, layer: (
        seen.append(layer.layer_name),
        original(self, layer),
    )
    try:
        method.process_weights_after_loading(layer)
        method.process_weights_after_loading(layer)  # vLLM may call it twice
    finally:
        experts.RoseCuteDslExperts.process_weights_after_loading = original
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    topk_weights = torch.rand(TOKENS, top_k, generator=generator)
    topk_ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:top_k] for _ in range(TOKENS)]).int()
    out = method.apply(layer, x, topk_weights, topk_ids, None, None)
    reference = expected(x, quantize_mxfp8(w13), quantize_mxfp8(w2), topk_weights, topk_ids, on_input)
    row_error = ((out.double() - reference).norm(dim=1) / reference.norm(dim=1)).max().item()
    return {"experts": method.experts_cls.__name__, "weights_hook": seen, "row_error": row_error}


def run_map():
    """Row errors while the experts of this rank change places in an expert map that stays where it is."""
    module, name, _ = METHODS["compressed_tensors"]
    config = moe_config(num_experts=2 * EXPERTS, num_logical_experts=2 * EXPERTS)
    method = make("compressed_tensors", getattr(importlib.import_module(module), name), config)
    layer = Layer()
    layer.global_num_experts = 2 * EXPERTS
    method.create_weights(
        layer,
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size_per_partition=INTERMEDIATE,
        params_dtype=torch.bfloat16,
        weight_loader=lambda *a, **k: None,
    )
    generator, quantized = torch.Generator().manual_seed(4), []
    for param, shape in (("w13", (2 * INTERMEDIATE, HIDDEN)), ("w2", (HIDDEN, INTERMEDIATE))):
        codes, scales = quantize_mxfp8(torch.randn(EXPERTS, *shape, generator=generator).bfloat16())
        getattr(layer, f"{param}_weight").data.view(torch.uint8).copy_(codes.view(torch.uint8))
        getattr(layer, f"{param}_weight_scale").data.copy_(scales)
        quantized.append((codes, scales))
    method.process_weights_after_loading(layer)
    layer.expert_map = torch.full((2 * EXPERTS,), -1, dtype=torch.int32)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    topk_weights = torch.rand(TOKENS, TOP_K, generator=generator)
    errors = []
    for here in ([0, 1, 2, 3], [7, 5, 0, 2], [4, 3, 6, 1]):
        layer.expert_map.fill_(-1)
        layer.expert_map[here] = torch.arange(EXPERTS, dtype=torch.int32)
        local = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)])
        out = method.apply(layer, x, topk_weights, torch.tensor(here)[local].int(), None, None)
        reference = expected(x, *quantized, topk_weights, local, on_input=False)
        errors.append(((out.double() - reference).norm(dim=1) / reference.norm(dim=1)).max().item())
    return errors


def refusal(**changes):
    try:
        select_mxfp8_moe_backend(moe_config(**changes))
    except ValueError as error:
        return str(error)
    return None


def elastic_refusal():
    parallel = get_current_vllm_config().parallel_config
    parallel.enable_elastic_ep = True
    try:
        return refusal()
    finally:
        parallel.enable_elastic_ep = False


def batch_invariant_refusal():
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    try:
        return refusal()
    finally:
        del os.environ["VLLM_BATCH_INVARIANT"]


def main():
    torch.manual_seed(0)
    kernel_config = KernelConfig(moe_backend="rose_cutedsl", linear_backend="rose_cutedsl")
    result = {"version": vllm.__version__, "methods": {}, "refusals": {}}
    with set_current_vllm_config(VllmConfig(kernel_config=kernel_config)), tempfile.TemporaryDirectory() as directory:
        init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        minor = vllm_minor(vllm.__version__)
        for key, (_, _, versions) in METHODS.items():
            if minor in versions:
                result["methods"][key] = run_method(key)
        result["weight_on_input"] = run_method("modelopt", top_k=1, on_input=True)
        result["expert_map"] = run_map()
        kernel = init_mxfp8_linear_kernel(weight_shape=(96, 64))
        result["linear"] = type(kernel).__name__
        try:
            init_mxfp8_linear_kernel(weight_shape=(96, 48))
        except ValueError as error:
            result["linear_k48"] = str(error)
        from vllm.model_executor.kernels.linear import _filter_kernels_by_backend

        try:
            _filter_kernels_by_backend("rose_cutedsl", [int])
        except ValueError as error:
            result["linear_other"] = str(error)
        all_to_all = FusedMoEParallelConfig.make_no_parallel()
        all_to_all.use_ep, all_to_all.dp_size = True, 2
        result["refusals"] = {
            "bias": refusal(has_bias=True),
            "lora": refusal(is_lora_enabled=True),
            "activation": refusal(activation=MoEActivation.GELU),
            "swiglu_limit": refusal(swiglu_limit=7.0),
            "intermediate": refusal(intermediate_size=48),
            "all_to_all": refusal(moe_parallel_config=all_to_all),
            "swiglu_alpha": refusal(swiglu_alpha=1.702),
            "swiglu_beta": refusal(swiglu_beta=1.0),
            "swiglu_oai": refusal(activation=MoEActivation.SWIGLUOAI),
            "elastic": elastic_refusal(),
            "batch_invariant": batch_invariant_refusal(),
        }
        draft = moe_config()
        UnquantizedFusedMoEMethod(draft)
        result["unquantized_moe_backend"] = draft.moe_backend
    with set_current_vllm_config(VllmConfig()):
        try:
            result["linear_auto"] = type(init_mxfp8_linear_kernel(weight_shape=(96, 64))).__name__
        except ValueError as error:
            result["linear_auto"] = str(error)
        result["moe_auto"] = select_mxfp8_moe_backend(moe_config(moe_backend="auto"))[1].__name__
        result["moe_unknown"] = refusal(moe_backend="no_such_backend")
    result["cuda_starts"] = len(CUDA_STARTS)
    torch.cuda.init()
    result["cuda_starts_are_seen"] = len(CUDA_STARTS) - result["cuda_starts"]
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
