"""Refuse a draft that doesn't fit its target, or a damaged one, by the name of what is wrong."""

from collections.abc import Iterator
from typing import Any

from vllm_rose_plugin.checkpoint.draft import PREFIX, draft_faults, is_draft_directory, is_draft_tensor
from vllm_rose_plugin.checkpoint.headers import read_checkpoint, read_json, scale_faults, weight_of
from vllm_rose_plugin.layers.checkpoint_check import NOT_FILES, local_directory
from vllm_rose_plugin.layers.mtp_config import draft_model_config

_checked: set[str] = set()
_SHARED = {"hidden_size": "its hidden states", "vocab_size": "its embedding and output head"}


def check_config(vllm_config: Any) -> None:
    """Look whether the draft can be built for its target.

    Args:
        vllm_config: with a draft of ours, or without.

    Raises:
        ValueError: names the setting, both values, and what to change.
    """
    draft = draft_model_config(vllm_config)
    if draft is None:
        return
    faults = list(_config_faults(vllm_config, draft))
    if faults:
        raise ValueError(f"MTP draft {draft.model} can't be served: {'; '.join(faults)}")


def _config_faults(vllm_config: Any, draft: Any) -> Iterator[str]:
    target = vllm_config.speculative_config.target_model_config
    one, other = target.hf_text_config, draft.hf_config
    for key, what in _SHARED.items():
        mine, its = getattr(other, key, None), getattr(one, key, None)
        if mine != its:
            yield f"its {key} is {mine}, the target's ({target.model}) is {its}; a draft works on {what} of the target"
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1:
        yield f"--pipeline-parallel-size is {stages}; embedding and output head must be on one stage with the draft: 1"


def check_files(vllm_config: Any) -> None:
    """Read the headers of the draft's files and look whether every tensor is there and none besides.

    Nothing to do where the files are not local yet, and for load formats that read none; else once per process.

    Raises:
        ValueError: names the first faulty tensors.
    """
    draft = draft_model_config(vllm_config)
    if draft is None or vllm_config.load_config.load_format in NOT_FILES or str(draft.model) in _checked:
        return
    directory = local_directory(str(draft.model), draft.revision)
    if directory is None or not any(directory.glob("*.safetensors")):
        return
    config = read_json(directory / "config.json")
    alone = is_draft_directory(config)
    tensors, faults, _ = read_checkpoint(directory)
    if not alone:  # the rest of the target's checkpoint is another's affair
        tensors = {name: entry for name, entry in tensors.items() if is_draft_tensor(name)}
        faults = [fault for fault in faults if fault.startswith(PREFIX)]
    scaled = {weight for name in tensors if (weight := weight_of(name)) is not None}
    weights = {name: entry for name, entry in tensors.items() if weight_of(name) is None}
    faults += scale_faults(tensors)
    faults += draft_faults(weights, config, scaled=scaled)
    if faults:
        more = f" (and {len(faults) - 3} more; `rose verify {directory}` lists all)" if len(faults) > 3 else ""
        raise ValueError(f"damaged MTP draft {directory}: {'; '.join(faults[:3])}{more}")
    _checked.add(str(draft.model))
