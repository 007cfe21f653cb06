"""The MXFP8 linear kernel that vLLM selects with ``--linear-backend rose_cutedsl``."""

from typing import Any

import torch
from vllm.model_executor.kernels.linear.mxfp8 import Mxfp8LinearKernel, Mxfp8LinearLayerConfig
from vllm.model_executor.utils import replace_parameter

import vllm_rose_plugin.kernels.ops  # noqa: F401  registers torch.ops.rose
from vllm_rose_plugin.config import BACKEND
from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Activation, Rounding
from vllm_rose_plugin.kernels.mxfp8_quantize.family import FAMILY as MXFP8_QUANTIZE
from vllm_rose_plugin.kernels.mxfp8_quantize.family import QuantizeShape
from vllm_rose_plugin.layers import checkpoint_check, report, self_check, settings


class RoseCuteDslMxfp8LinearKernel(Mxfp8LinearKernel):
    """MXFP8 linear layer: E4M3 weight ``[N, K]``, E8M0 scales ``[N, K/32]``, row-major, as the checkpoint has them."""

    supports_pre_processed_weights = True

    def __init__(self, c: Mxfp8LinearLayerConfig) -> None:
        super().__init__(c)
        self.settings = settings.current()
        report.add_layer("linear", self)
        if self.settings.activation == Activation.MXFP8.value:
            dtype = str(torch.get_default_dtype()).removeprefix("torch.")  # vLLM sets the model's while it builds
            rounding = Rounding(self.settings.rounding)
            self_check.need(
                MXFP8_QUANTIZE,
                (
                    QuantizeShape(num_tokens=tokens, hidden_size=c.weight_shape[1], dtype=dtype, rounding=rounding)
                    for tokens in self_check.token_counts()
                ),
            )

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Only where it is named: ``auto`` must choose what it chooses without the plugin."""
        from vllm.config import get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        kernel_config = config.kernel_config if config is not None else None
        overrides = (kernel_config.linear_backend_per_quant or {}) if kernel_config is not None else {}
        if kernel_config is None or overrides.get("mxfp8", kernel_config.linear_backend) != BACKEND:
            return False, f"needs --linear-backend {BACKEND}"
        return True, None

    @classmethod
    def can_implement(cls, c: Mxfp8LinearLayerConfig) -> tuple[bool, str | None]:
        """K must be a multiple of 32; any N."""
        n, k = c.weight_shape
        if k % MXFP8_BLOCK:
            return False, f"K={k} of the weight [{n}, {k}] is not a multiple of {MXFP8_BLOCK}"
        if c.bmm_batch_size is not None:
            return False, f"batched matrix multiplication (batch {c.bmm_batch_size}) is not supported"
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check what was loaded; the layout stays the checkpoint's."""
        n, k = self.config.weight_shape
        name = getattr(layer, "prefix", type(layer).__name__)
        checkpoint_check.check_tensor(f"{name}.weight", layer.weight, torch.float8_e4m3fn, (n, k))
        checkpoint_check.check_tensor(f"{name}.weight_scale", layer.weight_scale, torch.uint8, (n, k // MXFP8_BLOCK))
        replace_parameter(layer, "weight", layer.weight.data.contiguous())
        replace_parameter(layer, "weight_scale", layer.weight_scale.data.contiguous())

    def apply_weights(
        self,
        layer: Any,
        x: torch.Tensor,  # [..., K] bf16/fp16/fp32
        bias: torch.Tensor | None = None,  # [N]
    ) -> torch.Tensor:
        """``x @ weight.T + bias``, ``[..., N]`` in x's dtype."""
        rows = x.reshape(-1, x.shape[-1])
        out = torch.ops.rose.mxfp8_linear(
            rows,
            layer.weight,
            layer.weight_scale,
            bias=bias,
            activation=self.settings.activation,
            rounding=self.settings.rounding,
        )
        return out.view(*x.shape[:-1], out.shape[-1])
