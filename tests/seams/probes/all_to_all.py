"""A layer of experts over two data-parallel ranks with our all-to-all: vLLM's groups, methods and kernels on a CPU.

Arguments: the activation ("mxfp8" or "bf16"), a port for the ranks to meet at, and "reference" or a compile target
whose kernels torch emulates.
"""

import contextlib
import dataclasses
import faulthandler
import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
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
from vllm.distributed import parallel_state
from vllm.forward_context import (
    DPMetadata,
    create_forward_context,
    get_forward_context,
    override_forward_context,
    set_forward_context,
)
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.v1.worker import ubatching, workspace

from vllm_rose_plugin.kernels import call_counts
from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.moe_experts import launch
from vllm_rose_plugin.kernels.moe_experts.reference import moe_experts
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8
from vllm_rose_plugin.kernels.peer_timeout import PeerTimeoutError
from vllm_rose_plugin.layers import all_to_all, gpu, live_groups, self_check
from vllm_rose_plugin.seams.mxfp8_moe import METHODS

ACTIVATION, PORT, WAY = sys.argv[1], int(sys.argv[2]), sys.argv[3]
RANK = int(os.environ.get("PROBE_RANK", 0))
RANKS, EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, MOST, SECONDS = 2, 8, 64, 32, 3, 16, 2.0
LOCAL = EXPERTS // RANKS


def config():
    made = VllmConfig(
        kernel_config=KernelConfig(moe_backend="rose_cutedsl"),
        parallel_config=ParallelConfig(
            data_parallel_size=RANKS,
            data_parallel_rank=RANK,
            data_parallel_master_ip="127.0.0.1",
            data_parallel_master_port=PORT,
            enable_expert_parallel=True,
            all2all_backend="rose_nvlink",
        ),
        additional_config={"rose": {"activation": ACTIVATION, "all_to_all_timeout": SECONDS}},
    )
    made.parallel_config._data_parallel_master_port_list = []  # else each rank meets at a port of its own
    made.parallel_config.data_parallel_master_port = PORT
    return made


def moe_config(vllm_config, **changes):
    parallel = FusedMoEParallelConfig.make(1, 1, RANKS, 1, vllm_config.parallel_config)
    values = {"num_experts": EXPERTS, "num_logical_experts": EXPERTS, "num_local_experts": LOCAL}
    values |= {"experts_per_token": TOP_K, "max_num_tokens": MOST, "moe_parallel_config": parallel}
    return methods.moe_config(**{**values, **changes})


def make_layer(vllm_config):
    """(method, layer, weights of all experts)."""
    module, name, _ = METHODS["modelopt"]
    method = methods.make("modelopt", getattr(importlib.import_module(module), name), moe_config(vllm_config))
    layer = methods.Layer()
    layer.global_num_experts, layer.local_num_experts = EXPERTS, LOCAL
    here = torch.arange(EXPERTS, dtype=torch.int32) - RANK * LOCAL
    layer.expert_map = torch.where((here >= 0) & (here < LOCAL), here, -1)
    method.create_weights(
        layer,
        num_experts=LOCAL,
        hidden_size=HIDDEN,
        intermediate_size_per_partition=INTERMEDIATE,
        params_dtype=torch.bfloat16,
        weight_loader=lambda *a, **k: None,
    )
    generator, weights = torch.Generator().manual_seed(5), []
    for param, shape in (("w13", (2 * INTERMEDIATE, HIDDEN)), ("w2", (HIDDEN, INTERMEDIATE))):
        plain = (torch.randn(EXPERTS, *shape, generator=generator) / shape[1] ** 0.5).bfloat16()
        codes, scales = quantize_mxfp8(plain)
        mine = slice(RANK * LOCAL, (RANK + 1) * LOCAL)
        getattr(layer, f"{param}_weight").data.view(torch.uint8).copy_(codes.view(torch.uint8)[mine])
        getattr(layer, f"{param}_weight_scale").data.copy_(scales[mine])
        weights.append(Mxfp8Tensor(codes, scales))
    method.process_weights_after_loading(layer)
    return method, layer, weights


def step(vllm_config, method, layer, counts, x, topk_weights, topk_ids):
    tokens = torch.tensor(counts, dtype=torch.int32)
    with (
        set_forward_context(None, vllm_config, num_tokens=counts[RANK], num_tokens_across_dp=tokens),
        get_forward_context().dp_metadata.sp_local_sizes(1),
    ):
        return method.apply(layer, x, topk_weights, topk_ids, None, None)


def far(vllm_config, made, counts, *, seed):
    """Rows of this rank that are off by more than a rounding to bf16 for each rank is; the last row is padding."""
    method, layer, weights = made
    generator = torch.Generator().manual_seed(100 * seed + RANK)
    x = torch.randn(counts[RANK], HIDDEN, generator=generator).bfloat16()
    topk_weights = torch.rand(counts[RANK], TOP_K, generator=generator)
    topk_ids = torch.rand(counts[RANK], EXPERTS, generator=generator).argsort(-1)[:, :TOP_K]
    if counts[RANK] > 1:
        x[-1], topk_ids[-1] = float("nan"), -1
    if seed == 3:
        topk_ids[:] = -1
    out = step(vllm_config, method, layer, counts, x, topk_weights, topk_ids)
    expected = moe_experts(
        x, topk_ids=topk_ids, topk_weights=topk_weights, w13=weights[0], w2=weights[1], activation=ACTIVATION
    )
    assert out.shape == expected.shape and out.dtype == expected.dtype and not out.isnan().any()
    error = (out.double() - expected.double()).norm(dim=-1)
    return int((error > 1e-2 * expected.double().norm(dim=-1)).sum())


def two_micro_batches(vllm_config, made, *, layers=3):
    """(rows that are off, the exchanges' calls) of two micro-batches that vLLM's threads hand over to each other.

    The device's streams and events alone are not vLLM's.
    """
    method, layer, weights = made
    patch, calls, wrong, stream = pytest.MonkeyPatch(), [], [0, 0], object()
    exchanges = [method.moe_kernel.prepare_finalize._group.of(number) for number in range(2)]
    patch.setattr(ubatching, "torch", SimpleNamespace(Event=SimpleNamespace, cuda=SimpleNamespace()))
    patch.setattr(ubatching, "current_stream", lambda: stream)
    for name in ("dispatch_send", "dispatch_receive", "combine_send", "combine_receive"):
        original = getattr(type(exchanges[0]), name)

        def noted(self, *a, _name=name, _original=original, **k):
            calls.append([exchanges.index(self), _name])
            return _original(self, *a, **k)

        patch.setattr(type(exchanges[0]), name, noted)
    contexts = ubatching.make_ubatch_contexts(
        num_micro_batches=2,
        compute_stream=stream,
        comm_stream=object(),
        forward_contexts=[
            create_forward_context(
                None, vllm_config, dp_metadata=DPMetadata.make(vllm_config.parallel_config, n, torch.tensor([n, n]))
            )
            for n in (5, 6)
        ],
        ready_barrier=threading.Barrier(3),
    )

    def forward(number):
        generator = torch.Generator().manual_seed(10 * number + RANK)
        x = torch.randn(5 + number, HIDDEN, generator=generator).bfloat16()
        with torch.inference_mode(), contexts[number]:
            for _ in range(layers):
                topk_weights = torch.rand(len(x), TOP_K, generator=generator)
                topk_ids = torch.rand(len(x), EXPERTS, generator=generator).argsort(-1)[:, :TOP_K].to(torch.int32)
                with get_forward_context().dp_metadata.sp_local_sizes(1):
                    out = method.apply(layer, x, topk_weights, topk_ids, None, None)
                expected = moe_experts(
                    x,
                    topk_ids=topk_ids,
                    topk_weights=topk_weights,
                    w13=weights[0],
                    w2=weights[1],
                    activation=ACTIVATION,
                )
                error = (out.double() - expected.double()).norm(dim=-1)
                wrong[number] += int((error > 1e-2 * expected.double().norm(dim=-1)).sum())
                x = (out / out.float().norm(dim=-1, keepdim=True) * HIDDEN**0.5).bfloat16()

    with override_forward_context(None):
        threads = [threading.Thread(target=forward, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        contexts[0].ready_barrier.wait()
        contexts[0].cpu_wait_event.set()
        for thread in threads:
            thread.join(60)
    patch.undo()
    return wrong, calls


def beside_shared_experts(vllm_config, made):
    """(rows that are off, the exchange's calls of one step) of a layer without and with shared experts."""
    kernel = made[0].moe_kernel
    exchange, found, patch = kernel.prepare_finalize._group.of(0), [], pytest.MonkeyPatch()
    for shared in (False, True):
        calls = []
        for name in ("dispatch", "dispatch_send", "combine", "combine_send", "combine_receive"):
            original = getattr(type(exchange), name)

            def noted(self, *a, _name=name, _original=original, _calls=calls, **k):
                _calls.append(_name)
                return _original(self, *a, **k)

            patch.setattr(type(exchange), name, noted)
        patch.setattr(kernel.prepare_finalize, "_shared_experts", shared)
        found.append([far(vllm_config, made, [4, 2], seed=20 + shared), calls])
        patch.undo()
    return found


def refusals(vllm_config):
    """What classes of experts are told, by class; None: they can be served."""
    from vllm_rose_plugin.layers.all_to_all_check import experts_refusal

    folder = "vllm.model_executor.layers.fused_moe.experts"
    for module in pkgutil.iter_modules(importlib.import_module(folder).__path__):
        with contextlib.suppress(ImportError):  # what this machine lacks the libraries for
            importlib.import_module(f"{folder}.{module.name}")
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTensorSym

    from vllm_rose_plugin.layers.experts import RoseCuteDslExperts
    from vllm_rose_plugin.layers.experts_batched import RoseCuteDslBatchedExperts

    config, found, classes = moe_config(vllm_config), {}, [RoseCuteDslExperts, RoseCuteDslBatchedExperts]
    queue = [mk.FusedMoEExpertsModular, mk.FusedMoEExpertsMonolithic]
    while queue:
        for cls in queue.pop().__subclasses__():
            queue.append(cls)
            if not getattr(cls, "__abstractmethods__", None):
                classes.append(cls)
    found["classes"] = {cls.__name__: experts_refusal(cls, config, None) for cls in classes}
    modular = mk.FusedMoEExpertsModular
    found["kinds"] = {
        cls.__name__: "tokens" if issubclass(cls, modular) and "Standard" in str(cls.activation_format()) else "other"
        for cls in classes
    }
    ours = RoseCuteDslExperts
    found["tensor"] = experts_refusal(ours, config, kFp8DynamicTensorSym)
    found["dtype"] = experts_refusal(ours, moe_config(vllm_config, in_dtype=torch.float16), None)
    found["lora"] = experts_refusal(ours, moe_config(vllm_config, is_lora_enabled=True), None)
    found["experts"] = experts_refusal(ours, moe_config(vllm_config, num_experts=7), None)
    many = dataclasses.replace(config.moe_parallel_config, ep_size=3000)
    found["ranks"] = experts_refusal(ours, moe_config(vllm_config, moe_parallel_config=many), None)
    found["tokens"] = experts_refusal(ours, moe_config(vllm_config, max_num_tokens=2**20), None)
    found["selection"] = methods.refusal(moe_parallel_config=config.moe_parallel_config, in_dtype=torch.float16)
    return found


def parallel_configs():
    """Whether tokens are dealt out over tensor-parallel ranks, by backend and expert parallelism; a wrong name."""

    def made(**changes):
        values = {"data_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True}
        return ParallelConfig(**{**values, **changes})

    return {
        "ours": made(all2all_backend="rose_nvlink").use_sequence_parallel_moe,
        "one": made(all2all_backend="rose_nvlink", tensor_parallel_size=1).use_sequence_parallel_moe,
        "tensor": made(all2all_backend="rose_nvlink", enable_expert_parallel=False).use_sequence_parallel_moe,
        "in": made(all2all_backend="deepep_low_latency").use_sequence_parallel_moe,
        "out": made(all2all_backend="flashinfer_nvlink_two_sided").use_sequence_parallel_moe,
        "wrong": error_of(ValueError, lambda: made(all2all_backend="rose_nvlinks"))[0],
    }


def micro_batches():
    """How many micro-batches a configuration has, by backend; or why it is refused.

    With --ubatch-size, since vLLM takes --enable-dbo back where there is no GPU.
    """
    found = {}
    for name in ("rose_nvlink", "deepep_low_latency", "flashinfer_nvlink_two_sided"):
        parallel = {"data_parallel_size": 2, "enable_expert_parallel": True, "all2all_backend": name}
        try:
            made = VllmConfig(parallel_config=ParallelConfig(**parallel, ubatch_size=2))
            found[name] = all_to_all._micro_batches(made.parallel_config)
        except (AssertionError, ValueError) as error:
            found[name] = str(error)
    return found


def error_of(kind, call, *arguments):
    start = time.monotonic()
    try:
        call(*arguments)
    except kind as error:
        return str(error), time.monotonic() - start
    return "nothing raised", 0.0


def run(vllm_config):
    manager = parallel_state.get_ep_group().device_communicator.all2all_manager
    manager._micro_batches = 2  # vLLM has them on a GPU only
    made = make_layer(vllm_config)
    kernel = made[0].moe_kernel
    result = {
        "manager": type(manager).__name__,
        "prepare": type(kernel.prepare_finalize).__name__,
        "experts": type(kernel.fused_experts).__name__,
        "payload": kernel.prepare_finalize._group.shape.payload.value,
        "shared": make_layer(vllm_config)[0].moe_kernel.prepare_finalize._group is kernel.prepare_finalize._group,
        "most_tokens": kernel.fused_experts.most_tokens,
        "reduced": [kernel.output_is_reduced(), kernel.can_overlap_shared_experts],
    }
    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(torch.device("cpu"), num_ubatches=2)
    counts = ([5, 3], [1, MOST], [4, 4], [2, 7], [MOST, MOST], [0, 6], [6, 0])
    before = call_counts.snapshot()
    result["wrong"] = [far(vllm_config, made, each, seed=seed) for seed, each in enumerate(counts)]
    after = call_counts.snapshot()
    result["calls"] = {op: after[op] for op in ("dp_dispatch", "dp_combine")}
    assert not before.keys() & result["calls"].keys()
    x = torch.zeros(MOST + 1, HIDDEN, dtype=torch.bfloat16)
    many = x, torch.rand(MOST + 1, TOP_K), torch.zeros(MOST + 1, TOP_K, dtype=torch.int64)
    result["many"] = error_of(ValueError, step, vllm_config, *made[:2], [MOST + 1] * 2, *many)[0]
    result["logits"] = error_of(ValueError, parallel_state.get_ep_group().dispatch_router_logits, x, x)[0]
    result["after"] = far(vllm_config, made, [3, 3], seed=9)
    result["overlapping"] = two_micro_batches(vllm_config, made)
    result["beside_shared_experts"] = beside_shared_experts(vllm_config, made)
    result["fault"] = [bool(manager.query_fault()), manager.query_active_mask().tolist(), manager.clean_buffers()]
    result["mask"] = error_of(ValueError, lambda: manager.mask_remote_ranks().__enter__())[0]
    all_to_all.end_startup()
    few = x[:2], torch.rand(2, TOP_K), torch.tensor([[0, 1, LOCAL], [LOCAL, 1, 2]], dtype=torch.int32)
    if RANK == 1:
        result["sends"] = lambda: die_before_combine(vllm_config, made, few)
    else:
        result["late"] = error_of(PeerTimeoutError, step, vllm_config, *made[:2], [2, 2], *few)
        result["late_fault"] = [bool(manager.query_fault()), manager.query_active_mask().tolist()]
        result["late_clean"] = error_of(PeerTimeoutError, manager.clean_buffers)[0]
        result["late_worker"] = error_of(PeerTimeoutError, live_groups.check)[0]
        result["refusals"] = refusals(vllm_config)
        result["parallel"] = parallel_configs()
        result["micro_batches"] = micro_batches()
        manager.destroy()
    return result


def die_before_combine(vllm_config, made, few):
    """Take part in dispatch, and no more."""
    method, layer, _ = made
    kernel = method.moe_kernel
    with (
        set_forward_context(None, vllm_config, num_tokens=2, num_tokens_across_dp=torch.tensor([2, 2])),
        get_forward_context().dp_metadata.sp_local_sizes(1),
    ):
        quant_config = kernel.fused_experts.quant_config
        kernel.prepare_finalize.prepare(*few, EXPERTS, layer.expert_map, False, quant_config, True)
    os.kill(os.getpid(), signal.SIGKILL)


def run_emulated(vllm_config):
    """As on a GPU of a target, but for the exchange."""
    patch, warmed, needed = pytest.MonkeyPatch(), [], []
    patch.setattr(gpu, "target", lambda: WAY)
    patch.setattr(launch, "warm_up", lambda **how: warmed.append(how))
    patch.setattr(self_check, "need", lambda family, shape_of: needed.append(shape_of(1)))
    with emulated(patch, WAY) as seen:
        platform = SimpleNamespace(**{f"is_{p}": lambda: False for p in ("cpu", "rocm", "cuda")})
        patch.setattr(mk, "current_platform", platform)
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        patch.setattr(torch, "empty", partial(new_memory, torch.empty))
        result = run(vllm_config)
    patch.undo()
    result["warmed"] = [warmed[-1]["quantized"], warmed[-1]["max_tokens"]]
    result["needed"] = [needed[-1].num_tokens, needed[-1].quantized]
    result["launches"] = sorted(set(seen.names()))
    return result


def main():
    faulthandler.dump_traceback_later(100, exit=True)
    with tempfile.TemporaryDirectory() as directory:
        directory = os.environ.get("PROBE_DIRECTORY", directory)
        os.environ["VLLM_DIST_IDENT"] = Path(directory).name
        if RANK == 0:
            environment = {**os.environ, "PROBE_DIRECTORY": directory, "PROBE_RANK": "1"}
            other = subprocess.Popen([sys.executable, *sys.argv], env=environment, stdout=subprocess.DEVNULL)
        vllm_config = config()
        with set_current_vllm_config(vllm_config):
            parallel_state.init_distributed_environment(1, 0, "env://", 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)
            result = run(vllm_config) if WAY == "reference" else run_emulated(vllm_config)
            path = Path(directory, "other.json")
            if RANK == 1:
                die = result.pop("sends")
                path.write_text(json.dumps(result))
                die()
            assert other.wait(timeout=120) == -signal.SIGKILL
            result["other"] = json.loads(path.read_text())
        result["cuda_starts"] = len(methods.CUDA_STARTS)
    json.dump(result, sys.stdout, default=str)


if __name__ == "__main__":
    main()
