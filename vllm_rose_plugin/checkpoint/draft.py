"""What a Qwen3-MoE MTP draft is made of: its tensors, their shapes, and what of config.json they follow from.

One layout in two places. In a draft directory config.json names the architecture ``Qwen3MoeMTP`` and nothing but
``mtp.*`` is stored; in the attached form the same tensors lie in the target's checkpoint. In both, config.json's
``num_nextn_predict_layers`` says how many layers there are. The layout is that of vLLM's Qwen3-Next MTP with Qwen3-MoE
layers: two norms before ``fc`` (2H -> H), decoder layers with experts, a final norm; embedding and output head are the
target's.
"""

import re
from collections.abc import Container, Iterator, Mapping
from typing import Any, Protocol

PREFIX = "mtp."
DRAFT_ARCHITECTURE = "Qwen3MoeMTP"
DRAFT_MODEL_TYPE = "qwen3_moe_mtp"
TARGET_ARCHITECTURE = "Qwen3MoeForCausalLM"
TARGET_MODEL_TYPE = "qwen3_moe"
LAYER_COUNT = "num_nextn_predict_layers"

_STACKED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_EXPERT = re.compile(r"^(mtp\.layers\.\d+\.mlp\.experts)\.(\d+)\.")
_LAYER = re.compile(r"^mtp\.layers\.(\d+)\.")
# vLLM builds fc with the checkpoint's ignore list, but the converter never touches it: 2H x H is small, and every draft
# goes through it. Norms and the router are never quantized.
_KEPT = re.compile(r"(^mtp\.fc|norm\w*|\.mlp\.gate)\.weight$")
_PLAIN_DTYPES = ("BF16", "F16", "F32")

Expected = tuple[tuple[str, int | None], ...]
"""Each dimension as ``(what of config.json makes it, its size)``; None where config.json doesn't tell."""


class Entry(Protocol):
    """A tensor as its header describes it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


def is_draft_tensor(name: str) -> bool:
    """Whether a tensor belongs to the draft, in either form."""
    return name.startswith(PREFIX)


def is_draft_directory(config: Mapping[str, Any]) -> bool:
    """Whether config.json is that of a draft directory of its own."""
    return config.get("model_type") == DRAFT_MODEL_TYPE or DRAFT_ARCHITECTURE in (config.get("architectures") or ())


def is_ours(config: Mapping[str, Any]) -> bool:
    """Whether the rules of this module apply: a Qwen3-MoE, or a draft for one."""
    return config.get("model_type") == TARGET_MODEL_TYPE or is_draft_directory(config)


def layer_count(config: Mapping[str, Any]) -> int:
    """``num_nextn_predict_layers``; 0 where config.json says nothing of use."""
    return _integer(config, LAYER_COUNT) or 0


def draft_faults(
    tensors: Mapping[str, Entry], config: Mapping[str, Any], *, scaled: Container[str] = ()
) -> Iterator[str]:
    """What is wrong with a draft, one sentence each.

    Args:
        tensors: the draft's, without the scales of quantized weights; in a draft directory all that it holds.
        config: config.json of the draft directory, or of the target that the draft is attached to.
        scaled: weights whose scale is there; that one of them is missing is another's fault.
    """
    count = layer_count(config)
    if not count:
        value = config.get(LAYER_COUNT)
        if tensors or is_draft_directory(config):
            yield (
                f"config.json has {LAYER_COUNT} {value!r}, but the checkpoint holds MTP tensors: it must be the number "
                "of mtp.layers, 1 or more (`rose mtp attach` writes it)"
            )
        return
    if not tensors:
        yield (
            f"config.json has {LAYER_COUNT} {count}, but no mtp.* tensor is there: `rose mtp attach` adds a draft; "
            "without one the number must be 0"
        )
        return
    yield from _number_faults(tensors, config, count)
    expected = _expected(config, count, tensors)
    for name in expected:
        if name not in tensors and name not in scaled:
            yield f"{name} is missing: {DRAFT_ARCHITECTURE} with {LAYER_COUNT} {count} needs it"
    optional = _optional(config, count)
    for name, entry in tensors.items():
        shape = expected.get(name) or optional.get(name)
        if shape is None:
            if not _EXPERT.match(name):  # those are counted above
                yield _extra(name, count)
        elif len(entry.shape) != len(shape) or any(
            size is not None and size != found for (_, size), found in zip(shape, entry.shape, strict=True)
        ):
            wanted = ", ".join(f"{what}={'any' if size is None else size}" for what, size in shape)
            yield f"{name} has shape {list(entry.shape)}, config.json makes it [{wanted}]"
        if _KEPT.search(name) and entry.dtype not in _PLAIN_DTYPES:
            yield f"{name} has dtype {entry.dtype}: fc, norms and the router of a draft stay unquantized"


def _number_faults(tensors: Mapping[str, Entry], config: Mapping[str, Any], count: int) -> Iterator[str]:
    """Experts beyond config.json's number: named once a layer, not once a tensor."""
    experts = _experts(config)
    highest: dict[str, int] = {}
    for name in tensors:
        match = _EXPERT.match(name)
        layer = _LAYER.match(name)
        if match and layer and int(layer[1]) < count:
            highest[match[1]] = max(highest.get(match[1], 0), int(match[2]))
    for module, number in highest.items():
        if experts is not None and number >= experts:
            yield f"{module} holds {number + 1} experts, config.json says num_experts {experts}"


def _extra(name: str, count: int) -> str:
    layer = _LAYER.match(name)
    if layer and int(layer[1]) >= count:
        return f"{name} is one layer too many: config.json has {LAYER_COUNT} {count}"
    if not is_draft_tensor(name) or "embed_tokens" in name or "head" in name:
        return (
            f"{name} is no tensor of {DRAFT_ARCHITECTURE}, which takes embedding and output head from its target and "
            "holds mtp.* alone: remove it"
        )
    return f"{name} is no tensor of {DRAFT_ARCHITECTURE}: remove it"


def _expected(config: Mapping[str, Any], count: int, tensors: Mapping[str, Entry]) -> dict[str, Expected]:
    """Every tensor that must be there."""
    hidden = ("hidden_size", _integer(config, "hidden_size"))
    double = ("2*hidden_size", None if hidden[1] is None else 2 * hidden[1])
    head = ("head_dim", head_dim(config))
    queries, keys = _rows(config, "num_attention_heads"), _rows(config, "num_key_value_heads")
    experts, width = ("num_experts", _experts(config)), ("moe_intermediate_size", _integer(config, _WIDTH))
    expected: dict[str, Expected] = {"mtp.fc.weight": (hidden, double)}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        expected[f"mtp.{name}.weight"] = (hidden,)
    for number in range(count):
        layer = f"mtp.layers.{number}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            expected[f"{layer}.{name}.weight"] = (hidden,)
        attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
        for name, shape in {**attention, "o_proj": (hidden, queries)}.items():
            expected[f"{layer}.self_attn.{name}.weight"] = shape
            if config.get("attention_bias") and name in attention:
                expected[f"{layer}.self_attn.{name}.bias"] = shape[:1]
        for name in ("q_norm", "k_norm"):
            expected[f"{layer}.self_attn.{name}.weight"] = (head,)
        expected[f"{layer}.mlp.gate.weight"] = (experts, hidden)
        if any(f"{layer}.{name}" in tensors for name in _STACKED):
            any_size: tuple[str, int | None] = ("any", None)  # two layouts, transposes of each other
            expected |= {f"{layer}.{name}": (experts, any_size, any_size) for name in _STACKED}
            continue
        for expert in range(experts[1] or 0):
            module = f"{layer}.mlp.experts.{expert}"
            expected[f"{module}.gate_proj.weight"] = expected[f"{module}.up_proj.weight"] = (width, hidden)
            expected[f"{module}.down_proj.weight"] = (hidden, width)
    return expected


def _optional(config: Mapping[str, Any], count: int) -> dict[str, Expected]:
    """transformers' Qwen3-MoE gives o_proj a bias too, vLLM's has none and leaves it out."""
    if not config.get("attention_bias"):
        return {}
    hidden = ("hidden_size", _integer(config, "hidden_size"))
    return {f"mtp.layers.{number}.self_attn.o_proj.bias": (hidden,) for number in range(count)}


_WIDTH = "moe_intermediate_size"


def head_dim(config: Mapping[str, Any]) -> int | None:
    """Width of a head: ``head_dim``, or by Qwen3's default the hidden size cut by the heads."""
    found, hidden, heads = (_integer(config, key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if found is None and hidden is not None and heads:
        return hidden // heads
    return found


def _rows(config: Mapping[str, Any], key: str) -> tuple[str, int | None]:
    heads, width = _integer(config, key), head_dim(config)
    return f"{key}*head_dim", None if heads is None or width is None else heads * width


def _experts(config: Mapping[str, Any]) -> int | None:
    found = _integer(config, "num_experts")
    return _integer(config, "num_local_experts") if found is None else found


def _integer(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def differences(target: Mapping[str, Any], draft: Mapping[str, Any]) -> list[str]:
    """Settings of a draft directory that the target's config.json would change, so that it can't be attached.

    An attached draft is built from the target's config.json. A setting that one of the two leaves out is taken as the
    same, except for those that have a default by others.
    """
    faults = []
    for key in _SAME:
        one, other = _setting(target, key), _setting(draft, key)
        if one is not None and other is not None and one != other:
            faults.append(f"DRAFT has {key} {other!r}, TARGET {one!r}: an attached draft is built with TARGET's")
    return faults


_SAME = (
    *("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    *("attention_bias", "hidden_act", "rms_norm_eps", "rope_theta", "rope scaling"),
)


def _setting(config: Mapping[str, Any], key: str) -> Any:
    rope = config.get("rope_parameters")  # since transformers 5; before, rope_theta and rope_scaling
    rope = rope if isinstance(rope, dict) else {}
    if key == "head_dim":
        return head_dim(config)
    if key == "num_experts":
        return _experts(config)
    if key == "rope_theta":
        return rope.get("rope_theta", config.get("rope_theta"))
    if key == "rope scaling":
        scaling = config.get("rope_scaling")
        scaling = {**(scaling if isinstance(scaling, dict) else {}), **rope}
        kind = scaling.pop("rope_type", scaling.pop("type", "default"))
        scaling.pop("type", None)
        scaling.pop("rope_theta", None)
        return "none" if kind == "default" else {"rope_type": kind, **scaling}
    return config.get(key)
