"""Our batched experts behind vLLM's DeepEP low-latency prepare and finalize, whose library is a stand-in of one rank.

Argument: "reference", or a compile target whose kernels torch emulates.
"""

import importlib
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "moe_cutedsl"))

import methods
from experts import new_memory
from experts_emulation import emulated
from vllm.config import KernelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.oracle import fp8
from vllm.v1.worker import workspace

from vllm_rose_plugin.kernels import call_counts
from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.moe_batched import launch
from vllm_rose_plugin.kernels.moe_experts.reference import moe_experts
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8
from vllm_rose_plugin.layers import experts_batched, gpu, self_check
from vllm_rose_plugin.seams.mxfp8_moe import METHODS
from vllm_rose_plugin.seams.seam import vllm_minor

deep_ep = sys.modules["deep_ep"] = ModuleType("deep_ep")
deep_ep.Buffer = object
from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll import DeepEPLLPrepareAndFinalize  # noqa: E402

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, MOST, RANKS = 4, 2048, 64, 2, 16, 2
"""DeepEP knows a few hidden sizes only."""


class Buffer:
    """DeepEP's, of one rank that holds all experts; another is silent. Rows that nothing was sent to are NaN."""

    def low_latency_dispatch(self, x, topk_ids, most, num_experts, *, use_fp8, return_recv_hook, **how):
        assert not use_fp8 and most == MOST and return_recv_hook
        self.sent = x.dtype
        tokens = torch.full((EXPERTS, most * RANKS, HIDDEN), float("nan"), dtype=x.dtype)
        counts, places = torch.zeros(EXPERTS, dtype=torch.int32), {}
        for token, ids in enumerate(topk_ids.tolist()):
            for expert in ids:
                if expert >= 0:
                    places[token, expert] = int(counts[expert])
                    tokens[expert, counts[expert]] = x[token]
                    counts[expert] += 1
        return tokens, counts, places, None, lambda: None

    def low_latency_combine(self, y, topk_ids, weights, places, *, out, **how):
        out.zero_()
        for token, ids in enumerate(topk_ids.tolist()):
            total = torch.zeros(HIDDEN)
            for k, expert in enumerate(ids):
                if expert >= 0:
                    total += weights[token, k] * y[expert, places[token, expert]].float()
            out[token] = total.to(out.dtype)
        return out, None, lambda: None


class Quantized(DeepEPLLPrepareAndFinalize):
    """An all-to-all that hands over MXFP8 as vLLM's interface means it."""

    def _do_quant(self, x, a1_dtype, quant_config):
        codes, scales = quantize_mxfp8(x)
        codes.view(torch.uint8)[x.isnan()] = 0x7F
        return codes, scales


def parallel_config():
    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel.use_ep, parallel.dp_size, parallel.ep_size = True, RANKS, RANKS
    parallel.all2all_backend = "deepep_low_latency"
    return parallel


def config(**changes):
    values = {"hidden_dim": HIDDEN, "intermediate_size": INTERMEDIATE, "experts_per_token": TOP_K}
    return methods.moe_config(**{**values, "moe_parallel_config": parallel_config(), **changes})


def make_layer(key):
    """(method, layer, weights) with random weights, loaded."""
    module, name, _ = METHODS[key]
    method = methods.make(key, getattr(importlib.import_module(module), name), config())
    layer = methods.Layer()
    layer.hidden_size, layer.intermediate_size_per_partition = HIDDEN, INTERMEDIATE
    method.create_weights(
        layer,
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size_per_partition=INTERMEDIATE,
        params_dtype=torch.bfloat16,
        weight_loader=lambda *a, **k: None,
    )
    generator, weights = torch.Generator().manual_seed(5), []
    for param, shape in (("w13", (2 * INTERMEDIATE, HIDDEN)), ("w2", (HIDDEN, INTERMEDIATE))):
        plain = (torch.randn(EXPERTS, *shape, generator=generator) / shape[1] ** 0.5).bfloat16()
        codes, scales = quantize_mxfp8(plain)
        if key == "online":
            setattr(layer, f"{param}_weight", torch.nn.Parameter(plain, requires_grad=False))
        else:
            getattr(layer, f"{param}_weight").data.view(torch.uint8).copy_(codes.view(torch.uint8))
            getattr(layer, f"{param}_weight_scale").data.copy_(scales)
        weights.append(Mxfp8Tensor(codes, scales))
    method.process_weights_after_loading(layer)
    return method, layer, weights


def far(method, layer, weights, tokens, *, seed, one_expert=False):
    """Rows off by more than roundings to bf16 are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    topk_weights = torch.rand(tokens, TOP_K, generator=generator)
    topk_ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(-1)[:, :TOP_K]
    if one_expert:
        topk_ids[:, 0], topk_ids[:, 1] = 2, -1
    topk_ids[-1] = -1
    expected = moe_experts(x, topk_ids=topk_ids, topk_weights=topk_weights, w13=weights[0], w2=weights[1])
    out = method.apply(layer, x, topk_weights, topk_ids, None, None)
    assert out.shape == expected.shape and out.dtype == expected.dtype and not out.isnan().any()
    error = (out.double() - expected.double()).norm(dim=-1)
    return int((error > 1e-2 * expected.double().norm(dim=-1)).sum())


def run(seen, needed):
    buffer = Buffer()
    made = {"cls": DeepEPLLPrepareAndFinalize}
    fp8.maybe_make_prepare_finalize = lambda **how: made["cls"](buffer, max_tokens_per_rank=MOST, num_dispatchers=RANKS)
    result = {"methods": {}}
    for key, (_, _, versions) in METHODS.items():
        if vllm_minor(methods.vllm.__version__) not in versions:
            continue
        method, layer, weights = make_layer(key)
        workspace.reset_workspace_manager()
        workspace.init_workspace_manager(torch.device("cpu"))
        wrong = [far(method, layer, weights, MOST, seed=1)]
        workspace.lock_workspace()
        wrong += [far(method, layer, weights, tokens, seed=tokens) for tokens in (1, 2, 7, MOST)]
        wrong.append(far(method, layer, weights, MOST, seed=9, one_expert=True))
        layer.w13_weight.data.view(torch.uint8).copy_(layer.w13_weight.data.view(torch.uint8).flip(0))  # as EPLB does
        layer.w13_weight_scale.data.copy_(layer.w13_weight_scale.data.flip(0))
        if seen:
            layer.rose_w13_scale.copy_(layer.rose_w13_scale.view(EXPERTS, -1).flip(0).view_as(layer.rose_w13_scale))
        moved = [
            Mxfp8Tensor(
                weights[0].codes.view(torch.uint8).flip(0).view(torch.float8_e4m3fn), weights[0].scales.flip(0)
            ),
            weights[1],
        ]
        wrong.append(far(method, layer, moved, MOST, seed=3))
        result["methods"][key] = {
            "experts": type(method.moe_kernel.fused_experts).__name__,
            "finalize": type(method.moe_kernel.fused_experts.finalize_weight_and_reduce_impl()).__name__,
            "wrong": wrong,
            "buffers": sorted(name for name, _ in layer.named_buffers()),
            "sent": str(buffer.sent),
        }
    ours = method.moe_kernel.fused_experts
    made["cls"] = Quantized
    method, layer, weights = make_layer("modelopt")
    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(torch.device("cpu"))
    result["quantized"] = [far(method, layer, weights, tokens, seed=tokens) for tokens in (1, 7, MOST)]
    result["step"] = step_tokens(ours)
    result["shapes"] = [vars(shape) for shape in needed[0][1]] if needed else []
    result["launches"] = sorted(set(seen.names())) if seen else []
    shapes = ours.workspace_shapes(MOST * RANKS, 2 * INTERMEDIATE, HIDDEN, TOP_K, 8, EXPERTS, None, MoEActivation.SILU)
    result["output"] = list(shapes[2])
    return result


def step_tokens(ours):
    """What the experts expect with and without vLLM's knowledge of all ranks' tokens."""
    patch, found = pytest.MonkeyPatch(), [ours._step_tokens()]
    for tokens in ([3, 4], [100, 100]):
        metadata = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(tokens))
        context = SimpleNamespace(dp_metadata=metadata)
        patch.setattr(experts_batched, "is_forward_context_available", lambda: True)
        patch.setattr(experts_batched, "get_forward_context", lambda context=context: context)
        found.append(ours._step_tokens())
    patch.undo()
    return found


def vllm_own_quantization():
    """What DeepEP's prepare in vLLM makes of MXFP8 experts that ask for quantized tokens, in words."""
    method, layer, _ = make_layer("modelopt")
    quant_config = method.get_fused_moe_quant_config(layer)
    prepare = DeepEPLLPrepareAndFinalize(Buffer(), max_tokens_per_rank=MOST, num_dispatchers=RANKS)
    found = {"defer": "", "mxfp8": ""}
    how = [torch.zeros(3, HIDDEN), torch.rand(3, TOP_K), torch.zeros(3, TOP_K, dtype=torch.int64), EXPERTS, None, False]
    for name, defer in (("defer", True), ("mxfp8", False)):
        try:
            prepare.prepare(*how, quant_config, defer)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def refusals():
    other = parallel_config()
    other.all2all_backend = "deepep_high_throughput"
    return {
        "limit": methods.refusal(moe_parallel_config=parallel_config(), swiglu_limit=7.0, hidden_dim=HIDDEN),
        "bias": methods.refusal(moe_parallel_config=parallel_config(), has_bias=True),
        "lora": methods.refusal(moe_parallel_config=parallel_config(), is_lora_enabled=True),
        "other": methods.refusal(moe_parallel_config=other),
    }


def main():
    target = sys.argv[1]
    vllm_config = VllmConfig(kernel_config=KernelConfig(moe_backend="rose_cutedsl"))
    patch, needed = pytest.MonkeyPatch(), []
    patch.setattr(
        self_check, "need", lambda family, shape_of: needed.append((family.name, [shape_of(n) for n in (1, 64)]))
    )
    with set_current_vllm_config(vllm_config), tempfile.TemporaryDirectory() as directory:
        init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        before = call_counts.snapshot()
        if target == "reference":
            result = run(None, needed) | {"vllm": vllm_own_quantization(), "refusals": refusals()}
        else:
            warmed = []
            patch.setattr(gpu, "target", lambda: target)
            patch.setattr(launch, "warm_up", lambda **how: warmed.append(how))
            with emulated(patch, target) as seen:
                platform = SimpleNamespace(**{f"is_{p}": lambda: False for p in ("cpu", "rocm", "cuda")})
                patch.setattr(mk, "current_platform", platform)
                patch.setattr(torch.accelerator, "empty_cache", lambda: None)
                patch.setattr(torch, "empty", partial(new_memory, torch.empty))
                result = run(seen, needed) | {"warmed": warmed[-1]}
        after = call_counts.snapshot()
        result["calls"] = {op: list(after[op]) for op in after if after[op] != before.get(op)}
        result["needed"] = sorted({name for name, _ in needed})
    patch.undo()
    result["cuda_starts"] = len(methods.CUDA_STARTS)
    json.dump(result, sys.stdout, default=str)


if __name__ == "__main__":
    main()
