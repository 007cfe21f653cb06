"""vLLM's linear layers with their weights in parts: loaded, run, exported, loaded again, freed, refused.

Argument: "reference", or a compile target whose kernels torch emulates on a fake driver with two locality domains. Each
step is done with whole weights too.
"""

import gc
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

import vllm_rose_plugin

sys.path.insert(0, str(Path(__file__).parents[2] / "gemm_cutedsl"))
sys.path.insert(0, str(Path(__file__).parents[2] / "memory"))
vllm_rose_plugin.register()

from linear import HIDDEN, random  # noqa: E402
from linear import emulated as emulated_linears  # noqa: E402
from locality_driver import LocalityDriver, one_domain  # noqa: E402
from memfd_driver import CUresult  # noqa: E402
from vllm.config import KernelConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.model_executor.layers.quantization.online.mxfp8 import Mxfp8OnlineLinearMethod  # noqa: E402
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload  # noqa: E402
from weight_reload import buffers_of, forward_linears, load_linears, make_linears  # noqa: E402

from vllm_rose_plugin.kernels import call_counts  # noqa: E402
from vllm_rose_plugin.kernels.jit.providers import NoProviderError  # noqa: E402
from vllm_rose_plugin.kernels.moe_experts.compare_ways import WHOLE, Comparison  # noqa: E402
from vllm_rose_plugin.kernels.moe_experts.make_ways import SINGLE_LAUNCH, Domains  # noqa: E402
from vllm_rose_plugin.kernels.moe_experts.ways import OneLaunch  # noqa: E402
from vllm_rose_plugin.layers import gpu, linear_locality, linear_parts, locality, self_check  # noqa: E402
from vllm_rose_plugin.memory import windows  # noqa: E402
from vllm_rose_plugin.memory.driver import Driver  # noqa: E402

TABLE = torch.arange(132, dtype=torch.int32) % 2


class World:
    """Settings, and layers made under them."""

    def __init__(self, vllm_config):
        self.vllm_config = vllm_config

    def set(self, **rose):
        self.vllm_config.additional_config = {"rose": rose}

    def model(self, seed=3, **rose):
        self.set(**rose)
        return make_linears(seed)


def same(outs, expected):
    return {name: torch.equal(outs[name], expected[name]) for name in outs}


def close(outs, expected):
    """Torch adds up a product of fewer columns in another order."""
    return {name: ((outs[name] - expected[name]).norm() / expected[name].norm()).item() < 5e-3 for name in outs}


def parts_of(model):
    found = {name: linear_parts.of(layer) for name, layer in model.items()}
    return {name: None if parts is None else [parts.split.parts, parts.split.part_n] for name, parts in found.items()}


def equal_state(a, b):
    return list(a) == list(b) and all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)


def run(world, how, fake):
    alike = close if fake is None else same
    whole, split = world.model(locality="off"), world.model(**how, locality_linear=True)
    result = {
        "unasked": parts_of(world.model(**how)),
        "parts": parts_of(split),
        "devices": {name: layer.weight.device.type for name, layer in split.items()},
        "buffers": sorted(buffers_of(split)),
        "forward": alike(forward_linears(split), forward_linears(whole)),
        "state_dict": equal_state(split.state_dict(), whole.state_dict()),
    }
    before = call_counts.snapshot().get("mxfp8_linear_split", {})
    forward_linears(split)
    after = call_counts.snapshot().get("mxfp8_linear_split", {})
    result["calls"] = {name: after[name] - before.get(name, 0) for name in after}
    if fake is not None:
        holder = {s: h for s, (n, h) in fake.mapped.items()}
        result["domains"] = [
            sorted(
                fake.memory_domain[holder[max(s for s in holder if s <= t.data_ptr())]]
                for name, t in buffers_of(split).items()
                if f"part{part}" in name
            )
            for part in range(2)
        ]
    held = {name: buffer.data_ptr() for name, buffer in buffers_of(split).items()}
    result["reloaded"], result["changed"] = [], []
    before = forward_linears(split)
    for seed in (11, 12):
        initialize_layerwise_reload(split)
        load_linears(split, seed)
        finalize_layerwise_reload(split, SimpleNamespace(dtype=torch.bfloat16))
        outs = forward_linears(split)
        fresh = world.model(seed, **how, locality_linear=True)
        result["reloaded"].append(all(same(outs, forward_linears(fresh)).values()))
        result["changed"].append(not any(same(outs, before).values()))
    result["in_place"] = held == {name: buffer.data_ptr() for name, buffer in buffers_of(split).items()}
    result["meta_again"] = {name: layer.weight.device.type for name, layer in split.items()}
    split.load_state_dict(whole.state_dict())
    for layer in split.values():
        layer.quant_method.process_weights_after_loading(layer)
    result["taken"] = alike(forward_linears(split), forward_linears(whole))
    try:
        split["qkv"].weight.weight_loader(split["qkv"].weight, torch.zeros(1), "q")
    except ValueError as error:
        result["in_place_load"] = str(error)
    result["no_tokens"] = list(split["qkv"](torch.zeros(0, HIDDEN, dtype=torch.bfloat16))[0].shape)
    result["three_dimensions"] = list(split["qkv"](random(2, 3, HIDDEN))[0].shape)
    if fake is not None:
        handles = [fake.ledger()["handles"]]
        del fresh, split
        gc.collect()
        handles.append(fake.ledger()["handles"])
        result["handles"] = handles
    return result


def attempt(world, **rose):
    try:
        return parts_of(world.model(**rose, locality_linear=True))
    except ValueError as error:
        return str(error)


def refusals(world, how):
    found = {}
    config = world.vllm_config
    for load_format in ("tensorizer", "auto"):
        config.load_config.load_format = load_format
        found[load_format] = attempt(world, **how)
    config.offload_config.uva.cpu_offload_gb = 2
    found["uva"] = attempt(world, **how)
    config.offload_config.uva.cpu_offload_gb = 0
    config.model_config = SimpleNamespace(dtype=torch.bfloat16, enable_sleep_mode=True)
    found["sleep"] = attempt(world, **how)
    config.model_config = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "model_config", SimpleNamespace(dtype=torch.bfloat16, enable_sleep_mode=False))
        try:
            linear_locality.decide((lambda tokens: None,), Mxfp8OnlineLinearMethod())
        except ValueError as error:
            found["online"] = str(error)
    return found


def with_kernels(patch, world, target):
    fake = LocalityDriver(domains=(100, 100), spare=12)
    driver = Driver(device=0, bindings=fake)

    class Host:
        def __init__(self, window):
            self.window, self.__array_interface__ = window, window.__cuda_array_interface__

    patch.setattr(windows, "as_bytes", lambda window, device: torch.from_numpy(numpy.asarray(Host(window))))
    patch.setattr(gpu, "target", lambda: target)
    patch.setattr(self_check, "need", lambda family, shape_of: None)
    patch.setattr(locality, "_driver", lambda: driver)
    patch.setattr(Domains, "way", lambda self, name: OneLaunch(TABLE))
    compared, gains = [], {}

    def compare(*, shape_of, tokens, place, captured, checked):
        if "raises" in gains:
            raise NoProviderError("linear_locality: no provider passed its self-check")
        shape = shape_of(1)
        compared.append([shape.n, shape.k, shape.bias, list(tokens), list(checked), place.split.parts, place.forced])
        times = {SINGLE_LAUNCH: [gains.get("single", 2.0)] * len(tokens), WHOLE: [10.0] * len(tokens)}
        failed = {SINGLE_LAUNCH: gains["failed"]} if "failed" in gains else {}
        return Comparison(tuple(tokens), times, failed)

    patch.setattr(linear_locality, "compare_split", compare)
    with emulated_linears(patch, target):
        result = run(world, {"locality": "default"}, fake)
        result["compared"] = compared[:]
        result["decided"] = locality.snapshot()
        result["without_reference"] = dict(self_check._without_reference)
        result["auto"] = {}
        for name, given in (
            ("faster", {"single": 9.0}),
            ("as fast", {"single": 9.9}),
            ("wrong", {"failed": "3 rows are off"}),
            ("raising", {"raises": 0.0}),
        ):
            gains.clear()
            gains.update(given)
            linear_locality._by_kind.clear()
            result["auto"][name] = attempt(world, locality="auto")
            linear_locality._by_kind.clear()
            result["auto"][f"{name}, named"] = attempt(world, locality="backfill")
        gains.clear()
        linear_locality._by_kind.clear()
        with pytest.MonkeyPatch.context() as pinned:
            pinned.setenv("ROSE_PROVIDER_MXFP8_LINEAR", "reference")
            result["auto"]["pinned"] = attempt(world, locality="auto")
        result["refusals"] = refusals(world, {"locality": "single_launch"})
        patch.setattr(locality, "_driver", lambda: Driver(device=0, bindings=one_domain()))
        result["refusals"]["one domain"] = attempt(world, locality="single_launch")
        result["refusals"]["one domain, auto"] = attempt(world, locality="auto")
        patch.setattr(locality, "_driver", lambda: driver)
        # The second domain has no room for a part: what was made in the first one is given back.
        gc.collect()
        before, create = fake.ledger(), fake.cuMemCreate
        fake.cuMemCreate = lambda size, properties, flags: (
            (CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
            if properties.location.localized.localityDomainId
            else create(size, properties, flags)
        )
        try:
            world.model(locality="default", locality_linear=True)
        except RuntimeError as error:
            result["refusals"]["no room"] = f"{error} {' '.join(getattr(error, '__notes__', []))}"
        gc.collect()
        result["refusals"]["left by it"] = {key: fake.ledger()[key] - before[key] for key in before}
    return result


def main():
    target = sys.argv[1]
    torch.set_default_dtype(torch.bfloat16)
    world = World(VllmConfig(kernel_config=KernelConfig(linear_backend="rose_cutedsl")))
    patch = pytest.MonkeyPatch()
    with set_current_vllm_config(world.vllm_config), tempfile.TemporaryDirectory() as directory:
        init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        if target == "reference":
            how = {"locality": "single_launch", "locality_force_domains": 2}
            result = run(world, how, None)
            result["refusals"] = refusals(world, how)
            result["refusals"]["no gpu"] = attempt(world, locality="single_launch")
        else:
            result = with_kernels(patch, world, target)
    patch.undo()
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
