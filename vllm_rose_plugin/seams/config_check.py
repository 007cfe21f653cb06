"""Look at the resolved configuration once, when a rose backend is named: refuse what can't be served, record settings.

Replaces: nothing; runs after ``KernelConfig.set_platform_defaults``, which vLLM calls while it checks a configuration.
Why: an unknown layer type makes vLLM fall back to another linear kernel, and settings that are not in
``additional_config`` are missing from the hash of vLLM's compile cache.
Delete when: vLLM lets a plugin validate a configuration (no issue known).
"""

from collections.abc import Callable
from typing import Any

import vllm_rose_plugin
from vllm_rose_plugin.config import ALL2ALL, BACKEND, SUPPORTED, QkNorm, RoseConfig
from vllm_rose_plugin.layers import all_reduce_check
from vllm_rose_plugin.layers.schemes import mxfp8_share
from vllm_rose_plugin.seams.seam import Seam
from vllm_rose_plugin.seams.targets import wrap


def named_flags(kernel_config: Any) -> list[str]:
    """The flags of this configuration that name a rose backend."""
    flags = []
    if kernel_config.moe_backend == BACKEND:
        flags.append(f"--moe-backend {BACKEND}")
    if kernel_config.linear_backend == BACKEND:
        flags.append(f"--linear-backend {BACKEND}")
    overrides = kernel_config.linear_backend_per_quant or {}
    per_quant = [scheme for scheme, name in overrides.items() if name == BACKEND]
    return flags + [f'linear_backend_per_quant["{scheme}"]={BACKEND}' for scheme in per_quant]


def _wrap_defaults(original: Callable[..., None]) -> Callable[..., None]:
    def set_platform_defaults(self: Any, vllm_config: Any) -> None:
        original(self, vllm_config)
        flags = named_flags(self)
        draft = getattr(vllm_config.speculative_config, "moe_backend", None) == BACKEND
        # A draft model has a configuration of its own; what it can't use is settled layer by layer.
        is_draft_config = getattr(vllm_config.model_config, "runner_type", None) == "draft"
        if vllm_config.model_config is not None and not is_draft_config:
            if flags:
                _check_target(" and ".join(flags), vllm_config)
            if draft:
                _check_draft(vllm_config)
        qk_norm = RoseConfig.asks_for("qk_norm", vllm_config.additional_config)
        all_reduce = RoseConfig.asks_for("all_reduce", vllm_config.additional_config)
        drafts_mxfp8 = _check_mtp(vllm_config)
        if all_reduce:
            all_reduce_check.check_config(vllm_config)
        all_to_all = _check_all_to_all(vllm_config)
        if flags or draft or qk_norm:
            _record_settings(vllm_config)
        elif drafts_mxfp8 or all_reduce or all_to_all:  # which are no reason to touch the target's attention
            _record_settings(vllm_config, qk_norm=QkNorm.OFF)
        else:
            _check_unused_settings(vllm_config.additional_config)

    return set_platform_defaults


def _check_target(named: str, vllm_config: Any) -> None:
    model_config = vllm_config.model_config
    problem = _problem(vllm_config.quant_config, model_config)
    if problem:
        raise ValueError(f"{named} can't serve {model_config.model} ({problem}): {SUPPORTED}.")
    if vllm_config.lora_config is not None:
        raise ValueError(f"--enable-lora can't be combined with {named}: {SUPPORTED}.")
    _check_linear_on_cpu(named, vllm_config)
    if vllm_config.kernel_config.moe_backend == BACKEND and not model_config.is_moe:
        from vllm_rose_plugin.layers.log import logger

        logger.warning_once(
            "--moe-backend %s has nothing to do: %s has no mixture-of-experts layers.", BACKEND, model_config.model
        )


def _check_linear_on_cpu(named: str, vllm_config: Any) -> None:
    from vllm.platforms import current_platform

    kernel_config = vllm_config.kernel_config
    linear = (kernel_config.linear_backend_per_quant or {}).get("mxfp8", kernel_config.linear_backend)
    if current_platform.is_cpu() and linear == "auto":
        raise ValueError(f"{named}: vLLM has no MXFP8 linear kernel for a CPU; add --linear-backend {BACKEND}.")


def _check_draft(vllm_config: Any) -> None:
    draft_config = vllm_config.speculative_config.draft_model_config
    named = f'--speculative-config {{"moe_backend": "{BACKEND}"}}'
    if draft_config is None:
        raise ValueError(f"{named}: method {vllm_config.speculative_config.method!r} has no draft model to serve.")
    problem = _problem(vllm_config.get_quantization_config(draft_config, vllm_config.load_config), draft_config)
    if problem:
        raise ValueError(f"{named} can't serve the draft {draft_config.model} ({problem}): {SUPPORTED}.")


def _check_mtp(vllm_config: Any) -> bool:
    """Refuse an MTP draft of ours that can't be served; whether it has MXFP8 layers."""
    if vllm_config.speculative_config is None or vllm_config.speculative_config.method != "mtp":
        return False
    from vllm_rose_plugin.layers import mtp_check, mtp_config

    mtp_check.check_config(vllm_config)
    mtp_check.check_files(vllm_config)
    return mtp_config.is_mxfp8(vllm_config)


def _check_all_to_all(vllm_config: Any) -> bool:
    """Refuse what our all-to-all can't serve; whether it is named."""
    if vllm_config.parallel_config.all2all_backend != ALL2ALL:
        return False
    from vllm_rose_plugin.layers import all_to_all_check

    all_to_all_check.check_config(vllm_config)
    return True


def _problem(quant_config: Any, model_config: Any) -> str | None:
    """None for an MXFP8 model, else what it is, in words."""
    if quant_config is None:
        return f"not quantized, {model_config.dtype}"
    if mxfp8_share(quant_config) == "none":
        return f"quantization {quant_config.get_name()!r} without MXFP8 layers"
    return None


def _check_unused_settings(additional_config: Any) -> None:
    if not isinstance(additional_config, dict) or "rose" not in additional_config:
        return
    from vllm_rose_plugin.layers.log import logger

    RoseConfig.load(additional_config)  # a typo is an error here too
    logger.warning_once(
        'additional_config["rose"] is set, but neither --moe-backend nor --linear-backend is %s: the plugin is unused.',
        BACKEND,
    )


def _record_settings(vllm_config: Any, **changes: Any) -> None:
    """Put the settings in force, with changes, and our version where vLLM's compile cache hashes them."""
    if not isinstance(vllm_config.additional_config, dict):
        raise ValueError(
            f"--additional-config is a {type(vllm_config.additional_config).__name__}; with rose settings it must be "
            'a JSON object, since the plugin\'s settings are kept under its key "rose".'
        )
    from vllm_rose_plugin.layers import gpu

    settings = RoseConfig.load(vllm_config.additional_config)
    vllm_config.additional_config["rose"] = {
        **settings.recorded(),
        **changes,
        "version": vllm_rose_plugin.__version__,
        # Decides which of our ops are in the compiled graph, like a setting.
        "target": gpu.target_or_reason(),
    }


def _apply() -> None:
    wrap("config_check", "vllm.config", "KernelConfig.set_platform_defaults", ("self", "vllm_config"), _wrap_defaults)


SEAMS = (
    Seam(
        name="config_check",
        module="vllm.config",
        target="KernelConfig.set_platform_defaults",
        kind="patch",
        why="refuses models that a named rose backend can't serve; puts our settings and version into the compile hash",
        upstream="none known",
        apply=_apply,
    ),
)
