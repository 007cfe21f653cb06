"""The MXFP8 linear kernel that vLLM selects with ``--linear-backend rose_cutedsl``."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm import envs
from vllm.model_executor.kernels.linear.mxfp8 import Mxfp8LinearKernel, Mxfp8LinearLayerConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey, kMxfp8Dynamic
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

import vllm_rose_plugin.kernels.linear_split.ops
import vllm_rose_plugin.kernels.ops  # noqa: F401
from vllm_rose_plugin.config import BACKEND
from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Activation, Mxfp8Tensor, Rounding
from vllm_rose_plugin.kernels.gemm.checks import OUT_DTYPES
from vllm_rose_plugin.kernels.gemm.family import FAMILY as MXFP8_LINEAR
from vllm_rose_plugin.kernels.gemm.family import LinearShape
from vllm_rose_plugin.kernels.gemm.one_run import prepare_device
from vllm_rose_plugin.kernels.gemm.weights import HALF_FRAGMENT, pack_weight
from vllm_rose_plugin.kernels.mxfp8_quantize.family import FAMILY as MXFP8_QUANTIZE
from vllm_rose_plugin.kernels.mxfp8_quantize.family import QuantizeShape
from vllm_rose_plugin.layers import (
    checkpoint_check,
    gpu,
    kept_buffers,
    linear_parts,
    report,
    self_check,
    settings,
    tuning,
)

PACKED = "rose_weight_scale"
"""The buffer that a layer gets on a GPU. It is in no state_dict."""
SM_DOMAINS = "rose_sm_domains"
"""The buffer of a layer whose weight lies in parts on a GPU, as above: which part lies beside each SM."""
WHOLE_SETTING = 'set --additional-config \'{"rose": {"locality_linear": false}}\''
"""What keeps weights whole, which the reference computes too."""


class RoseCuteDslMxfp8LinearKernel(Mxfp8LinearKernel):
    """MXFP8 linear layer: E4M3 weight ``[N, K]``, E8M0 scales ``[N, K/32]``, row-major, as the checkpoint has them.

    On a GPU that our kernels are compiled for, a layer also holds its scales in the order that its kernel reads them
    in: N * K / 32 bytes more, 3 % of the weight. Parameters, and with them state_dict, stay the checkpoint's; with the
    setting ``locality_linear`` the weight may lie in parts instead, see ``linear_parts.py``.
    """

    def __init__(self, c: Mxfp8LinearLayerConfig) -> None:
        super().__init__(c)
        self.settings = settings.current()
        self.target = gpu.target()
        self.dtype = torch.get_default_dtype()  # the model's, which vLLM sets while it builds
        self.most_tokens = gpu.most_tokens()
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        report.add_layer("linear", self)
        if self.settings.activation == Activation.MXFP8.value:
            self_check.need(MXFP8_QUANTIZE, self._quantize_shape)

    def _quantize_shape(self, num_tokens: int) -> QuantizeShape:
        return QuantizeShape(
            num_tokens=num_tokens,
            hidden_size=self.config.weight_shape[1],
            dtype=str(self.dtype).removeprefix("torch."),
            rounding=Rounding(self.settings.rounding),
        )

    def _linear_shape(self, num_tokens: int, *, bias: bool) -> LinearShape:
        n, k = self.config.weight_shape
        return LinearShape(
            num_tokens=num_tokens,
            n=n,
            k=k,
            dtype=OUT_DTYPES[self.dtype],
            bias=bias,
            activation=Activation(self.settings.activation),
            rounding=Rounding(self.settings.rounding),
            batch_invariant=self.batch_invariant,
        )

    @property
    def supports_pre_processed_weights(self) -> bool:  # type: ignore[override]
        """Whether parameters are all that a layer needs: packed scales are none."""
        return self.target is None

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
        """K must be a multiple of 32; any N, on a GPU a multiple of 8 from 32 on. No batch invariance on a CPU."""
        n, k = c.weight_shape
        if k % MXFP8_BLOCK:
            return False, f"K={k} of the weight [{n}, {k}] is not a multiple of {MXFP8_BLOCK}"
        if c.bmm_batch_size is not None:
            return False, f"batched matrix multiplication (batch {c.bmm_batch_size}) is not supported"
        target = gpu.target()
        if target is None:
            if envs.VLLM_BATCH_INVARIANT and current_platform.is_cpu():
                return False, (
                    "VLLM_BATCH_INVARIANT=1 can't be kept on a CPU, where torch adds up one or two tokens in another "
                    "order than more: unset it"
                )
            return True, None
        if n % HALF_FRAGMENT or n < MXFP8_BLOCK:
            return False, f"N={n} of the weight [{n}, {k}] is not a multiple of {HALF_FRAGMENT} from {MXFP8_BLOCK} on"
        if settings.current().activation == Activation.BF16.value and not target.startswith("sm_90"):
            return False, (
                f"activation=bf16 is served on sm_90 only, this is {target}: set ROSE_ACTIVATION=mxfp8 or "
                '--additional-config \'{"rose": {"activation": "mxfp8"}}\''
            )
        if (dtype := torch.get_default_dtype()) not in OUT_DTYPES:
            return False, f"the kernel writes bf16 or fp16, not {dtype}: serve with --dtype bfloat16"
        return True, None

    def input_quant_key(self) -> QuantKey | None:
        """What may be quantized in front of the layer: vLLM's producers write scales as tcgen05 reads them."""
        if self.target is None or self.target.startswith("sm_90"):
            return None
        return kMxfp8Dynamic

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check what was loaded; its layout stays the checkpoint's. On a GPU, also pack the scales and ask for kernels.

        A second call packs into the memory of the first: captured graphs go on reading it.
        """
        n, k = self.config.weight_shape
        name = getattr(layer, "prefix", type(layer).__name__)
        checkpoint_check.check_tensor(f"{name}.weight", layer.weight, torch.float8_e4m3fn, (n, k))
        checkpoint_check.check_tensor(f"{name}.weight_scale", layer.weight_scale, torch.uint8, (n, k // MXFP8_BLOCK))
        if not layer.weight.is_meta:  # as that of a layer in parts is
            replace_parameter(layer, "weight", layer.weight.data.contiguous())
        replace_parameter(layer, "weight_scale", layer.weight_scale.data.contiguous())
        # A row-parallel layer with a bias adds it on one rank only.
        shapes_of = [
            partial(self._linear_shape, bias=bias) for bias in sorted({False, getattr(layer, "bias", None) is not None})
        ]
        device = layer.weight_scale.device
        if self.target is not None:
            prepare_device(device, max_rows=self.most_tokens)
            for shape_of in shapes_of:
                if self.settings.tune:
                    tuning.tune_linear(shape_of, most_tokens=self.most_tokens, device=device)
                self_check.need(MXFP8_LINEAR, shape_of)
        if self._put_into_parts(layer, tuple(shapes_of)) or self.target is None:
            return
        weight = Mxfp8Tensor(layer.weight.data, layer.weight_scale.data)
        packed = pack_weight(weight, target=self.target, out=kept_buffers.find(layer, PACKED))
        kept_buffers.put(layer, PACKED, packed.scales)

    def _put_into_parts(self, layer: Any, shapes_of: tuple[Callable[[int], LinearShape], ...]) -> bool:
        """Split the weight where that is asked for and can be had; whether it lies in parts."""
        parts = linear_parts.of(layer)
        if parts is None:
            if not self.settings.locality_linear:
                return False
            from vllm_rose_plugin.layers import linear_locality  # and with it all of the experts

            decision = linear_locality.decide(shapes_of, getattr(layer, "quant_method", None))
            if decision is None:
                return False
            parts = linear_parts.attach(layer, decision.split, decision.allocate)
            if decision.sm_domains is not None:
                kept_buffers.put(layer, SM_DOMAINS, decision.sm_domains)
        parts.fill(layer)
        if self.target is not None:
            if (sm_domains := kept_buffers.find(layer, SM_DOMAINS)) is not None:
                kept_buffers.put(layer, SM_DOMAINS, sm_domains)
            self_check.need_kernels(MXFP8_LINEAR, f"linear layers in parts: {WHOLE_SETTING}")
        return True

    def apply_weights(
        self,
        layer: Any,
        x: Any,  # [..., K] bf16/fp16/fp32, or vLLM's QuantizedActivation
        bias: torch.Tensor | None = None,  # [N]
    ) -> torch.Tensor:
        """``x @ weight.T + bias``, ``[..., N]`` in x's dtype."""
        if isinstance(x, torch.Tensor):
            rows, scales, dtype, shape = x.reshape(-1, x.shape[-1]), None, x.dtype, x.shape
        else:
            if x.quant_key != kMxfp8Dynamic:
                raise ValueError(f"{BACKEND} takes activations that are {kMxfp8Dynamic}, got {x.quant_key}")
            rows, dtype, shape = x.data.reshape(-1, x.data.shape[-1]), x.orig_dtype, x.orig_shape
            scales = x.scale if x.scale.ndim == 1 else x.scale.reshape(-1, x.scale.shape[-1])
        how = {
            "x_scales": scales,
            "bias": bias,
            "activation": self.settings.activation,
            "rounding": self.settings.rounding,
            "out_dtype": dtype,
            "batch_invariant": self.batch_invariant,
        }
        if getattr(layer, linear_parts.COUNT, 0):
            parts, sm_domains = linear_parts.operands(layer), getattr(layer, SM_DOMAINS, None)
            out = torch.ops.rose.mxfp8_linear_split(rows, *parts, sm_domains=sm_domains, **how)
        else:
            packed = getattr(layer, PACKED, None)
            out = torch.ops.rose.mxfp8_linear(rows, layer.weight, layer.weight_scale, packed_scales=packed, **how)
        return out.view(*shape[:-1], out.shape[-1])
