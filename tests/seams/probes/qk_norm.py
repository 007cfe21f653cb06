"""Build Qwen3 models through vLLM's registry, as configured by JSON on stdin ({case: EngineArgs keywords}).

For each case: what the registry resolves, which attention the model has, and, where it is ours, what it hands to the
attention kernel on random input against what vLLM's own norms and rotary embedding hand to it. No weights are read.
"""

import json
import sys
import tempfile
from dataclasses import asdict

import torch
import vllm
from vllm.engine.arg_utils import EngineArgs

CUDA_STARTS = []
torch.cuda._lazy_init = lambda: CUDA_STARTS.append(1)  # what every use of a CUDA context goes through

from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402
from vllm.usage.usage_lib import UsageContext  # noqa: E402
from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: E402

TOKENS = 7


class Linear(torch.nn.Module):
    """Stands in for a linear layer, which has no weights here: always gives the same result, or its input."""

    def __init__(self, result=None):
        super().__init__()
        self.result = result

    def forward(self, x):
        return x if self.result is None else self.result, None


class Kernel(torch.nn.Module):
    """Stands in for the attention kernel: keeps what it is given."""

    def forward(self, q, k, v):
        self.given = q, k, v
        return q


def run(attention, positions, qkv):
    """(q, k, v) that the attention kernel gets."""
    attention.qkv_proj, attention.o_proj, attention.attn = Linear(qkv.clone()), Linear(), Kernel()
    out = attention(positions, torch.empty(TOKENS, attention.hidden_size))
    assert out is attention.attn.given[0]  # what the kernel returned
    return attention.attn.given


def error_in_steps(a, b, head_dim):
    """The largest difference, in steps of bfloat16 at the size of the head's largest element."""
    a, b = (x.float().unflatten(-1, (-1, head_dim)) for x in (a, b))
    return ((a - b).abs() / (b.abs().amax(-1, keepdim=True) * 2**-7)).max().item()


def compute(attention):
    """Ours against vLLM's, whose rotary embedding runs in plain torch: 0.33's sources have no compiled one for CPUs."""
    generator = torch.Generator().manual_seed(5)
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.data.copy_(torch.randn(norm.weight.shape, generator=generator))
    positions = torch.randint(300, (TOKENS,), generator=generator)
    sizes = [attention.q_size, attention.kv_size, attention.kv_size]
    qkv = (3 * torch.randn(TOKENS, sum(sizes), generator=generator)).to(attention.q_norm.weight.dtype)
    attention.rotary_emb._forward_method = attention.rotary_emb.forward_native
    ours = run(attention, positions, qkv)
    attention.__class__ = type(attention).__mro__[2]
    assert attention.__class__.__module__.startswith("vllm.model_executor.models."), attention.__class__
    stock = run(attention, positions, qkv)
    q, k, _ = qkv.split(sizes, -1)
    dim = attention.head_dim
    return {
        "fuses_rope": attention.fuses_rope,
        "steps": [error_in_steps(a, b, dim) for a, b in zip(ours[:2], stock[:2], strict=True)],
        "steps_of_input": [error_in_steps(a, b, dim) for a, b in zip((q, k), stock[:2], strict=True)],
        "same_v": torch.equal(ours[2], stock[2]),
        "shapes": [list(x.shape) for x in ours],
    }


def build(keywords):
    config = EngineArgs(skip_tokenizer_init=True, enforce_eager=True, **keywords).create_engine_config(
        UsageContext.ENGINE_CONTEXT
    )
    model_config = config.model_config
    cls, architecture = model_config.registry.resolve_model_cls(model_config.architectures, model_config)
    result = {
        "class": f"{cls.__module__}.{cls.__name__}",
        "architecture": architecture,
        "model_info": asdict(model_config._model_info),
        "additional_config": config.additional_config,
    }
    if keywords.get("model_impl") == "transformers":
        return result
    from vllm_rose_plugin.layers import report

    before = report.live_layers()["qk_norm"]
    with set_current_vllm_config(config), set_default_torch_dtype(model_config.dtype), torch.inference_mode():
        model = initialize_model(config)
        found = [module for name, module in model.named_modules() if name.endswith("self_attn")]
        result["model"] = [base.__name__ for base in type(model).__mro__][:2]
        result["attention"] = sorted({type(attention).__name__ for attention in found})
        result["layers"] = len(found)
        result["reported"] = report.live_layers()["qk_norm"] - before
        result["parameters"] = sorted(name for name, _ in model.named_parameters())
        if hasattr(found[0], "fuses_rope"):
            result["computed"] = compute(found[0])
    return result


def main():
    results = {"version": vllm.__version__, "cases": {}}
    with tempfile.TemporaryDirectory() as directory, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        for case, keywords in json.load(sys.stdin).items():
            results["cases"][case] = build(keywords)
    results["cuda_starts"] = len(CUDA_STARTS)
    json.dump(results, sys.stdout)


main()
