"""MTP drafting for Qwen3-MoE: ``--speculative-config '{"method": "mtp", …}'``.

Official: ``AutoConfig.register`` for config.json of a draft directory, ``ModelRegistry.register_model`` for the model.
Replaces: ``SpeculativeConfig.hf_config_override`` for these drafts only; the error that ``__post_init__`` raises for a
Qwen3-MoE without MTP layers.
Why: the former holds the list of targets whose own checkpoint has MTP layers, and says what their draft is; the latter
says no more than "Unsupported speculative method: 'mtp'".
Delete the patch when: vLLM knows MTP for Qwen3-MoE, or has a registration for draft configs (no issue known).
"""

from collections.abc import Callable
from typing import Any, get_args

from vllm_rose_plugin.checkpoint.draft import DRAFT_ARCHITECTURE, DRAFT_MODEL_TYPE, LAYER_COUNT, TARGET_MODEL_TYPE
from vllm_rose_plugin.seams.seam import Seam, SeamError
from vllm_rose_plugin.seams.targets import find, is_wrapped, wrap

_REGISTRY = "vllm.model_executor.models.registry"
_SPECULATIVE = "vllm.config.speculative"
_OVERRIDE = "SpeculativeConfig.hf_config_override"
_POST_INIT = "SpeculativeConfig.__post_init__"


def _apply_config() -> None:
    auto_config = find("mtp_config", "vllm.transformers_utils.config", "AutoConfig")

    from vllm_rose_plugin.layers.mtp_config import Qwen3MoeMTPConfig

    auto_config.register(DRAFT_MODEL_TYPE, Qwen3MoeMTPConfig, exist_ok=True)


def _apply_model() -> None:
    find("mtp_model", _REGISTRY, "ModelRegistry.register_model")
    registry: Any = find("mtp_model", _REGISTRY, "ModelRegistry")
    if DRAFT_ARCHITECTURE not in registry.models:
        registry.register_model(DRAFT_ARCHITECTURE, f"vllm_rose_plugin.layers.qwen3_moe_mtp:{DRAFT_ARCHITECTURE}")


def _wrap_override(original: Callable[..., Any]) -> Callable[..., Any]:
    def hf_config_override(hf_config: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_rose_plugin.layers.mtp_config import as_draft, has_draft

        return as_draft(hf_config) if has_draft(hf_config) else original(hf_config, *args, **kwargs)

    return hf_config_override


def _apply_override() -> None:
    if "mtp" not in get_args(find("mtp_draft_config", _SPECULATIVE, "MTPModelTypes")):
        raise SeamError("mtp_draft_config", f"{_SPECULATIVE}.MTPModelTypes has no 'mtp'")
    config = find("mtp_draft_config", _SPECULATIVE, "SpeculativeConfig")
    if is_wrapped(find("mtp_draft_config", _SPECULATIVE, _OVERRIDE)):
        return
    if not isinstance(config.__dict__.get("hf_config_override"), staticmethod):
        raise SeamError("mtp_draft_config", f"{_OVERRIDE} is no static method")
    wrap("mtp_draft_config", _SPECULATIVE, _OVERRIDE, ("hf_config",), _wrap_override)
    config.hf_config_override = staticmethod(config.hf_config_override)


def _wrap_post_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def __post_init__(self: Any) -> Any:
        try:
            return original(self)
        except NotImplementedError as error:
            target = self.target_model_config
            if self.method != "mtp" or getattr(target.hf_config, "model_type", None) != TARGET_MODEL_TYPE:
                raise
            raise ValueError(
                f'--speculative-config {{"method": "mtp"}}: {self.model} holds no MTP layer (its config.json has no '
                f'{LAYER_COUNT}). Name a draft directory, {{"method": "mtp", "model": DRAFT, …}}, or attach one: '
                "`rose mtp attach TARGET DRAFT OUT`."
            ) from error

    return __post_init__


SEAMS = (
    Seam(
        name="mtp_config",
        module="vllm.transformers_utils.config",
        target="AutoConfig.register",
        kind="official",
        why="config.json of a draft directory has a model_type of its own",
        upstream="https://huggingface.co/docs/transformers/model_doc/auto",
        apply=_apply_config,
    ),
    Seam(
        name="mtp_model",
        module=_REGISTRY,
        target="ModelRegistry.register_model",
        kind="official",
        why="the MTP draft model for Qwen3-MoE",
        upstream="https://docs.vllm.ai/en/latest/contributing/model/registration.html",
        apply=_apply_model,
    ),
    Seam(
        name="mtp_draft_config",
        module=_SPECULATIVE,
        target=_OVERRIDE,
        kind="patch",
        why="what a target's MTP layers are built as is a closed list",
        upstream="none known",
        apply=_apply_override,
    ),
    Seam(
        name="mtp_without_draft",
        module=_SPECULATIVE,
        target=_POST_INIT,
        kind="patch",
        why="says what is missing when a Qwen3-MoE without MTP layers is asked to draft with them",
        upstream="none known",
        apply=lambda: wrap("mtp_without_draft", _SPECULATIVE, _POST_INIT, ("self",), _wrap_post_init),
    ),
)
