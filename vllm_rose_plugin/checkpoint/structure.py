"""What a checkpoint must hold as a whole: layers, experts and projections that belong together, and their shapes."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_rose_plugin.checkpoint.draft import Entry, draft_faults, is_draft_directory, is_draft_tensor, is_ours

OTHER_TOWERS = frozenset(
    ("visual", "vision_tower", "vision_model", "vit_large_projector", "audio_tower", "multi_modal_projector")
)
SCALE_SUFFIXES = ("_scale", "_scale_inv")
"""Beside ``X.weight`` lies ``X.weight_scale``; MiniMax checkpoints spell it ``X.weight_scale_inv``."""

_LAYER = re.compile(r"^(.*?\blayers)\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^(.+\.experts)\.(\d+)\.(.+)$")
_STACKED = re.compile(r"^(.+\.experts)\.(gate_up_proj|down_proj)$")
_BACKBONE = re.compile(r"^(model\.)?(language_model\.)?(model\.)?layers(\.|$)")
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "num_routed_experts", "moe_num_experts")
_MLPS = frozenset(("mlp", "feed_forward", "ffn", "shared_expert", "shared_experts"))
_ATTENTIONS = frozenset(("self_attn", "attn", "attention", "self_attention"))
_ATTENTION_OUTPUTS = ("o_proj", "out_proj", "dense", "wo", "c_proj", "proj")
# Families known to build all layers of a kind alike. Others may share keys among layers, give some layers a sink, an
# indexer or a head size of their own.
_UNIFORM = ("qwen2", "qwen3", "mixtral", "llama", "mistral", "deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe")
_NO_LAYER_COUNT = ("block_configs", "layers_block_type")  # searched architectures may leave a layer without weights

Shape = tuple[int, ...] | None  # None: not known, or of no use for a comparison


def structure_faults(tensors: Mapping[str, Entry], config: Mapping[str, Any]) -> list[str]:
    """Weights that must be there and aren't, and shapes that don't go together.

    A rule is applied only where no architecture that vLLM serves breaks it:

    - Experts of a layer have the same tensors in the same shapes; their ids run from 0 without a gap and, in the
      language model's layers, are as many as config.json says. Stacked experts too have that number.
    - In an MLP or an expert, gate_proj comes with up_proj and down_proj, up_proj with down_proj and the reverse; w1
      with w2, w3 with both. Gate and up have down's transposed shape.
    - In an attention, k_proj or v_proj comes with q_proj, the other one and an output projection (a layer that shares
      another's keys has neither; config.json's attention_k_eq_v allows for no v_proj).
    - Layer ids of the language model run from 0 without a gap, up to num_hidden_layers at least; those above are MTP
      layers. A checkpoint of MTP layers alone, and configs where layers may be empty, are left out.
    - Families that build the layers of a kind alike (Qwen, Llama, Mixtral, DeepSeek, GLM-4 MoE): what a module of one
      layer has, the same module of another has too, unless that holds something of its own instead (dense against
      MoE, linear against full attention). Same names have the same shapes. hidden_size, moe_intermediate_size and the
      heads of config.json hold.

    - The MTP draft of a Qwen3-MoE, attached or in a directory of its own, holds what
      :func:`~vllm_rose_plugin.checkpoint.draft.draft_faults` asks for, and nothing else.

    Vision and audio towers are not looked at; a weight whose scale is there counts as there (its absence is another
    fault).

    Args:
        tensors: every tensor of the checkpoint, quantized or not.
        config: of config.json; may be empty.
    """
    if not is_ours(config):
        return list(_Structure(tensors, config).faults())
    alone = is_draft_directory(config)
    target: dict[str, Entry] = {}
    draft: dict[str, Entry] = {}
    scaled: set[str] = set()  # weights by their scales: where one is missing, that is another fault
    for name, entry in tensors.items():
        if not alone and not is_draft_tensor(name):
            target[name] = entry
        elif name.endswith(SCALE_SUFFIXES):
            scaled.add(name.removesuffix("_inv").removesuffix("_scale"))
        else:
            draft[name] = entry
    return [*_Structure(target, config).faults(), *draft_faults(draft, config, scaled=scaled)]


class _Structure:
    def __init__(self, tensors: Mapping[str, Entry], config: Mapping[str, Any]) -> None:
        text = config.get("text_config")
        self._text: Mapping[str, Any] = {**config, **text} if isinstance(text, dict) else config
        family = self._text.get("model_type")
        self._uniform = isinstance(family, str) and family.startswith(_UNIFORM)
        self._depth = self._integer("num_hidden_layers")
        # Names below a layer, an expert's number replaced by `*` and stacked experts taken apart.
        self._layers: dict[str, dict[int, dict[str, Shape]]] = defaultdict(lambda: defaultdict(dict))
        self._experts: dict[str, dict[int, dict[str, Shape]]] = defaultdict(lambda: defaultdict(dict))
        self._stacked: dict[str, int] = {}
        self._reported: set[str] = set()
        for name, entry in tensors.items():
            shape: Shape = entry.shape
            if name.endswith(SCALE_SUFFIXES):
                name = name.removesuffix("_inv").removesuffix("_scale")
                if name in tensors or not name.endswith(".weight"):
                    continue
                shape = None
            if OTHER_TOWERS.isdisjoint(name.split(".")):
                self._add(name, shape)
        for module, experts in self._experts.items():
            match = _LAYER.match(module)
            if match:
                for leaves in experts.values():
                    for leaf, shape in leaves.items():
                        self._layers[match[1]][int(match[2])].setdefault(f"{match[3]}.*.{leaf}", shape)

    def _add(self, name: str, shape: Shape) -> None:
        match = _EXPERT.match(name)
        if match:
            self._experts[match[1]][int(match[2])][match[3]] = shape
            return
        match = _LAYER.match(name)
        if not match:
            return
        layer = self._layers[match[1]][int(match[2])]
        stacked = _STACKED.match(name)
        if not stacked:
            layer[match[3]] = shape
            return
        below = match[3].rpartition(".")[0]
        for leaf in ("gate_proj", "up_proj") if stacked[2] == "gate_up_proj" else ("down_proj",):
            layer[f"{below}.*.{leaf}.weight"] = None
        if shape is not None and len(shape) == 3:
            self._stacked[stacked[1]] = shape[0]

    def _integer(self, key: str) -> int | None:
        value = self._text.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def faults(self) -> Iterator[str]:
        yield from self._expert_faults()
        for container, layers in self._layers.items():
            yield from self._layer_number_faults(container, layers)
            for number, names in layers.items():
                yield from self._projection_faults(f"{container}.{number}", names)
                if self._uniform and _BACKBONE.match(container):
                    yield from self._dimension_faults(f"{container}.{number}", names)
            if self._uniform:
                yield from self._difference_faults(container, layers)

    def _expert_faults(self) -> Iterator[str]:
        declared = {count for key in _EXPERT_COUNTS if (count := self._integer(key)) is not None}
        for module, count in self._stacked.items():
            if _BACKBONE.match(module) and declared and count not in declared:
                yield f"{module} holds {count} experts, config.json says {_either(declared)}"
        for module, experts in self._experts.items():
            count = max(experts) + 1
            expected = max(count, *declared) if declared and _BACKBONE.match(module) else count
            missing = [number for number in range(expected) if number not in experts] if expected < 1 << 20 else [0]
            if count > len(experts) or (_BACKBONE.match(module) and declared and count not in declared):
                what = f"config.json says {_either(declared)}" if declared else f"the highest is {count - 1}"
                lacks = f": experts {_some(missing)} are missing" if missing else ""
                yield f"{module} holds {len(experts)} experts, {what}{lacks}"
            leaves = dict.fromkeys(leaf for expert in experts.values() for leaf in expert)
            for number, expert in experts.items():
                if len(expert) < len(leaves):
                    lacking = [leaf for leaf in leaves if leaf not in expert]
                    yield f"{module}.{number} lacks {_some(lacking)}, which other experts of the layer have"
            for leaf in leaves:
                shapes = {f"{module}.{number}.{leaf}": expert.get(leaf) for number, expert in experts.items()}
                yield from _shape_faults(shapes, "vLLM stacks the experts of a layer")

    def _layer_number_faults(self, container: str, layers: Mapping[int, object]) -> Iterator[str]:
        if not _BACKBONE.match(container) or any(key in self._text for key in _NO_LAYER_COUNT):
            return
        depth = self._depth
        if self._integer("num_layers") not in (None, depth):  # LongCat counts the halves of a layer
            depth = None
        if depth is not None and min(layers) >= depth:
            return
        expected = max(layers) + 1 if depth is None else depth
        if expected - len(layers) > 1 << 20:
            yield f"{container} holds {len(layers)} layers and not {expected}"
            return
        missing = [number for number in range(expected) if number not in layers]
        if missing:
            source = f"the highest is {max(layers)}" if depth is None else f"num_hidden_layers is {depth}"
            yield f"{container} lacks layers {_some(missing)} ({source})"

    def _projection_faults(self, layer: str, names: Mapping[str, Shape]) -> Iterator[str]:
        modules: dict[str, dict[str, Shape]] = defaultdict(dict)
        for name, shape in names.items():
            module, _, leaf = name.removesuffix(".weight").rpartition(".")
            if name.endswith(".weight"):
                modules[module][leaf] = shape
        for module, leaves in modules.items():
            last = module.rpartition(".")[2]
            if last == "*" or last in _MLPS:
                lacking = _lacking_of_mlp(leaves)
            elif last in _ATTENTIONS:
                lacking = self._lacking_of_attention(leaves)
            else:
                continue
            if lacking:
                self._reported |= {f"{layer}.{module}.{leaf}.weight" for leaf in lacking}
                present = _some([leaf for leaf in leaves if leaf not in lacking])
                yield f"{layer}.{module} lacks {_some(lacking)}, which goes with {present}"
            elif last not in _ATTENTIONS:
                yield from _mlp_shape_faults(f"{layer}.{module}", leaves)

    def _lacking_of_attention(self, leaves: Mapping[str, Shape]) -> list[str]:
        if "k_proj" not in leaves and "v_proj" not in leaves:
            return []
        wanted = ["q_proj", "k_proj"] + ([] if self._text.get("attention_k_eq_v") else ["v_proj"])
        lacking = [leaf for leaf in wanted if leaf not in leaves]
        return lacking + ([] if any(leaf in leaves for leaf in _ATTENTION_OUTPUTS) else ["o_proj"])

    def _dimension_faults(self, layer: str, names: Mapping[str, Shape]) -> Iterator[str]:
        hidden, width = self._integer("hidden_size"), self._integer("moe_intermediate_size")
        heads, kv_heads = self._integer("num_attention_heads"), self._integer("num_key_value_heads")
        head = self._integer("head_dim")
        queries = None if heads is None or head is None else heads * head
        keys = None if kv_heads is None or head is None else kv_heads * head
        gated = (1, 2) if self._text.get("attn_output_gate", True) else (1,)  # Qwen3-Next's q_proj holds a gate too
        inputs = None if hidden is None else (hidden, 2 * hidden)  # EAGLE's layer takes two states
        wanted: dict[str, tuple[Sequence[int] | None, Sequence[int] | None]] = {}
        if "kv_lora_rank" not in self._text:
            q_rows = None if queries is None else [queries * times for times in gated]
            wanted["self_attn.q_proj.weight"] = (q_rows, inputs)
            wanted["self_attn.k_proj.weight"] = wanted["self_attn.v_proj.weight"] = (_one(keys), inputs)
            wanted["self_attn.o_proj.weight"] = (_one(hidden), _one(queries))
        for leaf in ("gate_proj", "up_proj"):
            wanted[f"mlp.experts.*.{leaf}.weight"] = (_one(width), _one(hidden))
        wanted["mlp.experts.*.down_proj.weight"] = (_one(hidden), _one(width))
        for name, (rows, columns) in wanted.items():
            shape = names.get(name)
            if shape is None or len(shape) != 2:
                continue
            if (rows and shape[0] not in rows) or (columns and shape[1] not in columns):
                expected = [values[0] if values else "any" for values in (rows, columns)]
                text = ", ".join(map(str, expected))
                yield f"{layer}.{name} has shape {list(shape)}, config.json's sizes make it [{text}]"

    def _difference_faults(self, container: str, layers: Mapping[int, Mapping[str, Shape]]) -> Iterator[str]:
        backbone = bool(_BACKBONE.match(container))
        modules: dict[str, dict[int, frozenset[str]]] = defaultdict(dict)  # module: layer: names in it
        shapes: dict[str, dict[str, Shape]] = defaultdict(dict)
        for number, names in layers.items():
            if backbone and self._depth is not None and number >= self._depth:
                continue  # an MTP layer has more than the others
            parts: dict[str, set[str]] = defaultdict(set)
            for name, shape in names.items():
                module, _, rest = name.partition(".")
                parts[module].add(rest)
                shapes[name][f"{container}.{number}.{name}"] = shape
            modules[""][number] = frozenset(parts)
            for module, rests in parts.items():
                modules[module][number] = frozenset(rests)
        for module, by_layer in modules.items():
            sets = Counter(by_layer.values())
            for number, found in by_layer.items():
                whole = next((other for other in sets if found < other), None)
                if whole is not None:
                    other = next(number for number, names in by_layer.items() if names == whole)
                    where = f"{container}.{number}" + (f".{module}" if module else "")
                    lacking = [name for name in sorted(whole - found) if f"{where}.{name}" not in self._reported]
                    if not lacking:
                        continue
                    yield f"{where} lacks {_some(lacking)}, which layer {other} has"
        for by_name in shapes.values():
            yield from _shape_faults(by_name, "the layers of this model are alike")


def _one(value: int | None) -> Sequence[int] | None:
    return None if value is None else (value,)


def _some(values: Sequence[object]) -> str:
    more = f" and {len(values) - 4} more" if len(values) > 4 else ""
    return ", ".join(map(str, values[:4])) + more


def _either(values: set[int]) -> str:
    return " or ".join(map(str, sorted(values)))


def _lacking_of_mlp(leaves: Mapping[str, Shape]) -> list[str]:
    rules = (
        ("gate_proj", ("up_proj", "down_proj")),
        ("up_proj", ("down_proj",)),
        ("gate_up_proj", ("down_proj",)),
        ("w1", ("w2",)),
        ("w3", ("w1", "w2")),
    )
    lacking = {part: None for leaf, parts in rules if leaf in leaves for part in parts if part not in leaves}
    if "down_proj" in leaves and "up_proj" not in leaves and "gate_up_proj" not in leaves:
        lacking["up_proj"] = None
    return list(lacking)


def _mlp_shape_faults(module: str, leaves: Mapping[str, Shape]) -> Iterator[str]:
    for gate, up, down in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
        out = leaves.get(down)
        for leaf in (gate, up):
            shape = leaves.get(leaf)
            if shape is not None and out is not None and len(shape) == len(out) == 2 and shape != out[::-1]:
                yield (
                    f"{module}.{leaf}.weight has shape {list(shape)}, which doesn't fit {down}.weight {list(out)}: "
                    "one must be the other's transpose"
                )


def _shape_faults(shapes: Mapping[str, Shape], why: str) -> Iterator[str]:
    """Names whose shape is not that of most."""
    known = {name: shape for name, shape in shapes.items() if shape is not None}
    if len(set(known.values())) < 2:
        return
    usual = Counter(known.values()).most_common(1)[0][0]
    other = next(name for name, shape in known.items() if shape == usual)
    for name, shape in known.items():
        if shape != usual:
            yield f"{name} has shape {list(shape)} and {other} {list(usual)}, but {why}"
