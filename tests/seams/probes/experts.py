"""vLLM's MXFP8 MoE layers through our experts, as on a GPU: the target is pretended, torch emulates the kernels.

vLLM's modular kernel and its workspace manager are real: the manager is locked after the largest batch, as vLLM locks
it before it captures CUDA graphs.
"""

import importlib
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "moe_cutedsl"))

import methods
from experts_emulation import aligned_bytes, emulated
from vllm.config import CUDAGraphMode, KernelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.v1.worker import workspace

from vllm_rose_plugin.config import RoseConfig
from vllm_rose_plugin.kernels import call_counts
from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.moe_experts import config as experts_config
from vllm_rose_plugin.kernels.moe_experts import launch
from vllm_rose_plugin.kernels.moe_experts.reference import moe_experts
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8
from vllm_rose_plugin.layers import expert_weights, experts, experts_base, gpu, self_check, settings
from vllm_rose_plugin.seams.mxfp8_moe import METHODS
from vllm_rose_plugin.seams.seam import vllm_minor

HIDDEN, INTERMEDIATE, TOP_K = 96, 64, 2
MOST_TOKENS = 200
BUFFERS = (expert_weights.PACKED_W13, expert_weights.PACKED_W2, experts.ROUTE)
GENERATOR = torch.Generator().manual_seed(5)


def random(*shape):
    return torch.randn(*shape, generator=GENERATOR).bfloat16()


def make_layer(key, *, local=4, everywhere=4, top_k=TOP_K, on_input=False):
    """(method, layer) with parameters, not filled; experts are the odd global ones where others live elsewhere."""
    module, name, _ = METHODS[key]
    config = methods.moe_config(
        hidden_dim=HIDDEN,
        intermediate_size=INTERMEDIATE,
        experts_per_token=top_k,
        num_experts=everywhere,
        num_local_experts=local,
        num_logical_experts=everywhere,
    )
    method = methods.make(key, getattr(importlib.import_module(module), name), config)
    layer = methods.Layer()
    layer.hidden_size, layer.intermediate_size_per_partition = HIDDEN, INTERMEDIATE
    layer.global_num_experts, layer.local_num_experts = everywhere, local
    layer.apply_router_weight_on_input = on_input
    if local != everywhere:
        layer.expert_map = torch.full((everywhere,), -1, dtype=torch.int32)
        layer.expert_map[1::2] = torch.arange(local, dtype=torch.int32)
    method.create_weights(
        layer,
        num_experts=local,
        hidden_size=HIDDEN,
        intermediate_size_per_partition=INTERMEDIATE,
        params_dtype=torch.bfloat16,
        weight_loader=lambda *a, **k: None,
    )
    return method, layer


def fill(key, layer):
    """Random weights, as (w13, w2) in MXFP8."""
    result = []
    for param, shape in (("w13", (2 * INTERMEDIATE, HIDDEN)), ("w2", (HIDDEN, INTERMEDIATE))):
        plain = random(layer.local_num_experts, *shape)
        codes, scales = quantize_mxfp8(plain)
        if key == "online":  # created on the meta device
            setattr(layer, f"{param}_weight", torch.nn.Parameter(plain, requires_grad=False))
        else:
            getattr(layer, f"{param}_weight").data.view(torch.uint8).copy_(codes.view(torch.uint8))
            getattr(layer, f"{param}_weight_scale").data.copy_(scales)
        result.append(Mxfp8Tensor(codes, scales))
    return result


def error(method, layer, weights, tokens, *, ids=torch.int32):
    """Of rows, against the reference."""
    top_k = method.moe.experts_per_token
    x = random(tokens, HIDDEN)
    topk_weights = torch.rand(tokens, top_k, generator=GENERATOR)
    everywhere = layer.global_num_experts
    topk_ids = torch.rand(tokens, everywhere, generator=GENERATOR).argsort(-1)[:, :top_k].to(ids)
    topk_ids[-1] = -1
    on_input = layer.apply_router_weight_on_input
    expected = moe_experts(
        x * topk_weights.to(x.dtype) if on_input else x,
        topk_ids=topk_ids,
        topk_weights=None if on_input else topk_weights,
        w13=weights[0],
        w2=weights[1],
        expert_map=layer.expert_map,
    )
    out = method.apply(layer, x, topk_weights, topk_ids, None, None)
    assert out.shape == expected.shape and out.dtype == expected.dtype
    far = (out.double() - expected.double()).norm(dim=-1) - 1e-2 * expected.double().norm(dim=-1)
    return bool((far > 0).any())


def reloaded(key, method, layer, weights_of):
    """Weights that are loaded again, with layers whose buffers vLLM's reloading takes away and puts back unwritten."""
    if hasattr(layer, "_already_called_process_weights_after_loading"):
        del layer._already_called_process_weights_after_loading
    kept = {name: layer._buffers.pop(name) for name in BUFFERS}
    weights = weights_of(key, layer)
    method.process_weights_after_loading(layer)
    for name, buffer in kept.items():
        layer.register_buffer(name, buffer, persistent=False)
    return weights


def run_method(key, warmed, seen, **how):
    method, layer = make_layer(key, **how)
    weights = fill(key, layer)
    loaded = {name: value.clone() for name, value in layer.state_dict().items()} if key != "online" else {}
    method.process_weights_after_loading(layer)
    state = layer.state_dict()
    unchanged = all(torch.equal(state[name].view(torch.uint8), x.view(torch.uint8)) for name, x in loaded.items())
    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(torch.device("cpu"))
    wrong = [error(method, layer, weights, MOST_TOKENS)]
    workspace.lock_workspace()
    wrong += [error(method, layer, weights, tokens) for tokens in (1, 2, 3, 17, 64, 130, 199, MOST_TOKENS)]
    wrong.append(error(method, layer, weights, 9, ids=torch.int64))
    for _ in range(2 if layer.expert_map is not None else 0):  # experts change places while graphs stay
        layer.expert_map.copy_(layer.expert_map[torch.randperm(len(layer.expert_map), generator=GENERATOR)])
        wrong.append(error(method, layer, weights, 33))
    addresses = [getattr(layer, name).data_ptr() for name in BUFFERS]
    if key not in ("modelopt", "online"):  # those look away at a second call
        weights = fill(key, layer)
        method.process_weights_after_loading(layer)
        wrong.append(error(method, layer, weights, 9))
    in_place = addresses == [getattr(layer, name).data_ptr() for name in BUFFERS]
    weights = reloaded(key, method, layer, fill)
    seen.scales_at.clear()
    wrong.append(error(method, layer, weights, 9))
    in_place &= seen.scales_at == set(addresses[:2])  # what a graph that was captured before reads
    return {
        "experts": type(method.moe_kernel.fused_experts).__name__,
        "wrong": [i for i, is_wrong in enumerate(wrong) if is_wrong],
        "checked": len(wrong),
        "state_dict": sorted(state),
        "state_unchanged": unchanged,
        "buffers": sorted(name for name, _ in layer.named_buffers()),
        "in_place": in_place,
        "extra_share": layer.rose_w13_scale.numel() / weights[0].scales.numel(),
        "warmed": {
            name: warmed[-1][name]
            for name in ("num_local_experts", "num_experts", "top_k", "max_tokens", "has_map", "weighted")
        },
    }


def run_chunks(monkeypatch):
    """More rows than pass through the layer at once, through vLLM's buffers, which may share memory with the output."""
    monkeypatch.setattr(experts_config, "MOST_ROWS", 64)
    method, layer = make_layer("modelopt")
    weights = fill("modelopt", layer)
    method.process_weights_after_loading(layer)
    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(torch.device("cpu"))
    first = error(method, layer, weights, 150)
    size = workspace.current_workspace_manager()._current_workspaces[0].numel()
    workspace.lock_workspace()
    return {"wrong": first or error(method, layer, weights, 33), "bytes": size}


def supported(**changes):
    cls = experts.RoseCuteDslExperts
    keys = experts_base.kMxfp8Static, experts_base.kMxfp8Dynamic
    return cls.is_supported_config(cls, methods.moe_config(**changes), *keys, mk.FusedMoEActivationFormat.Standard)


def run_target(target):
    warmed, needed = [], []
    patch = pytest.MonkeyPatch()
    patch.setattr(gpu, "target", lambda: target)
    patch.setattr(gpu, "most_tokens", lambda: MOST_TOKENS)
    patch.setattr(launch, "warm_up", lambda **how: warmed.append(how))
    patch.setattr(
        self_check, "need", lambda family, shape_of: needed.append((family.name, [shape_of(n) for n in (1, 64)]))
    )
    patch.setattr(
        mk, "current_platform", SimpleNamespace(**{f"is_{p}": lambda: False for p in ("cpu", "rocm", "cuda")})
    )
    patch.setattr(torch.accelerator, "empty_cache", lambda: None)
    patch.setattr(torch, "empty", partial(new_memory, torch.empty))
    result = {}
    try:
        with emulated(patch, target) as seen:
            before = call_counts.snapshot()
            minor = vllm_minor(methods.vllm.__version__)
            result["methods"] = {
                key: run_method(key, warmed, seen) for key, (_, _, versions) in METHODS.items() if minor in versions
            }
            result["elsewhere"] = run_method("compressed_tensors", warmed, seen, local=4, everywhere=8)
            result["on_input"] = run_method("modelopt", warmed, seen, top_k=1, on_input=True)
            result["launches"] = sorted(set(seen.names()))
            result["chunks"] = run_chunks(patch)
            after = call_counts.snapshot()
            result["calls"] = {op: list(after[op]) for op in after if after[op] != before.get(op)}
            result["needed"] = sorted({name for name, _ in needed})
            result["shape"] = vars(needed[0][1][0]) | {"captured": needed[0][1][0].captured}
            result["refusals"] = {
                "dtype": supported(in_dtype=torch.float32),
                "top_k": supported(experts_per_token=17, num_experts=32, num_local_experts=32),
                "experts": supported(num_experts=513, num_local_experts=513),
            }
            qwen3_5 = {"hidden_dim": 4096, "num_experts": 512, "experts_per_token": 10}
            result["qwen3_5"] = {  # alone, TP4 with EP, TP4
                f"{experts} of I={intermediate}": supported(
                    **qwen3_5,
                    num_logical_experts=512,
                    num_local_experts=experts,
                    intermediate_size=intermediate,
                )
                for experts, intermediate in ((512, 1024), (128, 1024), (512, 256))
            }
            patch.setattr(settings, "current", lambda: RoseConfig(activation="bf16"))
            result["refusals"]["activation"] = supported()
    finally:
        patch.undo()
    return result


def no():
    return False


def new_memory(empty, *size, **how):
    """As aligned as a GPU's, and full of NaN."""
    flat = size[0] if len(size) == 1 and isinstance(size[0], (tuple, torch.Size)) else size
    if how.get("dtype") is torch.uint8 and len(flat) == 1:
        return aligned_bytes(flat[0])
    return empty(*size, **how)


def run_graphs(vllm_config):
    """Whether CUDA graphs are accepted, with kernels and without."""
    patch = pytest.MonkeyPatch()
    patch.setattr(experts_base, "current_platform", SimpleNamespace(is_cuda=lambda: True, is_cpu=lambda: False))
    result = {}
    try:
        for name, mode in (("graphs", CUDAGraphMode.FULL_AND_PIECEWISE), ("eager", CUDAGraphMode.NONE)):
            vllm_config.compilation_config.cudagraph_mode = mode
            for target in ("sm_90a", None):
                patch.setattr(gpu, "target", lambda target=target: target)
                result[f"{name} {target}"] = supported()
    finally:
        patch.undo()
    return result


def main():
    torch.manual_seed(0)
    vllm_config = VllmConfig(kernel_config=KernelConfig(moe_backend="rose_cutedsl"))
    result = {}
    with set_current_vllm_config(vllm_config), tempfile.TemporaryDirectory() as directory:
        init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        result["graphs"] = run_graphs(vllm_config)
        for target in ("sm_90a", "sm_100a"):
            result[target] = run_target(target)
    result["cuda_starts"] = len(methods.CUDA_STARTS)
    json.dump(result, sys.stdout, default=str)


if __name__ == "__main__":
    main()
