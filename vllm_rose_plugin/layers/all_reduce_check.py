"""Look at the setting ``all_reduce`` before any process is started: refuse what can't be, clear vLLM's way to ours."""

from typing import Any

from vllm_rose_plugin.config import AllReduceChoice, RoseConfig


def named(choice: str) -> str:
    """The setting, as a user writes it."""
    return f'--additional-config {{"rose": {{"all_reduce": "{choice}"}}}}'


def check_config(vllm_config: Any) -> None:
    """Refuse the setting where it can't be met, and switch off the fusion that would go past it.

    Args:
        vllm_config: before vLLM fills in the defaults of its optimization level; only called if the setting is given.

    Raises:
        ValueError: names the setting and what stands against it.
    """
    import vllm.envs as envs
    from vllm.platforms import current_platform

    from vllm_rose_plugin.layers.log import logger

    choice = RoseConfig.load(vllm_config.additional_config).all_reduce
    elsewhere = (
        "" if current_platform.is_cuda() else f"it needs NVIDIA GPUs, and this is {current_platform.device_name}"
    )
    if elsewhere and choice != AllReduceChoice.AUTO:
        raise ValueError(f"{named(choice)} can't be served: {elsewhere}.")
    if choice == AllReduceChoice.NVLS and envs.VLLM_BATCH_INVARIANT:
        raise ValueError(
            f"{named(choice)} can't be combined with VLLM_BATCH_INVARIANT: an NVSwitch adds in an order of its own. "
            f"{named(AllReduceChoice.P2P)} always adds in the order of ranks."
        )
    alone = "there is one rank" if vllm_config.parallel_config.tensor_parallel_size == 1 else ""
    if elsewhere or alone:
        logger.warning_once("%s has nothing to do: %s.", named(choice), elsewhere or alone)
        return
    passes = vllm_config.compilation_config.pass_config
    if passes.fuse_allreduce_rms is None:
        passes.fuse_allreduce_rms = False  # it would replace the all-reduce of small batches by FlashInfer's
    elif passes.fuse_allreduce_rms:
        logger.warning_once(
            "fuse_allreduce_rms is on: for the batches that it takes, FlashInfer's all-reduce replaces the one that %s "
            "names.",
            named(choice),
        )
