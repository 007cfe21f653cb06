"""Every place where the plugin touches vLLM. ``rose doctor`` prints this table; ``docs/seams.md`` is made from it."""

from vllm_rose_plugin.seams import (
    all_reduce_norm,
    all_to_all,
    backend_names,
    communicator,
    config_check,
    cpu_sampling,
    draft_metrics,
    expert_balance,
    expert_parts,
    linear,
    model_load,
    mtp,
    mxfp8_moe,
    qk_norm,
    unquantized_moe,
    worker_stats,
)
from vllm_rose_plugin.seams.seam import Seam

SEAMS: tuple[Seam, ...] = (
    *backend_names.SEAMS,
    *config_check.SEAMS,
    *model_load.SEAMS,
    *mxfp8_moe.SEAMS,
    *expert_balance.SEAMS,
    *expert_parts.SEAMS,
    *unquantized_moe.SEAMS,
    *linear.SEAMS,
    *qk_norm.SEAMS,
    *mtp.SEAMS,
    *cpu_sampling.SEAMS,
    *draft_metrics.SEAMS,
    *communicator.SEAMS,
    *all_reduce_norm.SEAMS,
    *all_to_all.SEAMS,
    *worker_stats.SEAMS,
)


def seams(vllm_minor: str | None = None) -> tuple[Seam, ...]:
    """All seams, or those that exist in one vLLM version such as ``"0.32"``."""
    return tuple(seam for seam in SEAMS if vllm_minor is None or vllm_minor in seam.versions)
