"""The quantization config of a target with an attached draft, and of the two when they part again.

One ``quantization_config`` speaks for both then. Its ignore list must leave alone what either of them has unquantized,
and must not cover what either has quantized: vLLM believes the list, not the tensors.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_rose_plugin.checkpoint import rules
from vllm_rose_plugin.checkpoint.draft import is_draft_tensor
from vllm_rose_plugin.checkpoint.headers import WEIGHT_DTYPE, CheckpointError, TensorEntry
from vllm_rose_plugin.checkpoint.verify import coverage_faults

_KEY = "quantization_config"
Tensors = Mapping[str, TensorEntry]


def joined(*, target: Mapping[str, Any], draft: Mapping[str, Any], tensors: Tensors) -> dict[str, Any] | None:
    """``quantization_config`` of the attached form; None where nothing is quantized.

    Args:
        target, draft: their config.json.
        tensors: of both.

    Raises:
        CheckpointError: the two can't be described by one config; the text names the setting.
    """
    parts = {
        "TARGET": _own(target, "TARGET", [e for n, e in tensors.items() if not is_draft_tensor(n)]),
        "DRAFT": _own(draft, "DRAFT", [e for n, e in tensors.items() if is_draft_tensor(n)]),
    }
    found = [part for part in parts.values() if part is not None]
    if not found:
        return None
    config = copy.deepcopy(found[0])
    if len(found) == 2:
        _require_alike(found[0], found[1])
    list_of = _ignore_list_of(config)
    # What has a config of its own brings its list; the list of the other one follows from its tensors.
    entries = dict.fromkeys(map(str, list_of))
    sides = {"TARGET": False, "DRAFT": True}
    for name, part in parts.items():
        if part is None or part is not found[0]:
            entries |= dict.fromkeys(_entries(tensors.values(), config, of_draft=sides[name]))
    _set_ignore(config, list(entries))
    faults = coverage_faults(tensors.values(), rules.IgnoreRules(config))
    if faults:
        raise CheckpointError(f"the ignore lists of TARGET and DRAFT don't go together: {faults[0]}")
    return config


def parted(*, attached: Mapping[str, Any], tensors: Tensors, of_draft: bool) -> dict[str, Any] | None:
    """``quantization_config`` of one of the two once they are apart; None where it has nothing quantized.

    Args:
        attached: config.json of the attached form.
        tensors: of both.
        of_draft: the draft's, not the target's.
    """
    own = [entry for name, entry in tensors.items() if is_draft_tensor(name) == of_draft]
    if not any(entry.dtype == WEIGHT_DTYPE for entry in own):
        return None
    config = copy.deepcopy(dict(attached[_KEY]))
    if of_draft:
        _set_ignore(config, _entries(tensors.values(), config, of_draft=True))
    else:
        kept = [entry for entry in _ignore_list_of(config) if not _names_draft(str(entry))]
        _set_ignore(config, kept)
    return config


def _own(config: Mapping[str, Any], what: str, tensors: Iterable[TensorEntry]) -> dict[str, Any] | None:
    """A checkpoint's own quantization_config, which must be MXFP8 and there exactly where tensors are quantized."""
    found = config.get(_KEY)
    first = next((entry.name for entry in tensors if entry.dtype == WEIGHT_DTYPE), None)
    if found is None and first is None:
        return None
    if not isinstance(found, dict):
        raise CheckpointError(f"{what} has {first} in {WEIGHT_DTYPE}, but its config.json has no {_KEY}")
    try:
        rules.IgnoreRules(found)
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}; only MXFP8 can be joined") from None
    if first is None:
        raise CheckpointError(f"{what} has a {_KEY} in config.json, but no tensor of it is {WEIGHT_DTYPE}")
    return found


def _require_alike(target: dict[str, Any], draft: dict[str, Any]) -> None:
    one, other = rules.IgnoreRules(target), rules.IgnoreRules(draft)
    if one.format != other.format:
        raise CheckpointError(
            f"TARGET's quant_method is {one.format!r} and DRAFT's {other.format!r}: one config must serve both, so "
            "convert one of them again with the other's --format"
        )
    if (one.ours, one.rounding) != (other.ours, other.rounding):
        raise CheckpointError(
            f"TARGET was rounded with {one.rounding or 'an unknown rule'} and DRAFT with "
            f"{other.rounding or 'an unknown rule'}, but config.json records one rule for both: convert the BF16 draft "
            "again with --rounding, or attach it unquantized"
        )


def _entries(tensors: Iterable[TensorEntry], config: Mapping[str, Any], *, of_draft: bool) -> list[str]:
    """Ignore entries for the unquantized linears of one side, in the words of the config's format."""
    method = str(config.get("quant_method")).lower()
    words = (
        rules.CheckpointFormat.COMPRESSED_TENSORS if method == "compressed-tensors" else rules.CheckpointFormat.MODELOPT
    )
    plain = [
        (entry.name, entry.shape)
        for entry in tensors
        if is_draft_tensor(entry.name) == of_draft and entry.dtype != WEIGHT_DTYPE
    ]
    return rules.ignore_list(plain, checkpoint_format=words)


def _names_draft(entry: str) -> bool:
    return entry.removeprefix("re:").removeprefix("^").replace("\\.", ".").startswith("mtp")


def _place(config: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The object and key of the ignore list that vLLM reads."""
    method = str(config.get("quant_method", "")).lower()
    if method == "mxfp8":
        return config, "ignored_layers"
    nested = config.get("quantization")
    if method.startswith("modelopt"):
        if isinstance(nested, dict) and nested.get("exclude_modules"):
            return nested, "exclude_modules"
        if not config.get("ignore") and config.get("exclude_modules"):
            return config, "exclude_modules"
    return config, "ignore"


def _ignore_list_of(config: dict[str, Any]) -> list[Any]:
    where, key = _place(config)
    return list(where.get(key) or [])


def _set_ignore(config: dict[str, Any], entries: list[str]) -> None:
    where, key = _place(config)
    where[key] = entries
