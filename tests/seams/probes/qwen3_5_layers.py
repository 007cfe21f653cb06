"""Sizes that vLLM's own layers of Qwen3.5 ask our kernels for, on the meta device.

What ``Qwen3_5DecoderLayer`` is made of is made here one by one: its module can't be imported without torchvision.

Arguments: a config.json; ranks of a tensor-parallel group, whose other members are pretended.
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import methods
import pytest
import torch
from vllm.config import CacheConfig, KernelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config
from vllm.model_executor.models import qwen3_next
from vllm.model_executor.models.qwen3_next import Qwen3NextAttention, Qwen3NextSparseMoeBlock

from vllm_rose_plugin.layers.experts import RoseCuteDslExperts
from vllm_rose_plugin.layers.linear import RoseCuteDslMxfp8LinearKernel

IGNORED = ["*in_proj_ba", "*shared_expert_gate", "*mlp.gate", "lm_head"]
"""As ``rose quantize`` writes it; tests/checkpoint compares that with what vLLM reads."""


@contextlib.contextmanager
def ranks_of(count):
    """vLLM's modules see a group of ``count``, of which this is the first."""
    with pytest.MonkeyPatch.context() as patch:
        for module in list(sys.modules.values()):
            if "get_tensor_model_parallel_world_size" in vars(module):
                patch.setattr(module, "get_tensor_model_parallel_world_size", lambda: count)
        patch.setattr(qwen3_next, "Attention", lambda *args, **kwargs: torch.nn.Identity())  # it has no weights
        yield


def layers_of(config, vllm_config, ranks):
    """Linear attention, softmax attention, a block of experts with the shared one."""
    seen = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=config, multimodal_config=None, dtype=torch.bfloat16, enable_sleep_mode=False
        ),
        cache_config=CacheConfig(),
        parallel_config=vllm_config.parallel_config,
        quant_config=ModelOptMxFp8Config.from_config({"quant_method": "mxfp8", "ignored_layers": IGNORED}),
        speculative_config=None,
        scheduler_config=vllm_config.scheduler_config,
        kernel_config=vllm_config.kernel_config,
        additional_config={},
    )
    vllm_config.model_config = seen.model_config
    with ranks_of(ranks), torch.device("meta"):
        yield QwenGatedDeltaNetAttention(
            config=config, vllm_config=seen, prefix="model.layers.0.linear_attn", gqa_interleaved_layout=False
        )
        quant = {"cache_config": seen.cache_config, "quant_config": seen.quant_config}
        yield Qwen3NextAttention(config, prefix="model.layers.3.self_attn", **quant)
        yield Qwen3NextSparseMoeBlock(seen, prefix="model.layers.3.mlp")


def main():
    text = json.loads(Path(sys.argv[1]).read_text())["text_config"]
    ranks = int(sys.argv[2])
    torch.set_default_dtype(torch.bfloat16)
    config = SimpleNamespace(**text)
    kernel_config = KernelConfig(moe_backend="rose_cutedsl", linear_backend="rose_cutedsl")
    vllm_config = VllmConfig(kernel_config=kernel_config, parallel_config=ParallelConfig())
    result = {"linears": {}, "experts": []}
    with set_current_vllm_config(vllm_config), tempfile.TemporaryDirectory() as directory:
        init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        for layer in layers_of(config, vllm_config, ranks):
            for name, module in layer.named_modules(prefix=type(layer).__name__):
                kernel = getattr(getattr(module, "quant_method", None), "kernel", None)
                if isinstance(module, LinearBase) and isinstance(kernel, RoseCuteDslMxfp8LinearKernel):
                    shape = [*kernel.config.weight_shape, getattr(module, "bias", None) is not None]
                    result["linears"][name] = shape
                if getattr(getattr(module, "quant_method", None), "experts_cls", None) is RoseCuteDslExperts:
                    moe = module.quant_method.moe
                    result["experts"].append(
                        [
                            moe.hidden_dim,
                            moe.intermediate_size_per_partition,
                            moe.num_local_experts,
                            moe.experts_per_token,
                        ]
                    )
    result["cuda_starts"] = len(methods.CUDA_STARTS)
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
