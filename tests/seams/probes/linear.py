"""vLLM's MXFP8 linear layers through our kernel, as on a GPU: the target is pretended, torch emulates the kernels."""

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vllm_rose_plugin

sys.path.insert(0, str(Path(__file__).parents[2] / "gemm_cutedsl"))
vllm_rose_plugin.register()

import vllm.model_executor.layers.linear as linear_layers  # noqa: E402
import vllm.model_executor.parameter as parameters  # noqa: E402
from launch_emulation import emulated  # noqa: E402
from vllm import envs  # noqa: E402
from vllm.config import KernelConfig, VllmConfig, get_current_vllm_config, set_current_vllm_config  # noqa: E402
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.model_executor.kernels.linear import init_mxfp8_linear_kernel  # noqa: E402
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation  # noqa: E402
from vllm.model_executor.layers.linear import (  # noqa: E402
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (  # noqa: E402
    compressed_tensors_w8a8_mxfp8,
)
from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config  # noqa: E402
from vllm.model_executor.layers.quantization.online.mxfp8 import Mxfp8OnlineLinearMethod  # noqa: E402
from vllm.model_executor.layers.quantization.utils.quant_utils import (  # noqa: E402
    kFp8DynamicTokenSym,
    kMxfp8Dynamic,
)

from vllm_rose_plugin.config import RoseConfig  # noqa: E402
from vllm_rose_plugin.kernels import call_counts  # noqa: E402
from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor  # noqa: E402
from vllm_rose_plugin.kernels.gemm.reference import mxfp8_linear  # noqa: E402
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8, quantize_mxfp8  # noqa: E402
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import tile_scales  # noqa: E402
from vllm_rose_plugin.layers import gpu, self_check, settings  # noqa: E402

HIDDEN = 96
GENERATOR = torch.Generator().manual_seed(3)


def random(*shape):
    return torch.randn(*shape, generator=GENERATOR).bfloat16()


def layers(quant_config):
    """Every kind of linear layer that models are made of."""
    how = {"bias": True, "quant_config": quant_config, "params_dtype": torch.bfloat16}
    yield "column", ColumnParallelLinear(HIDDEN, 64, prefix="model.layers.0.mlp.up", **how)
    yield "row", RowParallelLinear(HIDDEN, 192, prefix="model.layers.0.mlp.down_proj", **{**how, "bias": False})
    yield "merged", MergedColumnParallelLinear(HIDDEN, [64, 64], prefix="model.layers.0.mlp.gate_up_proj", **how)
    yield "qkv", QKVParallelLinear(HIDDEN, 32, 4, 2, prefix="model.layers.0.self_attn.qkv_proj", **how)


def fill(layer):
    """Load random values; returns the reference's weight and bias."""
    codes, scales = quantize_mxfp8(random(*layer.weight.shape))
    layer.weight.data.view(torch.uint8).copy_(codes.view(torch.uint8))
    layer.weight_scale.data.copy_(scales)
    bias = None
    if getattr(layer, "bias", None) is not None:
        bias = random(*layer.bias.shape)
        layer.bias.data.copy_(bias)
    return Mxfp8Tensor(codes, scales), bias


def error(out, expected):
    assert out.shape == expected.shape and out.dtype == expected.dtype, (out.shape, expected.shape, out.dtype)
    return ((out.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)).max().item()


def run_layer(layer, warmed, seen):
    weight, bias = fill(layer)
    n, k = weight.codes.shape
    before = {key: value.clone() for key, value in layer.state_dict().items()}  # it shares the layer's memory
    layer.quant_method.process_weights_after_loading(layer)
    state = layer.state_dict()
    packed = layer.rose_weight_scale
    result = {
        "kernel": type(layer.quant_method.kernel).__name__,
        "state_dict": sorted(state),
        "state_unchanged": all(torch.equal(state[key].float(), before[key].float()) for key in state),
        "extra_bytes_share": packed.numel() / (n * k / 32),
        "asked": [shape for family, shape in warmed if family == "mxfp8_linear" and (shape["n"], shape["k"]) == (n, k)],
        "errors": [],
    }
    for shape in ((1, k), (50, k), (2, 3, k)):
        x = random(*shape)
        out = layer(x)
        out = out[0] if isinstance(out, tuple) else out
        result["errors"].append(error(out, mxfp8_linear(x, weight, bias=bias)))
    del seen.configs[:]
    for rows in (1, 7, 50, 70):
        layer(random(rows, k))
    result["configs"] = len(set(seen.configs))
    # Loaded again, as for weights that are updated under a captured graph.
    address = packed.data_ptr()
    weight, bias = fill(layer)
    layer.quant_method.process_weights_after_loading(layer)
    result["packed_in_place"] = layer.rose_weight_scale.data_ptr() == address
    out = layer(x)
    result["errors"].append(error(out[0] if isinstance(out, tuple) else out, mxfp8_linear(x, weight, bias=bias)))
    # Quantized in front of the layer, scales tiled (as vLLM's producers leave them) or not.
    x = random(7, k)
    codes, scales = quantize_mxfp8(x)
    for laid_out in (scales, tile_scales(scales)):
        given = QuantizedActivation(codes, laid_out, torch.bfloat16, torch.Size((7, k)), kMxfp8Dynamic)
        out = layer.quant_method.apply(layer, given, bias)
        result["errors"].append(error(out, mxfp8_linear(x, weight, bias=bias)))
    try:
        layer.quant_method.apply(layer, QuantizedActivation(codes, scales, x.dtype, x.shape, kFp8DynamicTokenSym), None)
    except ValueError as refusal:
        result["wrong_key"] = str(refusal)
    key = layer.quant_method.kernel.input_quant_key()
    result["input_key_is_mxfp8"] = key == kMxfp8Dynamic
    result["input_key_is_none"] = key is None
    result["pre_processed"] = layer.quant_method.kernel.supports_pre_processed_weights
    return result


def run_compressed_tensors():
    scheme = compressed_tensors_w8a8_mxfp8.CompressedTensorsW8A8Mxfp8()
    layer = torch.nn.Module()
    scheme.create_weights(layer, [64, 32], HIDDEN, torch.bfloat16, weight_loader=lambda *a, **k: None)
    weight, _ = fill(layer)
    scheme.process_weights_after_loading(layer)
    x = random(5, HIDDEN)
    return error(scheme.apply_weights(layer, x), mxfp8_linear(x, weight))


def run_online():
    """A bf16 weight that vLLM's online method quantizes after the load."""
    with pytest.MonkeyPatch.context() as patch:
        # All that the method reads of it.
        patch.setattr(get_current_vllm_config(), "model_config", SimpleNamespace(dtype=torch.bfloat16))
        method = Mxfp8OnlineLinearMethod()
    layer = torch.nn.Module()
    method.create_weights(layer, HIDDEN, [64], HIDDEN, 64, torch.bfloat16, weight_loader=lambda *a, **k: None)
    weight = random(64, HIDDEN)
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)  # it was created on the meta device
    method.process_weights_after_loading(layer)
    quantized = Mxfp8Tensor(layer.weight.data, layer.weight_scale.data)
    x = random(5, HIDDEN)
    return {
        "kernel": type(method.kernel).__name__,
        "packed": layer.rose_weight_scale.numel(),
        "error": error(method.apply(layer, x), mxfp8_linear(x, quantized)),
        "weight_error": error(dequantize_mxfp8(quantized.codes, quantized.scales).bfloat16(), weight),
    }


RANKS, WIDE = 2, 128


def full(out_features, in_features):
    """A whole weight with its bias, as a checkpoint has them."""
    return Mxfp8Tensor(*quantize_mxfp8(random(out_features, in_features))), random(out_features)


def load(layer, parts):
    """Load a checkpoint's tensors through vLLM's loaders, which take this rank's share; parts: shard id to tensors."""
    for shard, (weight, bias) in parts.items():
        which = () if shard is None else (shard,)
        for name, value in (("weight", weight.codes), ("weight_scale", weight.scales), ("bias", bias)):
            parameter = getattr(layer, name)
            parameter.weight_loader(parameter, value, *which)
    layer.quant_method.process_weights_after_loading(layer)


def run_ranks(quant_config):
    """Errors of layers that are split over two ranks, against whole ones: columns side by side, rows added up."""
    patch = pytest.MonkeyPatch()
    shards = {
        "column": {None: full(WIDE, HIDDEN)},
        "merged": {i: full(WIDE, HIDDEN) for i in range(2)},
        "qkv": {"q": full(4 * 32, HIDDEN), "k": full(2 * 32, HIDDEN), "v": full(2 * 32, HIDDEN)},
        "row": {None: full(HIDDEN, WIDE)},
    }
    x = {name: random(7, HIDDEN if name != "row" else WIDE) for name in shards}
    outs = {name: [] for name in shards}
    how = {"bias": True, "quant_config": quant_config, "params_dtype": torch.bfloat16}
    for rank in range(RANKS):
        for module in (linear_layers, parameters):
            patch.setattr(module, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
            patch.setattr(module, "get_tensor_model_parallel_world_size", lambda: RANKS)
        patch.setattr(linear_layers, "tensor_model_parallel_all_reduce", lambda out: out)
        made = {
            "column": ColumnParallelLinear(HIDDEN, WIDE, prefix="ranks.up", **how),
            "merged": MergedColumnParallelLinear(HIDDEN, [WIDE, WIDE], prefix="ranks.gate_up_proj", **how),
            "qkv": QKVParallelLinear(HIDDEN, 32, 4, 2, prefix="ranks.qkv_proj", **how),
            "row": RowParallelLinear(WIDE, HIDDEN, prefix="ranks.down_proj", **how),
        }
        for name, layer in made.items():
            load(layer, shards[name])
            given = x[name].chunk(RANKS, -1)[rank].contiguous() if name == "row" else x[name]
            outs[name].append(layer(given)[0])
    patch.undo()
    errors = {}
    for name, parts in shards.items():
        whole = [mxfp8_linear(x[name], weight, bias=bias) for weight, bias in parts.values()]
        if name == "row":
            errors[name] = error(sum(out.float() for out in outs[name]).bfloat16(), whole[0])
            continue
        for rank, out in enumerate(outs[name]):
            expected = torch.cat([each.chunk(RANKS, -1)[rank] for each in whole], -1)
            errors[name] = max(errors.get(name, 0.0), error(out, expected))
    return errors


def refusal(shape, dtype=torch.bfloat16):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        init_mxfp8_linear_kernel(weight_shape=shape)
    except ValueError as error:
        return str(error)
    finally:
        torch.set_default_dtype(before)
    return ""


def run_target(target):
    warmed = []
    patch = pytest.MonkeyPatch()
    patch.setattr(gpu, "target", lambda: target)
    patch.setattr(self_check, "need", lambda family, shape_of: warmed.append([family.name, asdict(shape_of(7))]))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with emulated(patch, target) as seen:
            config = ModelOptMxFp8Config.from_config({"quant_method": "mxfp8", "ignored_layers": ["lm_head"]})
            before = call_counts.snapshot().get("mxfp8_linear", {})
            result = {"layers": {name: run_layer(layer, warmed, seen) for name, layer in layers(config)}}
            result["compressed_tensors"], result["online"] = run_compressed_tensors(), run_online()
            result["ranks"] = run_ranks(config)
            after = call_counts.snapshot()["mxfp8_linear"]
            result["reference_calls"] = after.get("reference", 0) - before.get("reference", 0)
            result["refusals"] = [refusal((60, HIDDEN)), refusal((24, HIDDEN)), refusal((64, HIDDEN), torch.float32)]
            patch.setattr(settings, "current", lambda: RoseConfig(activation="bf16"))
            result["refusals"].append(refusal((64, HIDDEN)))
    finally:
        torch.set_default_dtype(torch.float32)
        patch.undo()
    return result


def run_without_a_gpu():
    """The reference, on row-major and tiled scales of quantized activations."""
    kernel = init_mxfp8_linear_kernel(weight_shape=(60, HIDDEN))
    layer = torch.nn.Module()
    codes, scales = quantize_mxfp8(random(60, HIDDEN))
    layer.register_parameter("weight", torch.nn.Parameter(codes, requires_grad=False))
    layer.register_parameter("weight_scale", torch.nn.Parameter(scales, requires_grad=False))
    kernel.process_weights_after_loading(layer)
    x = random(5, HIDDEN)
    expected = mxfp8_linear(x, Mxfp8Tensor(codes, scales))
    x_codes, x_scales = quantize_mxfp8(x)
    given = [
        QuantizedActivation(x_codes, s, torch.bfloat16, x.shape, kMxfp8Dynamic)
        for s in (x_scales, tile_scales(x_scales))
    ]
    return {
        "equal": all(torch.equal(kernel.apply_weights(layer, each), expected) for each in (x, *given)),
        "buffers": [name for name, _ in layer.named_buffers()],
        "pre_processed": kernel.supports_pre_processed_weights,
        "input_key": str(kernel.input_quant_key()),
    }


def main():
    kernel_config = KernelConfig(linear_backend="rose_cutedsl")
    result = {}
    with set_current_vllm_config(VllmConfig(kernel_config=kernel_config)), tempfile.TemporaryDirectory() as directory:
        init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        for target in ("sm_90a", "sm_100a"):
            result[target] = run_target(target)
        result["cpu"] = {"refusal": refusal((60, HIDDEN))} if envs.VLLM_BATCH_INVARIANT else run_without_a_gpu()
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
