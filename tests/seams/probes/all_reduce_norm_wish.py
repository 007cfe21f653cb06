"""Whole configurations of vLLM, checked as on NVIDIA GPUs: what workers ask for, and whether graphs get our pass.

Argument: a model's directory. From standard input: a list of (arguments of the engine, environment).
"""

import json
import os
import sys
from types import SimpleNamespace

import vllm.platforms
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from vllm_rose_plugin.layers import all_reduce_check
from vllm_rose_plugin.layers.all_reduce_norm import PASS_KEY
from vllm_rose_plugin.layers.communicator import wish_of

# A CPU's would set a mode of compilation of its own.
type(current_platform).apply_config_platform_defaults = classmethod(lambda cls, vllm_config: None)
type(current_platform).check_and_update_config = classmethod(lambda cls, vllm_config: None)
check_config = all_reduce_check.check_config


def check_as_on_gpus(vllm_config):
    vllm.platforms._current_platform = SimpleNamespace(is_cuda=lambda: True)
    check_config(vllm_config)
    vllm.platforms._current_platform = current_platform


all_reduce_check.check_config = check_as_on_gpus


def result_of(arguments, environ):
    for name in ("VLLM_BATCH_INVARIANT", "VLLM_USE_BREAKABLE_CUDAGRAPH"):
        os.environ.pop(name, None)
    os.environ.update(environ)
    made = EngineArgs(
        model=sys.argv[1],
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        max_num_batched_tokens=64,
        max_model_len=64,
        additional_config={"rose": {"all_reduce": "auto", "all_reduce_norm": "auto"}},
        **arguments,
    ).create_engine_config(UsageContext.ENGINE_CONTEXT)
    return {"asked": wish_of(made).norm, "pass": PASS_KEY in made.compilation_config.inductor_compile_config}


json.dump({"found": [result_of(*case) for case in json.load(sys.stdin)]}, sys.stdout)
