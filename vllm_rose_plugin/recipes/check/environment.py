"""Are the environment variables of a recipe ones that something reads."""

import difflib
from collections.abc import Iterator

from vllm_rose_plugin.config import RoseConfig
from vllm_rose_plugin.recipes.deployment import Process
from vllm_rose_plugin.recipes.finding import Finding, Keys
from vllm_rose_plugin.recipes.schema import Recipe

ROSE = (
    *(f"ROSE_{key.upper()}" for key in RoseConfig.model_fields),
    "ROSE_CACHE_DIR",
    "ROSE_PROVIDER_MOE_BATCHED",
    "ROSE_PROVIDER_MOE_DISPATCH_LAUNCHES",
    "ROSE_PROVIDER_MOE_EXPERTS",
    "ROSE_PROVIDER_MXFP8_LINEAR",
    "ROSE_PROVIDER_MXFP8_QUANTIZE",
    "ROSE_PROVIDER_QK_NORM",
    "ROSE_PROVIDER_SWIGLU_QUANTIZE",
    "VLLM_ROSE_DISABLE",
)
"""Ours; the providers are those of the kernel families, spelled out since importing these takes torch."""
UCX = (
    "UCX_TLS",
    "UCX_NET_DEVICES",
    "UCX_CUDA_IPC_ENABLE_MNNVL",
    "UCX_LOG_LEVEL",
    "UCX_PROTO_INFO",
    "UCX_RNDV_SCHEME",
    "UCX_RNDV_THRESH",
    "UCX_MEMTYPE_CACHE",
    "UCX_IB_GID_INDEX",
    "UCX_IB_ROCE_REACHABILITY_MODE",
    "UCX_RCACHE_MAX_UNRELEASED",
    "NIXL_LOG_LEVEL",
    "NIXL_PLUGIN_DIR",
)
"""Of UCX (`ucx_info -cf`) and NIXL; those that a KV transfer has a use for."""
NCCL = (
    "NCCL_CUMEM_ENABLE",
    "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_IB_DISABLE",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_HCA",
    "NCCL_MNNVL_ENABLE",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
)
"""Of NCCL ("Environment Variables" of its user guide) and of torch's gloo."""
SYSTEM = (
    "CUDA_DEVICE_ORDER",
    "CUDA_MODULE_LOADING",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "HF_TOKEN",
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TOKENIZERS_PARALLELISM",
    "TRITON_CACHE_DIR",
)
"""Of CUDA, torch and Hugging Face."""
KNOWN = frozenset((*ROSE, *UCX, *NCCL, *SYSTEM))


def check_environment(
    recipe: Recipe, process: Process, *, vllm_version: str, vllm_variables: frozenset[str], wrong: dict[str, str]
) -> Iterator[Finding]:
    """Unknown names, and values that vLLM refuses (``wrong``, name to its message)."""
    for name, value in process.environment.items():
        keys = place_of(recipe, process, name)
        if name not in vllm_variables and name not in KNOWN:
            known = vllm_variables | KNOWN
            near = difflib.get_close_matches(name, known, n=3)
            problem = f"no variable of this name is read by vLLM {vllm_version}, this plugin, UCX, NIXL, NCCL or CUDA"
            cure = f"write {' or '.join(near)}" if near else "remove it"
            yield recipe.finding(keys, value, problem, "a name from their lists (docs/recipes.md)", cure)
        elif name in wrong:
            problem = f"is refused by vLLM {vllm_version}"
            yield recipe.finding(keys, value, problem, wrong[name], "give a value that it takes")


def place_of(recipe: Recipe, process: Process, name: str) -> Keys:
    """Where a variable of a process stands in its recipe."""
    if name in recipe.roles[process.role].environment:  # type: ignore[index]
        return ("roles", process.role, "environment", name)
    if recipe.kv_transfer is not None and name in recipe.kv_transfer.environment:
        return ("kv_transfer", "environment", name)
    return ("kv_transfer",)
