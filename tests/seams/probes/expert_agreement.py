"""Two ranks with EPLB decide whether experts lie in parts, on fake drivers that may differ; prints what came of it."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "memory"))

import methods
from locality_driver import LocalityDriver, one_domain
from vllm.config import KernelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import get_ep_group, init_distributed_environment, initialize_model_parallel

from vllm_rose_plugin.kernels.moe_experts.compare_ways import WHOLE, Comparison
from vllm_rose_plugin.kernels.moe_experts.make_ways import Domains
from vllm_rose_plugin.layers import expert_agreement, gpu, locality
from vllm_rose_plugin.layers.experts import RoseCuteDslExperts
from vllm_rose_plugin.memory.driver import Driver
from vllm_rose_plugin.memory.rendezvous import GroupError

RANKS, RANK = 2, int(os.environ.get("PROBE_RANK", "0"))


def run(patch):
    """Name of a case to what this rank decided: the split weights, None, or an error's text."""
    two = Driver(device=0, bindings=LocalityDriver(domains=(100, 100), spare=12))
    four = Driver(device=0, bindings=LocalityDriver(domains=(50, 50, 50, 50), spare=12))
    one = Driver(device=0, bindings=one_domain())
    far = Driver(device=0, bindings=LocalityDriver(domains=(100, 100), spare=12, rdma=(True, False)))
    here, logged = SimpleNamespace(driver=two, whole=10.0), []

    def compare(*, shape_of, tokens, ways, splits, domains, checked, timer=None):
        times = {name: [2.0] * len(tokens) for name in ways}
        return Comparison(tuple(tokens), times | {WHOLE: [here.whole] * len(tokens)}, {})

    patch.setattr(gpu, "target", lambda: "sm_90a")
    patch.setattr(locality, "_driver", lambda: here.driver)
    patch.setattr(locality, "compare_ways", compare)
    patch.setattr(Domains, "way", lambda self, name: SimpleNamespace(part_of=lambda parts: None))
    patch.setattr(locality.logger, "warning", lambda text, *values: logged.append(text % values))

    def decide(setting, *, driver=two, whole=10.0, eplb=True):
        config.additional_config = {"rose": {"locality": setting}}
        here.driver, here.whole = driver, whole
        locality._by_kind.clear()
        if get_ep_group() in expert_agreement._live:
            expert_agreement._live[get_ep_group()].settled.clear()
        parallel = SimpleNamespace(
            enable_eplb=eplb, dp_size=1, ep_size=RANKS, all2all_backend="", use_all2all_kernels=0
        )
        moe_config = methods.moe_config(hidden_dim=512, intermediate_size=512)
        moe_config.moe_parallel_config = parallel
        found = []
        for _ in range(2):  # layers that are alike
            try:
                with torch.device("meta"):  # as vLLM has its device as torch's default while it builds a model
                    decision = locality.decide(moe_config, RoseCuteDslExperts, method="modelopt")
            except (GroupError, ValueError) as error:
                return f"{type(error).__name__}: {error}"
            found.append(decision and [[stem, split.parts] for stem, split in decision.splits])
        assert found[0] == found[1]
        return found[0]

    second, config = RANK == 1, VllmConfig(kernel_config=KernelConfig(moe_backend="rose_cutedsl"))
    with set_current_vllm_config(config):
        result = {
            "both faster": decide("auto"),
            "both slower": decide("auto", whole=1.0),
            "one slower": decide("auto", whole=1.0 if second else 10.0),
            "one without domains": decide("auto", driver=one if second else two),
            "other domains": decide("auto", driver=four if second else two),
            "each alone": decide("auto", whole=1.0 if second else 10.0, eplb=False),
            "named, one without domains": decide("default", driver=one if second else two),
            "named, other domains": decide("default", driver=four if second else two),
            "named": decide("default", whole=1.0),
        }
        config.parallel_config.eplb_config.communicator = "nixl"
        result |= {
            "by nixl": decide("auto"),
            "by nixl, out of its reach": decide("auto", driver=far),
            "by nixl, named, out of its reach": decide("default", driver=far),
            "no eplb, out of its reach": decide("auto", driver=far, eplb=False),
        }
    result["logged"] = logged
    result["said"] = locality.snapshot()
    result["phases"] = expert_agreement._live[get_ep_group()].group._phases
    return result


def main():
    patch = pytest.MonkeyPatch()
    parallel = ParallelConfig(tensor_parallel_size=RANKS, enable_expert_parallel=True, rank=RANK)
    vllm_config = VllmConfig(kernel_config=KernelConfig(moe_backend="rose_cutedsl"), parallel_config=parallel)
    with set_current_vllm_config(vllm_config), tempfile.TemporaryDirectory() as directory:
        directory = os.environ.get("PROBE_DIRECTORY", directory)
        os.environ["VLLM_DIST_IDENT"] = Path(directory).name  # of vLLM's shared memory between ranks on a CPU
        others = [
            subprocess.Popen(
                [sys.executable, *sys.argv],
                env={**os.environ, "PROBE_DIRECTORY": directory, "PROBE_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
            )
            for rank in range(1, RANKS)
            if RANK == 0
        ]
        init_distributed_environment(RANKS, RANK, f"file://{directory}/rendezvous", RANK, "gloo")
        initialize_model_parallel(RANKS, 1)
        results = [None] * RANKS
        torch.distributed.all_gather_object(results, run(patch), group=get_ep_group().cpu_group)
        ends = [process.wait(timeout=60) for process in others]
    patch.undo()
    json.dump({"ranks": results, "others": ends, "cuda_starts": len(methods.CUDA_STARTS)}, sys.stdout)


if __name__ == "__main__":
    main()
