"""A Qwen3-Next MoE block of the vLLM on the path through our experts, its experts moved by vLLM's load balancer.

Arguments: "reference", or a compile target whose kernels torch emulates; 1 rank, or 2 with TP and EP.
"""

import ast
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "moe_cutedsl"))

import methods
from experts import new_memory
from experts_emulation import emulated
from vllm.config import KernelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.eplb.eplb_communicator import EplbCommunicator
from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace
from vllm.distributed.parallel_state import get_ep_group, init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.router import base_router
from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config
from vllm.model_executor.models.interfaces import MixtureOfExperts
from vllm.model_executor.models.qwen3_next import Qwen3NextSparseMoeBlock
from vllm.v1.worker import workspace

from vllm_rose_plugin.kernels import call_counts
from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.moe_experts import launch
from vllm_rose_plugin.kernels.moe_experts.reference import moe_experts
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8
from vllm_rose_plugin.layers import gpu, self_check

RANKS, RANK = int(sys.argv[2]), int(os.environ.get("PROBE_RANK", 0))
HIDDEN, INTERMEDIATE, TOP_K, LOGICAL, TOKENS = 96, 64, 2, 6, 40
REDUNDANT = 3 if RANKS == 1 else 4
PHYSICAL = LOGICAL + REDUNDANT
LOCAL = PHYSICAL // RANKS
PLACEMENTS = {
    1: ([4, 0, 0, 3, 1, 2, 5, 0, 0], [5, 4, 3, 2, 1, 0, 2, 2, 5], [0, 1, 2, 3, 4, 5, 5, 4, 3]),
    2: ([4, 0, 0, 3, 1, 2, 5, 0, 0, 1], [5, 4, 3, 2, 1, 0, 2, 2, 5, 5], [0, 1, 2, 3, 4, 5, 5, 4, 3, 0]),
}


class Peers(EplbCommunicator):
    """Between ranks on a CPU."""

    def __init__(self):
        self.sent, self.pending = 0, []

    def add_send(self, tensors, dst_rank, expert_id):
        self.sent += len(tensors)
        self.add(torch.distributed.isend, tensors, dst_rank, expert_id)

    def add_recv(self, tensors, src_rank, expert_id):
        self.add(torch.distributed.irecv, tensors, src_rank, expert_id)

    def add(self, start, tensors, rank, expert_id):
        group = get_ep_group().cpu_group
        for i, tensor in enumerate(tensors):
            self.pending.append(start(tensor.view(torch.uint8), rank, group=group, tag=8 * int(expert_id) + i))

    def execute(self):
        for work in self.pending:
            work.wait()
        self.pending = []


class Model(MixtureOfExperts):
    """What EPLB asks a model for."""

    update_physical_experts_metadata = None

    def __init__(self, block):
        self.moe_layers = [block.experts]


def map_to_physical(topk_ids, expert_load_view, logical_to_physical_map, logical_replica_count, *args, **kwargs):
    """What vLLM's Triton kernel does: replicas take turns by token."""
    tokens = torch.arange(len(topk_ids)).unsqueeze(1)
    ids = topk_ids.long()
    replica = tokens * 2654435769 % 2**32 % logical_replica_count[ids]
    physical = logical_to_physical_map[ids, replica].to(topk_ids.dtype)
    expert_load_view.index_add_(
        0, physical.flatten().long(), torch.ones(physical.numel(), dtype=expert_load_view.dtype)
    )
    return physical


def make_block(vllm_config):
    config = SimpleNamespace(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        shared_expert_intermediate_size=INTERMEDIATE,
        num_experts=LOGICAL,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        hidden_act="silu",
    )
    quant = ModelOptMxFp8Config.from_config({"quant_method": "mxfp8", "ignored_layers": ["*shared_expert*", "*gate"]})
    seen = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=config),
        parallel_config=vllm_config.parallel_config,
        quant_config=quant,
    )
    return Qwen3NextSparseMoeBlock(seen, prefix="model.layers.0.mlp")


def fill(block, generator):
    """Random weights: physical expert i is logical expert i % LOGICAL. Those of the logical experts, in MXFP8."""
    layer, result = block.experts.routed_experts, []
    for param, shape in (("w13", (2 * INTERMEDIATE, HIDDEN)), ("w2", (HIDDEN, INTERMEDIATE))):
        plain = torch.randn(LOGICAL, *shape, generator=generator) / shape[1] ** 0.5
        codes, scales = quantize_mxfp8(plain.bfloat16())
        placed = torch.arange(RANK * LOCAL, (RANK + 1) * LOCAL) % LOGICAL
        getattr(layer, f"{param}_weight").data.view(torch.uint8).copy_(codes.view(torch.uint8)[placed])
        getattr(layer, f"{param}_weight_scale").data.copy_(scales[placed])
        result.append(Mxfp8Tensor(codes, scales))
    for name, param in block.named_parameters():
        if "routed_experts" not in name:
            param.data.normal_(generator=generator).div_(HIDDEN**0.5)
    for module in block.modules():
        if getattr(module, "quant_method", None) is not None:
            module.quant_method.process_weights_after_loading(module)
    return result


def maps(placement):
    """(logical to physical [1, E, slots], replicas [1, E]) of a placement [P] of logical experts."""
    to_physical, count = torch.full((1, LOGICAL, REDUNDANT + 1), -1), torch.zeros(1, LOGICAL, dtype=torch.long)
    for physical, logical in enumerate(placement):
        to_physical[0, logical, count[0, logical]] = physical
        count[0, logical] += 1
    return to_physical, count


def far(result, expected):
    """Rows that are off by more than roundings to bf16 are."""
    error = (result.double() - expected.double()).norm(dim=-1)
    return int((error > 1e-2 * expected.double().norm(dim=-1)).sum())


def run(vllm_config, seen):
    generator = torch.Generator().manual_seed(7)
    block = make_block(vllm_config)
    w13, w2 = fill(block, generator)
    layer = block.experts.routed_experts
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    placement = [i % LOGICAL for i in range(PHYSICAL)]
    to_physical, count = maps(placement)
    load = torch.zeros(1, PHYSICAL, dtype=torch.int32)
    model = Model(block)
    model.set_eplb_state(load, to_physical, count)
    state = block.experts.eplb_state
    state.should_record_tensor = torch.tensor(True)
    state.num_unpadded_tokens_tensors = [torch.tensor(TOKENS)]
    weights = [list(layer_weights) for layer_weights in model.expert_weights]

    logits, _ = block.gate(x)
    topk_weights, topk_ids = logits.float().softmax(-1).topk(TOP_K)
    topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
    shared = block.shared_expert(x)
    shared = shared * RANKS  # whose parts are alike
    expected = shared + moe_experts(x, topk_ids=topk_ids, topk_weights=topk_weights, w13=w13, w2=w2)

    def forward():
        with set_forward_context(None, vllm_config, num_tokens=TOKENS):
            return block(x.clone())

    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(torch.device("cpu"))
    addresses = [w.data_ptr() for w in weights[0]]
    result = {
        "experts": type(layer.quant_method.moe_kernel.fused_experts).__name__,
        "moved": [[*w.shape, str(w.dtype).removeprefix("torch.")] for w in weights[0]],
        "without_shared": far(forward() - shared, expected),
        "far": [far(forward(), expected)],
        "loads": [],
        "sent": 0,
    }
    communicator = Peers()
    for new in PLACEMENTS[RANKS]:
        rearrange_expert_weights_inplace(
            torch.tensor([placement]),
            torch.tensor([new]),
            weights,
            [torch.empty_like(w) for w in weights[0]],
            get_ep_group().cpu_group,
            communicator,
        )
        stale = far(forward(), expected)  # ids still go where experts were
        placement = new
        for mine, theirs in zip((to_physical, count), maps(placement), strict=True):
            mine.copy_(theirs)
        load.zero_()
        result["far"].append(far(forward(), expected))
        result["loads"].append(load[0].tolist())
        result.setdefault("stale", []).append(stale)
    result["sent"] = communicator.sent
    expert_map = layer.expert_map
    result["expert_map"] = None if expert_map is None else expert_map.tolist()
    result["in_place"] = addresses == [w.data_ptr() for w in layer.get_expert_weights()]
    # What a balancer that moves parameters only would do
    rearrange_expert_weights_inplace(
        torch.tensor([placement]),
        torch.tensor([placement[::-1]]),
        [weights[0][:4]],
        [torch.empty_like(w) for w in weights[0][:4]],
        get_ep_group().cpu_group,
        communicator,
    )
    for mine, theirs in zip((to_physical, count), maps(placement[::-1]), strict=True):
        mine.copy_(theirs)
    result["parameters_only"] = far(forward(), expected)
    result["launches"] = sorted(set(seen.names())) if seen else []
    return result


def qwen3_5_has_the_same_block():
    """Its decoder layer builds the block of Qwen3-Next; read from its text, since importing it takes torchvision."""
    tree = ast.parse(Path(importlib.util.find_spec("vllm.model_executor.models.qwen3_5").origin).read_text())
    block = Qwen3NextSparseMoeBlock.__name__
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "qwen3_next"]
    layers = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Qwen3_5DecoderLayer"]
    calls = [node.func for layer in layers for node in ast.walk(layer) if isinstance(node, ast.Call)]
    return block in {name.name for node in imports for name in node.names} and block in {
        call.id for call in calls if isinstance(call, ast.Name)
    }


def supports(vllm_config):
    """Which methods may be balanced, with our experts and without."""
    found = {}
    for key, (module, name, versions) in methods.METHODS.items():
        if methods.vllm_minor(methods.vllm.__version__) in versions:
            cls = getattr(methods.importlib.import_module(module), name)
            method = methods.make(key, cls, methods.moe_config())
            ours = method.supports_eplb
            method.experts_cls = mk.FusedMoEExpertsModular
            found[key] = [ours, method.supports_eplb]
    return found


def main():
    target = sys.argv[1]
    torch._dynamo.config.disable = True  # vLLM compiles the router
    torch.set_default_dtype(torch.bfloat16)
    parallel = ParallelConfig(tensor_parallel_size=RANKS, enable_expert_parallel=RANKS > 1, rank=RANK)
    vllm_config = VllmConfig(kernel_config=KernelConfig(moe_backend="rose_cutedsl"), parallel_config=parallel)
    vllm_config.parallel_config.enable_eplb = True  # vLLM's own check wants a GPU
    vllm_config.parallel_config.eplb_config.num_redundant_experts = REDUNDANT
    base_router.eplb_map_to_physical_and_record = map_to_physical
    patch = pytest.MonkeyPatch()
    with set_current_vllm_config(vllm_config), tempfile.TemporaryDirectory() as directory:
        directory = os.environ.get("PROBE_DIRECTORY", directory)
        os.environ["VLLM_DIST_IDENT"] = Path(directory).name  # of vLLM's shared memory between ranks on a CPU
        if RANK == 0:
            environment = {**os.environ, "PROBE_DIRECTORY": directory}
            others = [
                subprocess.Popen(
                    [sys.executable, *sys.argv], env={**environment, "PROBE_RANK": str(rank)}, stdout=subprocess.DEVNULL
                )
                for rank in range(1, RANKS)
            ]
        init_distributed_environment(RANKS, RANK, f"file://{directory}/rendezvous", RANK, "gloo")
        initialize_model_parallel(RANKS, 1)
        before = call_counts.snapshot()
        if target == "reference":
            result = run(vllm_config, None) | {"supports": supports(vllm_config)}
            result["qwen3_5"] = qwen3_5_has_the_same_block()
        else:
            patch.setattr(gpu, "target", lambda: target)
            patch.setattr(launch, "warm_up", lambda **how: None)
            patch.setattr(self_check, "need", lambda family, shape_of: None)
            with emulated(patch, target) as seen:
                platform = SimpleNamespace(**{f"is_{p}": lambda: False for p in ("cpu", "rocm", "cuda")})
                patch.setattr(mk, "current_platform", platform)
                patch.setattr(torch.accelerator, "empty_cache", lambda: None)
                patch.setattr(torch, "empty", partial(new_memory, torch.empty))
                result = run(vllm_config, seen)
        after = call_counts.snapshot()
        result["calls"] = {op: list(after[op]) for op in after if after[op] != before.get(op)}
        if RANK == 0:
            result["others"] = [process.wait(timeout=60) for process in others]
    patch.undo()
    result["cuda_starts"] = len(methods.CUDA_STARTS)
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
