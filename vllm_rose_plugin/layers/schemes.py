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
        # Its schemes are per layer; MXFP8 is E4M3 in groups of 32 with E8M0 scales.
        text = str(quant_config.quant_config).lower()
        return "some" if "fp8_e4m3" in text and "e8m0" in text else "none"
    return "none"


def _online(args: Any) -> list[bool]:
    from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp8Dynamic

    if getattr(args, "targets", None):
        return ["mxfp8" in target for target in args.targets.values()]
    return [spec.weight == kMxfp8Dynamic for spec in (args.linear, args.moe) if spec is not None]


def _share(layers: list[bool]) -> Share:
    if not any(layers):
        return "none"
    return "all" if all(layers) else "some"
