"""Look at the setting ``all_reduce`` before any process is started: refuse what can't be, clear vLLM's way to ours."""

from typing import Any

from vllm_rose_plugin.config import AllReduceChoice, AllReduceNorm, RoseConfig


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

    settings = RoseConfig.load(vllm_config.additional_config)
    choice = AllReduceChoice(settings.all_reduce)
    elsewhere = (
        "" if current_platform.is_cuda() else f"it needs NVIDIA GPUs, and this is {current_platform.device_name}"
    )
    if elsewhere and choice != AllReduceChoice.AUTO:
        raise ValueError(f"{choice.setting} can't be served: {elsewhere}.")
    if choice == AllReduceChoice.NVLS and envs.VLLM_BATCH_INVARIANT:
        raise ValueError(
            f"{choice.setting} can't be combined with VLLM_BATCH_INVARIANT: an NVSwitch adds in an order of its own. "
            f"{AllReduceChoice.P2P.setting} always adds in the order of ranks."
        )
    alone = "there is one rank" if vllm_config.parallel_config.tensor_parallel_size == 1 else ""
    if elsewhere or alone:
        logger.warning_once("%s has nothing to do: %s.", choice.setting, elsewhere or alone)
        return
    passes = vllm_config.compilation_config.pass_config
    if passes.fuse_allreduce_rms is None:
        passes.fuse_allreduce_rms = False  # it would replace the all-reduce of small batches by FlashInfer's
    elif passes.fuse_allreduce_rms:
        logger.warning_once(
            "fuse_allreduce_rms is on: for the batches that it takes, FlashInfer's all-reduce replaces the one that %s "
            "names.",
            choice.setting,
        )
    if settings.all_reduce_norm != AllReduceNorm.OFF:
        _add_norm_pass(vllm_config)


def norm_obstacle(vllm_config: Any) -> str:
    """Why no graph of this configuration can have residual and norm in our launch; empty: graphs can.

    Args:
        vllm_config: with its compilation mode resolved, which it is before :func:`check_config`.
    """
    import vllm.envs as envs
    from vllm.config import CompilationMode

    if envs.VLLM_BATCH_INVARIANT:
        return (
            "VLLM_BATCH_INVARIANT wants a token's bits to be the same in any batch, and which kernel adds a row's "
            "squares, and in which order, would depend on the number of tokens"
        )
    if vllm_config.model_config is not None and vllm_config.model_config.enforce_eager:
        return "--enforce-eager compiles no graph"
    mode, backend = vllm_config.compilation_config.mode, vllm_config.compilation_config.backend
    if mode != CompilationMode.VLLM_COMPILE or backend != "inductor":
        return (
            f"compilation mode {CompilationMode(mode).name} with backend {backend!r} runs no pass of vLLM's; it takes "
            "VLLM_COMPILE with 'inductor' (--compilation-config, or an optimization level above -O0)"
        )
    return ""


def _add_norm_pass(vllm_config: Any) -> None:
    """Put our pass where vLLM's compiler looks for one; once, however often a configuration is checked.

    Raises:
        ValueError: another pass is there.
    """
    from vllm_rose_plugin.layers.all_reduce_norm import PASS_KEY, AllReduceNormPass
    from vllm_rose_plugin.layers.log import logger

    setting = f'--additional-config {{"rose": {{"all_reduce_norm": "{AllReduceNorm.AUTO}"}}}}'
    obstacle = norm_obstacle(vllm_config)
    if obstacle:
        logger.warning_once("%s has nothing to do: %s.", setting, obstacle)
        return
    passes = vllm_config.compilation_config.inductor_compile_config
    present = passes.setdefault(PASS_KEY, AllReduceNormPass())
    if not isinstance(present, AllReduceNormPass):
        raise ValueError(
            f"{setting} can't be combined with another {PASS_KEY} ({present!r}), of which vLLM takes one: leave it out "
            f"of --compilation-config, or set all_reduce_norm to {AllReduceNorm.OFF}."
        )
