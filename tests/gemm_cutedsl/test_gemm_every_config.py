"""Every kernel that the heuristic takes for Qwen3-235B's layers, compiled for every target and its machine code read.

Kernels that differ only in sizes (N, K, number of groups) are compiled once here; ``make test-thorough`` compiles all.
"""

from collections.abc import Iterator
from dataclasses import asdict
from functools import cache

import pytest
import test_sm90_machine_code as sm90
import test_sm100_machine_code as sm100

from vllm_rose_plugin.kernels.contracts import Activation, Rounding
from vllm_rose_plugin.kernels.gemm.config import Epilogue, GemmConfig
from vllm_rose_plugin.kernels.gemm.config_sm100 import Sm100Config
from vllm_rose_plugin.kernels.gemm.plan import warm_configs, warm_expert_configs
from vllm_rose_plugin.kernels.jit.targets import LIMITS

LINEAR = {"qkv": (9216, 4096), "o_proj": (4096, 8192), "qkv of TP4": (2304, 4096), "o_proj of TP4": (4096, 2048)}
"""(N, K)."""
EXPERTS = (8, 16, 32, 128)
MOST_TOKENS = 8192
SIZES = {"num_groups", "n", "k"}

Config = GemmConfig | Sm100Config


def configs_of(target: str) -> Iterator[Config]:
    """For 1 to 8192 tokens of each layer."""
    how = {"target": target, "sm_count": LIMITS[target].sm_count, "activation": Activation.MXFP8}
    for n, k in LINEAR.values():
        yield from warm_configs(**how, num_groups=1, n=n, k=k, max_rows=MOST_TOKENS, early_counts=True)
    for experts in EXPERTS:
        yield from warm_expert_configs(
            **how,
            num_groups=experts,
            hidden_size=4096,
            intermediate_size=1536,
            max_rows=8 * MOST_TOKENS,
            out_dtype="bfloat16",
            rounding=Rounding.RCEIL,
        )


def kind_of(config: Config) -> str:
    """What of a config is no size."""
    return str({name: value for name, value in asdict(config).items() if name not in SIZES})


@cache
def by_kind(target: str) -> dict[str, list[Config]]:
    """Configs of the same kind; the first stands for it."""
    found: dict[str, list[Config]] = {}
    for config in dict.fromkeys(configs_of(target)):
        found.setdefault(kind_of(config), []).append(config)
    return found


def part_of(config: Config) -> str:
    """In which test a config is: names of what can be told apart at a glance."""
    if config.epilogue is Epilogue.SWIGLU:
        return "w13"
    return "linear" if config.num_groups == 1 else "w2"


PARTS = ("w13", "w2", "linear")


def check(config: Config, target: str) -> None:
    if isinstance(config, GemmConfig):
        sm90.check(config)
    else:
        sm100.check(config, target)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("which", ["one of a kind", "the others"])
@pytest.mark.parametrize("target", LIMITS)
def test_every_config(target, which, part):
    kinds = by_kind(target)
    assert sum(map(len, kinds.values())) > 2 * len(kinds), "others are left"
    found = [alike[:1] if which == "one of a kind" else alike[1:] for alike in kinds.values()]
    chosen = [config for configs in found for config in configs if part_of(config) == part]
    assert chosen or which == "the others"
    for config in chosen:
        check(config, target)
