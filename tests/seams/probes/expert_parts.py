"""Experts in parts through vLLM's own layer: created, loaded, run, exported, balanced, loaded again, freed.

Argument: "reference", or a compile target whose kernels torch emulates on a fake driver with two locality domains. Each
step is done with whole weights too, whose bits must come out.
"""

import gc
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "moe_cutedsl"))
sys.path.insert(0, str(Path(__file__).parents[2] / "memory"))

import methods
from expert_balance import LOGICAL, PHYSICAL, TOKENS, Model, Peers, maps
from experts import new_memory
from experts_emulation import EmulatedStreams, emulated
from locality_driver import LocalityDriver, one_domain
from memfd_driver import CUresult
from vllm.config import KernelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace
from vllm.distributed.parallel_state import get_ep_group, init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.router import base_router
from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.models.qwen3_next import Qwen3NextSparseMoeBlock
from vllm.v1.worker import workspace

from vllm_rose_plugin.kernels.gemm.forked_gemm import Forked
from vllm_rose_plugin.kernels.jit.providers import NoProviderError
from vllm_rose_plugin.kernels.moe_experts import launch
from vllm_rose_plugin.kernels.moe_experts.compare_ways import WHOLE, Comparison
from vllm_rose_plugin.kernels.moe_experts.make_ways import Domains
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8
from vllm_rose_plugin.layers import expert_parts, gpu, locality, self_check, tuning
from vllm_rose_plugin.layers.experts import RoseCuteDslExperts
from vllm_rose_plugin.layers.experts_batched import RoseCuteDslBatchedExperts
from vllm_rose_plugin.memory import windows
from vllm_rose_plugin.memory.driver import Driver
from vllm_rose_plugin.memory.locality import LocalityUnavailableError

HIDDEN, INTERMEDIATE, TOP_K = 256, 256, 2


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
    vllm_config.compilation_config.static_forward_context.clear()
    return Qwen3NextSparseMoeBlock(seen, prefix="model.layers.0.mlp")


def checkpoint(seed):
    """(name, tensor) as a file has them."""
    generator = torch.Generator().manual_seed(seed)
    for expert in range(LOGICAL):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            shape = (HIDDEN, INTERMEDIATE) if projection == "down_proj" else (INTERMEDIATE, HIDDEN)
            codes, scales = quantize_mxfp8((torch.randn(shape, generator=generator) / 16).bfloat16())
            yield f"{expert}.{projection}.weight", codes
            yield f"{expert}.{projection}.weight_scale", scales


def load(block, seed, *, skip=""):
    layer = block.experts.routed_experts
    loaded = set(layer.load_weights((n, w) for n, w in checkpoint(seed) if not skip or not n.startswith(skip)))
    return sorted(loaded)


def others(block):
    """What isn't the routed experts'."""
    generator = torch.Generator().manual_seed(1)
    for name, param in block.named_parameters():
        if "routed_experts" not in name:
            param.data.normal_(generator=generator).div_(HIDDEN**0.5)


def process(block):
    for module in block.modules():
        if getattr(module, "quant_method", None) is not None:
            module.quant_method.process_weights_after_loading(module)


def fresh_workspace():
    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(torch.device("cpu"))


def map_to_physical(topk_ids, expert_load_view, logical_to_physical_map, logical_replica_count, *args, **kwargs):
    """The first replica of each."""
    return logical_to_physical_map[topk_ids.long(), 0].to(topk_ids.dtype)


class Engine:
    """A block that serves, with the setting it was built under."""

    def __init__(self, vllm_config, *, seed=3, **rose):
        self.vllm_config = vllm_config
        vllm_config.additional_config = {"rose": rose}
        self.block = make_block(vllm_config)
        self.layer = self.block.experts.routed_experts
        record_metadata_for_reloading(self.block)
        load(self.block, seed)
        others(self.block)
        process(self.block)
        self.model = Model(self.block)
        self.placement = [i % LOGICAL for i in range(PHYSICAL)]
        self.to_physical, self.count = maps(self.placement)
        self.model.set_eplb_state(torch.zeros(1, PHYSICAL, dtype=torch.int32), self.to_physical, self.count)
        state = self.block.experts.eplb_state
        state.should_record_tensor = torch.tensor(True)
        state.num_unpadded_tokens_tensors = [torch.tensor(TOKENS)]

    def forward(self, tokens=TOKENS):
        x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(7)).bfloat16()[:tokens]
        fresh_workspace()
        found = self.vllm_config.compilation_config.static_forward_context
        found["model.layers.0.mlp.experts"] = self.block.experts
        try:
            with set_forward_context(None, self.vllm_config, num_tokens=tokens):
                return self.block(x.clone())
        finally:
            found.clear()

    def move(self, placement):
        weights = [list(layer_weights) for layer_weights in self.model.expert_weights]
        rearrange_expert_weights_inplace(
            torch.tensor([self.placement]),
            torch.tensor([placement]),
            weights,
            [torch.empty_like(w) for w in weights[0]],
            get_ep_group().cpu_group,
            Peers(),
        )
        self.place(placement)
        return weights[0]

    def place(self, placement):
        self.placement = placement
        for mine, theirs in zip((self.to_physical, self.count), maps(placement), strict=True):
            mine.copy_(theirs)

    def reload(self, seed):
        """As vLLM reloads weights in place."""
        initialize_layerwise_reload(self.block)
        load(self.block, seed)
        finalize_layerwise_reload(self.block, SimpleNamespace(dtype=torch.bfloat16))
        self.place([i % LOGICAL for i in range(PHYSICAL)])  # as the load has put them


def equal(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def run(vllm_config, seen, fake, ledger):
    off = Engine(vllm_config, locality="off")
    how = {"locality": "default"} if fake else {"locality": "default", "locality_force_domains": 2}
    split = Engine(vllm_config, **how)
    parts = expert_parts.ExpertParts.of(split.layer)
    result = {
        "experts": type(split.layer.quant_method.moe_kernel.fused_experts).__name__,
        "split": {stem: [s.parts, s.part_n] for stem, s in parts.splits.items()},
        "ways": parts.ways,
        "device_of_parameters": {n: p.device.type for n, p in split.layer.named_parameters()},
        "buffers": sorted(name for name, _ in split.layer.named_buffers()),
        "of_whole": expert_parts.ExpertParts.of(off.layer) is None,
        "bits": [equal(split.forward(n), off.forward(n)) for n in (TOKENS, 1, 7)],
    }
    if seen is not None:
        seen.streams.clear()
        split.forward()
        result["streams"] = list(seen.streams)
    state, expected = split.layer.state_dict(), off.layer.state_dict()
    result["state_dict"] = list(state) == list(expected) and all(
        torch.equal(state[n].view(torch.uint8), expected[n].view(torch.uint8)) for n in expected
    )
    if fake:
        result["domains"] = [
            sorted(
                {
                    fake.memory_domain[next(h for s, (n, h) in fake.mapped.items() if s <= t.data_ptr() < s + n)]
                    for t in tensors
                }
            )
            for tensors in zip(*parts.codes.values(), *parts.packed.values(), strict=True)
        ]
        result["held"] = ledger()
    addresses = [w.data_ptr() for w in parts.by_expert()]
    placements = [[4, 0, 0, 3, 1, 2, 5, 0, 0], [5, 4, 3, 2, 1, 0, 2, 2, 5]]
    moved = []
    for placement in placements:
        weights = split.move(placement)
        off.move(placement)
        moved.append(equal(split.forward(), off.forward()))
    result["moved"], result["moved_shapes"] = moved, [list(w.shape) for w in weights]
    split.reload(11)
    expected = Engine(vllm_config, seed=11, locality="off")
    result["reloaded"] = equal(split.forward(), expected.forward())
    again = Engine(vllm_config, locality="off")
    changed = split.layer.state_dict()["w13_weight"].view(torch.uint8)
    result["reload_changed"] = not torch.equal(changed, again.layer.state_dict()["w13_weight"].view(torch.uint8))
    split.layer.load_state_dict(again.layer.state_dict(), strict=False)
    result["taken"] = torch.equal(
        split.layer.state_dict()["w2_weight"].view(torch.uint8), again.layer.state_dict()["w2_weight"].view(torch.uint8)
    )
    result["in_place"] = addresses == [w.data_ptr() for w in parts.by_expert()]
    # Two more engines in the same process; vLLM itself keeps layers that it has loaded again.
    first, second = Engine(vllm_config, **how), Engine(vllm_config, **how)
    held = [ledger()["handles"] if fake else 0]
    result["two"] = [equal(engine.forward(), again.forward()) for engine in (first, second)]
    for gone in ("first", "second"):
        if gone == "first":
            del first
        else:
            result["second_alone"] = equal(second.forward(), again.forward())
            del second
        vllm_config.compilation_config.static_forward_context.clear()
        gc.collect()
        held.append(ledger()["handles"] if fake else 0)
    result["handles"] = held
    return result


def offloading(vllm_config):
    """(name, options, field that switches it on) of each of vLLM's offloaders of weights."""
    config = vllm_config.offload_config
    return ("uva", config.uva, "cpu_offload_gb"), ("prefetch", config.prefetch, "offload_group_size")


def refusals(vllm_config, fake):
    """What is said where experts can't be split, by name."""
    found = {}

    def attempt(name, **rose):
        vllm_config.additional_config = {"rose": rose}
        try:
            block = make_block(vllm_config)
            layer = block.experts.routed_experts
            found[name] = "whole" if expert_parts.ExpertParts.of(layer) is None else "split"
        except ValueError as error:
            found[name] = str(error)

    attempt("auto", locality="auto")
    if not fake:
        attempt("no gpu", locality="backfill")
        vllm_config.additional_config = {"rose": {"locality": "default", "locality_force_domains": 2}}
        block = make_block(vllm_config)
        load(block, 3, skip="5.up_proj.weight")
        for name, call in (
            ("incomplete", lambda: process(block)),
            ("fused", lambda: block.experts.routed_experts.w13_weight.weight_loader(
                block.experts.routed_experts.w13_weight, torch.zeros(2, 4, 4), "w13_weight", "w1", 0)),
        ):  # fmt: skip
            try:
                call()
            except ValueError as error:
                found[name] = str(error)
        attempt("tile", locality="default", locality_force_domains=3)
        for load_format in ("tensorizer", "ipc_cache", "modelexpress"):
            vllm_config.load_config.load_format = load_format
            attempt(load_format, locality="default", locality_force_domains=2)
        vllm_config.load_config.load_format = "auto"
        for name, options, field in offloading(vllm_config):
            setattr(options, field, 2)
            attempt(name, locality="default", locality_force_domains=2)
            setattr(options, field, 0)
        forced = {"rose": {"locality": "default", "locality_force_domains": 2}}
        vllm_config.additional_config, vllm_config.model_config = forced, SimpleNamespace(enable_sleep_mode=True)
        for name, cls, method in (
            ("sleep", RoseCuteDslExperts, "modelopt"),
            ("online", RoseCuteDslExperts, "online"),
            ("batched", RoseCuteDslBatchedExperts, "modelopt"),
        ):
            try:
                locality.decide(methods.moe_config(), cls, method=method)
            except ValueError as error:
                found[name] = str(error)
            vllm_config.model_config = None
        # A draft's model_config says nothing of sleep mode; its target's does.
        vllm_config.model_config = SimpleNamespace(enable_sleep_mode=False)
        vllm_config.speculative_config = SimpleNamespace(target_model_config=SimpleNamespace(enable_sleep_mode=True))
        try:
            locality.decide(methods.moe_config(), RoseCuteDslExperts, method="modelopt")
        except ValueError as error:
            found["sleep of a draft"] = str(error)
        vllm_config.model_config = vllm_config.speculative_config = None
        return found
    # The second domain has no room for a part: what was made in the first one is given back.
    before, create = fake.ledger(), fake.cuMemCreate
    fake.cuMemCreate = lambda size, properties, flags: (
        (CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
        if properties.location.localized.localityDomainId
        else create(size, properties, flags)
    )
    try:
        Engine(vllm_config, locality="default")
    except RuntimeError as error:
        found["no room"] = f"{error} {' '.join(getattr(error, '__notes__', []))}"
    found["left by it"] = {key: fake.ledger()[key] - before[key] for key in before}
    return found


def with_kernels(patch, target, vllm_config):
    """On a fake driver."""
    fake = LocalityDriver(domains=(100, 100), spare=12)
    driver = Driver(device=0, bindings=fake)

    class Host:
        def __init__(self, window):
            self.window, self.__array_interface__ = window, window.__cuda_array_interface__

    patch.setattr(windows, "as_bytes", lambda window, device: torch.from_numpy(numpy.asarray(Host(window))))
    patch.setattr(gpu, "target", lambda: target)
    patch.setattr(launch, "warm_up", lambda **how: warmed.append(how))
    patch.setattr(self_check, "need", lambda family, shape_of: None)
    patch.setattr(locality, "_driver", lambda: driver)
    tried, warmed, checks, measured = [], [], [], []
    for module, name in ((tuning, "tune_experts"), (self_check, "ask_for_one_launch")):
        patch.setattr(
            module, name, lambda shape, *, name=name, **how: measured.append(f"{name} on {torch.zeros(0).device}")
        )

    def compare(*, shape_of, tokens, ways, splits, domains, checked, timer=None):
        if "raises" in gains:
            raise NoProviderError("moe_locality: no provider passed its self-check")
        tried.append([sorted(ways), list(tokens), [split.parts for split in splits], domains.count, domains.forced])
        checks.append([list(checked), str(torch.get_default_dtype())])
        measured.append(f"compare on {torch.zeros(0).device}")
        times = {name: [gains.get(name, 2.0)] * len(tokens) for name in ways}
        return Comparison(tuple(tokens), times | {WHOLE: [10.0] * len(tokens)}, {})

    gains = {}
    patch.setattr(locality, "compare_ways", compare)
    with emulated(patch, target) as seen:
        platform = SimpleNamespace(**{f"is_{p}": lambda: False for p in ("cpu", "rocm", "cuda")})
        patch.setattr(mk, "current_platform", platform)
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        empty = torch.empty
        with torch.device("meta"):  # torch notes which functions make tensors when it is first asked for a device
            assert empty(1).is_meta

        patch.setattr(torch, "empty", partial(new_memory, empty))

        def way(self, name):
            if name == "single_launch":
                raise LocalityUnavailableError("not in this test")
            return Forked(EmulatedStreams(self.count, seen), (100, 100), name == "default")

        patch.setattr(Domains, "way", way)
        result = run(vllm_config, seen, fake, fake.ledger)
        result["compared"], result["checked"] = tried[0], checks[0]
        result["warmed_parts"] = next(how["parts"] for how in warmed if "parts" in how)
        result["decided"] = locality.snapshot()
        result["without_reference"] = dict(self_check._without_reference)
        locality._by_kind.clear()
        result["auto"] = {}
        for name, given in (
            ("faster", {"backfill": 4.0, "default": 5.0}),
            ("as fast", {"backfill": 9.9, "default": 10.0}),
            ("raising", {"raises": 0.0}),
        ):
            gains.clear()
            gains.update(given)
            locality._by_kind.clear()
            vllm_config.additional_config = {"rose": {"locality": "auto"}}
            parts = expert_parts.ExpertParts.of(make_block(vllm_config).experts.routed_experts)
            result["auto"][name] = None if parts is None else parts.ways
        gains.clear()
        for name, options, field in offloading(vllm_config):
            locality._by_kind.clear()
            setattr(options, field, 2)
            parts = expert_parts.ExpertParts.of(make_block(vllm_config).experts.routed_experts)
            result["auto"][name] = None if parts is None else parts.ways
            setattr(options, field, 0)
        locality._by_kind.clear()
        with pytest.MonkeyPatch.context() as pinned:
            pinned.setenv("ROSE_PROVIDER_MOE_EXPERTS", "reference")
            parts = expert_parts.ExpertParts.of(make_block(vllm_config).experts.routed_experts)
            result["auto"]["pinned"] = None if parts is None else parts.ways
        gains.update(backfill=4.0, default=5.0)
        locality._by_kind.clear()
        measured.clear()
        vllm_config.additional_config = {"rose": {"locality": "auto", "tune": True}}
        with torch.device("meta"):  # as vLLM has a device of its own as torch's default
            config = methods.moe_config(hidden_dim=HIDDEN, intermediate_size=INTERMEDIATE)
            locality.decide(config, RoseCuteDslExperts, method="modelopt")
        result["measured"] = list(measured)
        gains.update(backfill=9.9, default=10.0)
        del parts
        old = Driver(device=0, bindings=one_domain())
        patch.setattr(locality, "_driver", lambda: old)
        result["refusals"] = {}
        for setting in ("auto", "single_launch"):
            vllm_config.additional_config = {"rose": {"locality": setting}}
            try:
                layer = make_block(vllm_config).experts.routed_experts
                result["refusals"][setting] = "whole" if expert_parts.ExpertParts.of(layer) is None else "split"
            except ValueError as error:
                result["refusals"][setting] = str(error)
        patch.setattr(locality, "_driver", lambda: driver)
        locality._by_kind.clear()
        result["refusals"] |= refusals(vllm_config, fake)
    return result


def main():
    target = sys.argv[1]
    torch._dynamo.config.disable = True  # vLLM compiles the router
    torch.set_default_dtype(torch.bfloat16)
    vllm_config = VllmConfig(kernel_config=KernelConfig(moe_backend="rose_cutedsl"), parallel_config=ParallelConfig())
    vllm_config.parallel_config.enable_eplb = True  # vLLM's own check wants a GPU
    vllm_config.parallel_config.eplb_config.num_redundant_experts = PHYSICAL - LOGICAL
    base_router.eplb_map_to_physical_and_record = map_to_physical
    patch = pytest.MonkeyPatch()
    with set_current_vllm_config(vllm_config), tempfile.TemporaryDirectory() as directory:
        init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        if target == "reference":
            result = run(vllm_config, None, None, None)
            result["refusals"] = refusals(vllm_config, None)
        else:
            result = with_kernels(patch, target, vllm_config)
    patch.undo()
    result["cuda_starts"] = len(methods.CUDA_STARTS)
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
