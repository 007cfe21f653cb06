"""How much of a model vLLM's quantization config makes MXFP8."""

from typing import Any, Literal

Share = Literal["none", "some", "all"]


def mxfp8_share(quant_config: Any) -> Share:
    """``all``: every quantized layer is MXFP8. ``some``: a mixed checkpoint. ``none``: another scheme.

    Args:
        quant_config: vLLM's ``QuantizationConfig``.
    """
    name = quant_config.get_name()
    if name == "modelopt_mxfp8":
        return "all"
    if name == "compressed-tensors":
        schemes = quant_config.target_scheme_map.values()
        return _share([quant_config._is_mxfp8(scheme.get("weights")) for scheme in schemes])
    if name == "online":
        return _share(_online(quant_config.args))
    if name == "inc":
        return "all" if quant_config.is_mxfp8 else "none"
    if name == "modelopt_mixed":
        algorithms = [str(layer.get("quant_algo")).upper() for layer in quant_config.quantized_layers.values()]
        return _share([algorithm == "MXFP8" for algorithm in algorithms])
    if name == "quark":
        return _share([_is_quark_mxfp8(weight) for weight in _quark_weights(quant_config.quant_config)])
    return "none"


def _online(args: Any) -> list[bool]:
    from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp8Dynamic

    if getattr(args, "targets", None):
        return ["mxfp8" in target for target in args.targets.values()]
    return [spec.weight == kMxfp8Dynamic for spec in (args.linear, args.moe) if spec is not None]


def _quark_weights(config: Any) -> list[Any]:
    """The weight specification of every scheme in a Quark config, which nests them by layer name and type."""
    if not isinstance(config, dict):
        return []
    found = [config["weight"]] if config.get("weight") else []
    return found + [weight for value in config.values() for weight in _quark_weights(value)]


def _is_quark_mxfp8(weight: Any) -> bool:
    parts = weight if isinstance(weight, list) else [weight]
    return len(parts) == 1 and parts[0].get("dtype") == "fp8_e4m3" and parts[0].get("scale_format") == "e8m0"


def _share(layers: list[bool]) -> Share:
    if not any(layers):
        return "none"
    return "all" if all(layers) else "some"
