"""Resolve and build MTP drafts as configured by JSON on stdin ({case: EngineArgs keywords and "build"}); prints JSON.

For each case: what the draft is resolved as, or the error; for those to build, the draft model as vLLM's loader makes
it, with the weights of its checkpoint.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import vllm
from safetensors import safe_open
from vllm.engine.arg_utils import EngineArgs

CUDA_STARTS = []
torch.cuda._lazy_init = lambda: CUDA_STARTS.append(1)  # what every use of a CUDA context goes through

from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402
from vllm.usage.usage_lib import UsageContext  # noqa: E402
from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: E402


def tensors_of(directory):
    for file in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(file, "pt") as data:
            for name in data.keys():  # noqa: SIM118  no dict
                yield name, data.get_tensor(name)


def build(config):
    """The draft as a speculator loads it, up to the processing of weights."""
    from vllm_rose_plugin.layers import report

    draft_config = config.speculative_config.draft_model_config
    config = config.speculative_config.apply_draft_overrides(config)
    norms = report.live_layers()["qk_norm"]
    with set_current_vllm_config(config), set_default_torch_dtype(draft_config.dtype):
        model = initialize_model(config, model_config=draft_config)
        # Attention's KV scales, of dimension 0, are not in these checkpoints.
        parameters = {name: value for name, value in model.named_parameters() if value.dim()}
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.view(torch.uint8).fill_(0x5A)
        model.load_weights(tensors_of(draft_config.model))
    layer = model.model.layers[0]
    method = layer.mlp.experts.routed_experts.quant_method
    raw = dict(tensors_of(draft_config.model))
    qkv = torch.cat([raw[f"mtp.layers.0.self_attn.{name}_proj.weight"] for name in "qkv"])
    down = raw["mtp.layers.0.mlp.experts.3.down_proj.weight"]
    w2 = next(value for name, value in parameters.items() if name.endswith("w2_weight"))
    fresh = [n for n, value in parameters.items() if bool((value.detach().view(torch.uint8) == 0x5A).all())]
    attention = config.compilation_config.static_forward_context
    return {
        "class": f"{type(model).__module__}.{type(model).__name__}",
        "parameters": sorted(parameters),
        "untouched": fresh,
        "same": [torch.equal(raw["mtp.fc.weight"], model.model.fc.weight), same(qkv, layer.self_attn.qkv_proj.weight)],
        "same_expert": same(down, w2[3]),
        "experts": type(method).__name__,
        "experts_class": getattr(getattr(method, "experts_cls", None), "__name__", None),
        "linear": type(layer.self_attn.qkv_proj.quant_method).__name__,
        "fc": type(model.model.fc.quant_method).__name__,
        "attention": type(layer.self_attn).__name__,
        "norms": report.live_layers()["qk_norm"] - norms,
        "kv_cache_layers": sorted(name for name in attention if name.endswith(".attn")),
        "moe_layers": model.num_moe_layers,
        "target_quantization": config.quant_config and config.quant_config.get_name(),
        "own_model": [hasattr(model, "lm_head"), hasattr(model.model, "embed_tokens")],
    }


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.detach().view(torch.uint8))


def resolve(keywords, wanted):
    config = EngineArgs(skip_tokenizer_init=True, enforce_eager=True, **keywords).create_engine_config(
        UsageContext.ENGINE_CONTEXT
    )
    speculative = config.speculative_config
    draft = speculative.draft_model_config
    result = {
        "method": speculative.method,
        "tokens": speculative.num_speculative_tokens,
        "architectures": draft.architectures,
        "layers": draft.get_total_num_hidden_layers(),
        "quantization": draft.quantization,
        "target_architectures": config.model_config.architectures,
        "target_layers": config.model_config.get_total_num_hidden_layers(),
        "additional_config": dict(config.additional_config),
        "hash": config.compute_hash(),
    }
    return result | (build(config) if wanted else {})


def expand(values, dtype):
    """What vLLM spreads over the draft tokens of three requests with 1, 3 and 0 of them, zero being replaced by one."""
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    output = torch.full((4,), -1, dtype=dtype)
    ends = torch.tensor([1, 4, 4], dtype=torch.int32)
    _expand_kernel_impl(output, torch.tensor(values, dtype=dtype), ends, 0, 1, MAX_NUM_TOKENS=32)
    return [round(value, 4) for value in output.tolist()]


def main():
    results = {"version": vllm.__version__, "cases": {}}
    with tempfile.TemporaryDirectory() as directory, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        for case, keywords in json.load(sys.stdin).items():
            wanted = keywords.pop("build", False)
            try:
                results["cases"][case] = resolve(keywords, wanted)
            except Exception as error:
                if wanted:
                    raise
                results["cases"][case] = {"error": f"{type(error).__name__}: {error}"}
    results["expanded"] = [expand([0.7, 0.0, 1.5], torch.float32), expand([5, 0, 7], torch.int32)]
    results["cuda_starts"] = len(CUDA_STARTS)
    json.dump(results, sys.stdout)


main()
