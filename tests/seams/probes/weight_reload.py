"""Weights loaded again in place, by the functions with which vLLM's reload_weights does it: experts and linear layers.

The target is pretended and torch emulates the kernels, as in the probes of experts and of linear layers. What comes out
is compared with the bits of layers that got the new weights in their first load.
"""

import json
import sys
import tempfile
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import vllm_rose_plugin

vllm_rose_plugin.register()

from expert_parts import Engine, equal, map_to_physical  # noqa: E402
from experts import new_memory  # noqa: E402
from experts_emulation import emulated as emulated_experts  # noqa: E402
from linear import HIDDEN, ModelOptMxFp8Config, layers  # noqa: E402
from linear import emulated as emulated_linears  # noqa: E402
from vllm.config import KernelConfig, ParallelConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.model_executor.layers.fused_moe import modular_kernel as mk  # noqa: E402
from vllm.model_executor.layers.fused_moe.router import base_router  # noqa: E402
from vllm.model_executor.model_loader.reload import (  # noqa: E402
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

from vllm_rose_plugin.kernels.moe_experts import launch  # noqa: E402
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8  # noqa: E402
from vllm_rose_plugin.layers import gpu, self_check  # noqa: E402

TARGETS = ("sm_90a", "sm_100a")
PRETENDED = SimpleNamespace(**{f"is_{name}": lambda: False for name in ("cpu", "rocm", "cuda")})


def buffers_of(module):
    """Ours, with the tensors that a graph captured now would read."""
    return {name: buffer for name, buffer in module.named_buffers() if ".rose_" in f".{name}"}


def same(held, fresh):
    """Whether tensors that were held before a reload have the content of a fresh load, routing's scratch left out."""
    return all(torch.equal(held[name], fresh[name]) for name in held if not name.endswith("rose_route_workspace"))


def state_of(module, held):
    """What must not change: names, addresses, what a state_dict holds."""
    now = buffers_of(module)
    return {
        "in_place": {name: buffer.data_ptr() for name, buffer in now.items()}
        == {name: buffer.data_ptr() for name, buffer in held.items()},
        "in_state_dict": [name for name in module.state_dict() if "rose_" in name],
    }


def run_experts(vllm_config, seen):
    """A block of Qwen3-Next loaded again, twice, then a reload that brings it nothing."""
    engine = Engine(vllm_config, seed=3, locality="off")
    held = buffers_of(engine.layer)
    result = {"buffers": sorted(held), "changed": [], "as_fresh": []}
    before = engine.forward()
    for seed in (11, 12):
        fresh = Engine(vllm_config, seed=seed, locality="off")
        engine.reload(seed)
        seen.scales_at.clear()
        out = engine.forward()
        result["as_fresh"].append(equal(out, fresh.forward()) and same(held, buffers_of(fresh.layer)))
        result["changed"].append(not equal(out, before))
    packed = {buffer.data_ptr() for name, buffer in held.items() if name.endswith("_scale")}
    result["read"] = packed <= seen.scales_at
    initialize_layerwise_reload(engine.block)
    finalize_layerwise_reload(engine.block, SimpleNamespace(dtype=torch.bfloat16))
    result["untouched"] = equal(engine.forward(), out)
    return result | state_of(engine.layer, held)


def checkpoint(seed):
    """(layer, shard, name, tensor) of the linear layers, as files have them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "column": {None: (64, HIDDEN)},
        "row": {None: (192, HIDDEN)},
        "merged": {0: (64, HIDDEN), 1: (64, HIDDEN)},
        "qkv": {"q": (128, HIDDEN), "k": (64, HIDDEN), "v": (64, HIDDEN)},
    }
    for layer, shards in shapes.items():
        for shard, shape in shards.items():
            codes, scales = quantize_mxfp8(torch.randn(shape, generator=generator).bfloat16())
            yield layer, shard, "weight", codes
            yield layer, shard, "weight_scale", scales
            if layer != "row":
                yield layer, shard, "bias", torch.randn(shape[0], generator=generator).bfloat16()


def load_linears(model, seed):
    for layer, shard, name, value in checkpoint(seed):
        parameter = getattr(model[layer], name)
        parameter.weight_loader(parameter, value, *([] if shard is None else [shard]))


def make_linears(seed):
    quant = ModelOptMxFp8Config.from_config({"quant_method": "mxfp8", "ignored_layers": ["lm_head"]})
    model = torch.nn.ModuleDict(dict(layers(quant)))
    record_metadata_for_reloading(model)
    load_linears(model, seed)
    for layer in model.values():
        layer.quant_method.process_weights_after_loading(layer)
    return model


def forward_linears(model):
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(7)).bfloat16()
    outs = {name: layer(x) for name, layer in model.items()}
    return {name: out[0] if isinstance(out, tuple) else out for name, out in outs.items()}


def run_linears():
    """Every kind of linear layer loaded again, twice."""
    model = make_linears(3)
    held, before = buffers_of(model), forward_linears(model)
    result = {"buffers": sorted(held), "changed": [], "as_fresh": []}
    for seed in (11, 12):
        fresh = make_linears(seed)
        initialize_layerwise_reload(model)
        load_linears(model, seed)
        finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.bfloat16))
        outs, expected = forward_linears(model), forward_linears(fresh)
        alike = all(equal(outs[name], expected[name]) for name in outs)
        result["as_fresh"].append(alike and same(held, buffers_of(fresh)))
        result["changed"].append(not any(equal(outs[name], before[name]) for name in outs))
    return result | state_of(model, held)


def run_target(target, vllm_config):
    patch = pytest.MonkeyPatch()
    patch.setattr(gpu, "target", lambda: target)
    patch.setattr(launch, "warm_up", lambda **how: None)
    patch.setattr(self_check, "need", lambda family, shape_of: None)
    result = {}
    try:
        with emulated_linears(patch, target):
            result["linears"] = run_linears()
        patch.setattr(mk, "current_platform", PRETENDED)
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        with emulated_experts(patch, target) as seen:
            empty = torch.empty
            with torch.device("meta"):  # torch notes which functions make tensors when it is first asked for a device
                assert empty(1).is_meta
            patch.setattr(torch, "empty", partial(new_memory, empty))
            result["experts"] = run_experts(vllm_config, seen)
    finally:
        patch.undo()
    return result


def main():
    torch._dynamo.config.disable = True  # vLLM compiles the router
    torch.set_default_dtype(torch.bfloat16)
    base_router.eplb_map_to_physical_and_record = map_to_physical
    kernel_config = KernelConfig(moe_backend="rose_cutedsl", linear_backend="rose_cutedsl")
    vllm_config = VllmConfig(kernel_config=kernel_config, parallel_config=ParallelConfig())
    vllm_config.parallel_config.enable_eplb = True  # vLLM's own check wants a GPU
    vllm_config.parallel_config.eplb_config.num_redundant_experts = 3
    with set_current_vllm_config(vllm_config), tempfile.TemporaryDirectory() as directory:
        init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        result = {target: run_target(target, vllm_config) for target in TARGETS}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
