"""What vLLM's registries hold with the plugin loaded as vLLM loads it (entry points); prints JSON."""

import importlib
import json
import sys
from typing import get_args

import torch
import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def choices(parser, flag):
    return next(list(action.choices) for action in parser._actions if flag in action.option_strings)


def depth(function):
    """How many of the plugin's wrappers lie around a function."""
    count = 0
    while function is not None:
        count += "__rose_wrapped__" in vars(function)
        function = getattr(function, "__wrapped__", None)
    return count


CUDA_STARTS = []
torch.cuda._lazy_init = lambda: CUDA_STARTS.append(1)  # what every use of a CUDA context goes through


def main():
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())  # loads general plugins, as the server does
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 0):  # more calls must change nothing
        import vllm_rose_plugin

        vllm_rose_plugin.register()

    import vllm.config.kernel as kernel
    from vllm.config import KernelConfig, SpeculativeConfig
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.oracle import mxfp8
    from vllm.utils import cpu_triton_utils
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.worker_base import WorkerBase

    states = {}
    if "vllm_rose_plugin.seams.install" in sys.modules:
        from vllm_rose_plugin.seams.install import state
        from vllm_rose_plugin.seams.seam import vllm_minor
        from vllm_rose_plugin.seams.table import seams

        for seam in seams(vllm_minor(vllm.__version__)):
            importlib.import_module(seam.module)
        states = {seam.name: state(seam) for seam in seams(vllm_minor(vllm.__version__))}

    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    result = {
        "version": vllm.__version__,
        "states": states,
        "cli_moe": choices(parser, "--moe-backend"),
        "cli_linear": choices(parser, "--linear-backend"),
        "literal_moe": get_args(kernel.MoEBackend),
        "literal_linear": get_args(kernel.LinearBackend),
        "moe_names": {name: backend.name for name, backend in mxfp8._BACKEND_NAME_MAP.items()},
        "supported_order": [backend.name for backend in mxfp8._SUPPORTED_BACKENDS],
        "linear_kernels": {
            platform.name: [cls.__name__ for cls in kernels]
            for platform, kernels in linear._POSSIBLE_MXFP8_KERNELS.items()
        },
        "linear_backends": {
            name: sorted(cls.__name__ for cls in kernels) for name, kernels in linear._LINEAR_BACKEND_KERNEL_MAP.items()
        },
        "wrappers": {
            "_select_kernel_cls": depth(mxfp8._select_kernel_cls),
            "_filter_kernels_by_backend": depth(linear._filter_kernels_by_backend),
            "set_platform_defaults": depth(KernelConfig.set_platform_defaults),
            "hf_config_override": depth(SpeculativeConfig.hf_config_override),
            "speculative_post_init": depth(SpeculativeConfig.__post_init__),
            "communicator": depth(CudaCommunicator.__init__),
            "execute_model": depth(Worker.execute_model),
            "sample_tokens": depth(Worker.sample_tokens),
            "execute_dummy_batch": depth(Worker.execute_dummy_batch),
            "expand": depth(cpu_triton_utils._expand_kernel_impl),
            "unquantized": depth(unquantized_fused_moe_method.UnquantizedFusedMoEMethod.__init__),
        },
        "models": {
            architecture: f"{model.module_name}:{model.class_name}"
            for architecture, model in importlib.import_module(
                "vllm.model_executor.models.registry"
            ).ModelRegistry.models.items()
        },
        "worker_stats": hasattr(WorkerBase, "rose_stats"),
        "rose_accepted": error_of(lambda: KernelConfig(moe_backend="rose-cutedsl", linear_backend="rose_cutedsl")),
        "per_quant_accepted": error_of(lambda: KernelConfig(linear_backend_per_quant={"mxfp8": "rose_cutedsl"})),
        "speculative_accepted": error_of(lambda: SpeculativeConfig(moe_backend="rose_cutedsl", **ngram)),
        "unknown_moe": error_of(lambda: KernelConfig(moe_backend="no_such_backend")),
        "unknown_linear": error_of(lambda: KernelConfig(linear_backend="no_such_backend")),
        "unknown_speculative": error_of(lambda: SpeculativeConfig(moe_backend="no_such_backend", **ngram)),
        "cuda_starts": len(CUDA_STARTS),
    }
    torch.cuda.init()
    result["cuda_starts_are_seen"] = len(CUDA_STARTS) - result["cuda_starts"]
    json.dump(result, sys.stdout)


main()
