"""Which tensors become MXFP8, and how config.json says so in the words of vLLM's two loaders."""

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import vllm_rose_plugin
from vllm_rose_plugin.checkpoint.headers import CheckpointError
from vllm_rose_plugin.checkpoint.structure import OTHER_TOWERS
from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Rounding


class CheckpointFormat(StrEnum):
    """The quantization config that is written; the tensors are the same."""

    MODELOPT = "modelopt"
    COMPRESSED_TENSORS = "compressed-tensors"


# Leaf modules that vLLM builds with a quant_config in the Qwen3 family. in_proj_b/in_proj_a (one row per head) and
# conv1d of linear attention stay as they are: vLLM's fused in_proj_ba takes no block scales.
QUANTIZED_LEAVES = frozenset(
    (
        *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"),
        *("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
        *("in_proj_qkv", "in_proj_z", "in_proj_qkvz"),
    )
)
_LINEAR_ATTENTION_LEAVES = frozenset(("out_proj",))  # a vision tower has an out_proj too
FUSED_LEAVES: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z"),
)
"""Linears that vLLM loads into one parameter: quantized together or not at all."""
STACKED_LEAVES = ("gate_up_proj", "down_proj")
PRODUCER = "vllm_rose_plugin"
ALWAYS_IGNORED = ("lm_head",)  # exists in vLLM even where the checkpoint ties it to the embedding

_EXPERT = re.compile(r"^(?P<layer>.+\.experts)\.(?P<expert>\d+)\.(?P<leaf>[^.]+)$")
_STACKED = re.compile(rf"^(?P<layer>.+\.experts)\.(?P<leaf>{'|'.join(STACKED_LEAVES)})$")
_LAYER = re.compile(r"^(.*?\blayers\.\d+)\.")
# vLLM builds these without a quant_config, so an ignore list may leave them out.
_NEVER_QUANTIZED_LEAVES = frozenset(("embed_tokens", "shared_expert_gate", "gate", "pos_embed", "conv1d"))


def module_of(tensor_name: str) -> str:
    """Module of ``X.weight``; a stacked expert tensor is its own module."""
    return tensor_name.removesuffix(".weight")


def layer_of(tensor_name: str) -> str:
    """Up to the layer's number, or the module where there is none."""
    match = _LAYER.match(tensor_name)
    return match[1] if match else module_of(tensor_name)


def experts_layer(module: str) -> str | None:
    """``….experts`` for an expert's linear or a stacked expert tensor."""
    match = _EXPERT.match(module) or _STACKED.match(module)
    return match["layer"] if match else None


def stacked_leaf(tensor_name: str) -> str | None:
    """``gate_up_proj`` or ``down_proj`` where the name is that of a stacked expert tensor."""
    match = _STACKED.match(tensor_name)
    return match["leaf"] if match else None


def is_quantizable(tensor_name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is quantized unless the user ignores it."""
    parts = tensor_name.split(".")
    if not OTHER_TOWERS.isdisjoint(parts):
        return False
    if stacked_leaf(tensor_name):
        return len(shape) == 3
    if len(shape) != 2 or len(parts) < 2 or parts[-1] != "weight":
        return False
    leaf = parts[-2]
    return leaf in QUANTIZED_LEAVES or (leaf in _LINEAR_ATTENTION_LEAVES and "linear_attn" in parts)


def needs_ignore_entry(tensor_name: str, shape: Sequence[int]) -> bool:
    """Whether an unquantized tensor may be a linear to vLLM, which then must be told to leave it alone."""
    if stacked_leaf(tensor_name):
        return True
    return tensor_name.endswith(".weight") and len(shape) >= 2 and "embed_tokens" not in tensor_name.split(".")


def fused_group(module: str) -> str | None:
    """A key shared by the modules that vLLM requires to be quantized alike; None for a module on its own."""
    layer = experts_layer(module)
    if layer:
        return layer
    parent, _, leaf = module.rpartition(".")
    for leaves in FUSED_LEAVES:
        if leaf in leaves:
            return f"{parent}.{{{','.join(leaves)}}}"
    return None


def aliases(tensor_name: str, shape: Sequence[int]) -> list[str]:
    """Names by which ``--ignore`` may call a tensor: tensor, module, and the experts' module around it."""
    module = module_of(tensor_name)
    names = [tensor_name, module]
    layer = experts_layer(module)
    if layer:
        names.append(layer)
    if stacked_leaf(tensor_name) and len(shape) == 3:
        names += stacked_modules(tensor_name, shape[0])
    return names


def stacked_modules(tensor_name: str, num_experts: int) -> list[str]:
    """Modules of the experts that a stacked tensor holds."""
    layer, _, leaf = tensor_name.rpartition(".")
    leaves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
    return [f"{layer}.{expert}.{name}" for expert in range(num_experts) for name in leaves]


def matches(pattern: str, names: Iterable[str]) -> bool:
    """Whether a shell-style pattern (``*`` crosses dots) matches one of the names."""
    return any(fnmatchcase(name, pattern) for name in names)


def ignore_list(unquantized: Iterable[tuple[str, Sequence[int]]], *, checkpoint_format: CheckpointFormat) -> list[str]:
    """The ``ignore`` entries that make vLLM leave the given tensors unquantized.

    Names are the checkpoint's: vLLM maps them to its own. ModelOpt's loader asks for the experts of a layer as one
    module and takes every entry as a substring too; compressed-tensors' asks for each expert's linears exactly.
    """
    entries = dict.fromkeys(ALWAYS_IGNORED)
    for name, shape in unquantized:
        if not needs_ignore_entry(name, shape):
            continue
        module = module_of(name)
        layer = experts_layer(module)
        if layer and checkpoint_format is CheckpointFormat.MODELOPT:
            entries[layer] = None
        elif stacked_leaf(name):
            entries.update(dict.fromkeys(stacked_modules(name, shape[0])))
        else:
            entries[module] = None
    return list(entries)


def quantization_config(
    *, ignore: list[str], checkpoint_format: CheckpointFormat, rounding: Rounding
) -> dict[str, Any]:
    """``quantization_config`` of config.json.

    ``producer`` is ours: vLLM's parsers read the keys that they know and leave others alone.
    """
    producer = {
        "name": PRODUCER,
        "version": vllm_rose_plugin.__version__,
        "scale_rounding": rounding.value,
    }
    if checkpoint_format is CheckpointFormat.MODELOPT:
        return {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ignore, "producer": producer}
    scheme: dict[str, Any] = {
        "num_bits": 8,
        "type": "float",
        "strategy": "group",
        "group_size": MXFP8_BLOCK,
        "symmetric": True,
        "scale_dtype": "torch.uint8",
        "zp_dtype": "torch.uint8",
    }
    group = {
        "targets": ["Linear"],
        "format": "mxfp8-quantized",
        "weights": {**scheme, "dynamic": False},
        "input_activations": {**scheme, "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "producer": producer,
    }


def _group_formats(config: dict[str, Any]) -> set[Any]:
    groups = config.get("config_groups")
    groups = groups.values() if isinstance(groups, dict) else ()
    return {str(group.get("format")) for group in groups if isinstance(group, dict)}


class IgnoreRules:
    """vLLM's answer to "is this module left unquantized?" for a checkpoint's quantization_config."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Args:
            config: ``quantization_config`` of config.json.

        Raises:
            CheckpointError: it doesn't describe MXFP8.
        """
        method = str(config.get("quant_method", "")).lower()
        nested = config.get("quantization")
        nested = nested if isinstance(nested, dict) else {}
        if method.startswith("modelopt"):
            algo = str(nested.get("quant_algo") or config.get("quant_algo") or "").upper()
            if algo != "MXFP8":
                raise CheckpointError(f"quantization_config has quant_algo {algo or None!r}, expected 'MXFP8'")
            ignore = nested.get("exclude_modules") or config.get("ignore") or config.get("exclude_modules") or []
        elif method == "mxfp8":
            ignore = config.get("ignored_layers") or []
        elif method == "compressed-tensors":
            formats = {str(config.get("format"))} | _group_formats(config)
            if "mxfp8-quantized" not in formats:
                raise CheckpointError(
                    f"quantization_config has format {config.get('format')!r}, expected 'mxfp8-quantized'"
                )
            ignore = config.get("ignore") or []
        else:
            raise CheckpointError(
                f"quantization_config has quant_method {method or None!r}, "
                "expected modelopt, compressed-tensors or mxfp8"
            )
        if not isinstance(ignore, list):
            raise CheckpointError(f"quantization_config has the ignore list {ignore!r}, expected a list of names")
        for entry in ignore:
            try:
                if method == "compressed-tensors" and str(entry).startswith("re:"):
                    re.compile(entry[3:])
            except re.error as error:
                raise CheckpointError(
                    f"quantization_config has the ignore entry {entry!r}, no regular expression: {error}"
                ) from None
        self.format = method
        producer = config.get("producer")
        producer = producer if isinstance(producer, dict) else {}
        rounding = producer.get("scale_rounding")
        self.rounding: str | None = rounding if isinstance(rounding, str) else None
        self.ours = producer.get("name") == PRODUCER and self.rounding in tuple(Rounding)
        """Whether `rose quantize` wrote the checkpoint, so that its rules hold exactly."""
        self._ignore: tuple[str, ...] = tuple(map(str, ignore))
        self._exact = frozenset(self._ignore)
        self._lookup = lru_cache(maxsize=None)(
            self._compressed_tensors if method == "compressed-tensors" else self._modelopt
        )

    def covers(self, module: str) -> bool:
        """Whether vLLM leaves the module (a checkpoint's name, without ``.weight``) unquantized."""
        layer = experts_layer(module)
        if layer is None:
            return self._lookup(module)
        if self.format == "compressed-tensors":
            return self._lookup(f"{layer}.0.{'down_proj' if module.endswith('.down_proj') else 'gate_proj'}")
        return self._lookup(layer)

    def _modelopt(self, module: str) -> bool:
        if module in self._exact:
            return True
        if "experts" in module and any(module in entry for entry in self._ignore):
            return True
        return any(entry in module or fnmatchcase(module, entry) for entry in self._ignore)

    def _compressed_tensors(self, module: str) -> bool:
        return module in self._exact or any(
            re.match(entry[3:], module) for entry in self._ignore if entry.startswith("re:")
        )


def expected_unquantized(tensor_name: str) -> bool:
    """Whether vLLM never quantizes the module, whatever the ignore list says."""
    parts = tensor_name.split(".")
    return len(parts) > 1 and parts[-2] in _NEVER_QUANTIZED_LEAVES


def fused_ignore_hint(tensor_name: str) -> str:
    """What to give to ``--ignore`` to keep a tensor: itself, or a pattern for all that vLLM fuses with it."""
    module = module_of(tensor_name)
    layer = experts_layer(module)
    if layer:
        return layer
    group = fused_group(module)
    if group is None:
        return module
    parent, _, leaf = module.rpartition(".")
    return f"'{parent}.{'[qkv]_proj' if leaf[1:] == '_proj' else '*'}'"
