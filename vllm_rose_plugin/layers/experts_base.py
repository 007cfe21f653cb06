"""What our experts classes have in common: what they support, the weights, the kernels that start-up checks."""

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey, kMxfp8Dynamic, kMxfp8Static
from vllm.platforms import current_platform

from vllm_rose_plugin.config import RoseConfig
from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Activation, Rounding
from vllm_rose_plugin.kernels.gemm.checks import OUT_DTYPES
from vllm_rose_plugin.kernels.gemm.config import MAX_GROUPS
from vllm_rose_plugin.layers import expert_weights, gpu, report, settings
from vllm_rose_plugin.layers.expert_parts import ExpertParts


class RoseExperts(mk.FusedMoEExpertsModular):
    """MXFP8 experts with SwiGLU.

    Weights stay as the checkpoint has them: E4M3 ``[E_local, N, K]`` with row-major E8M0 scales ``[E_local, N, K/32]``,
    gate rows before up rows in w13. On a GPU that our kernels are compiled for, a layer also holds its scales in the
    order that its kernels read them in, 3 % of the weights more. Parameters, and with them state_dict, stay as loaded.
    Weights may lie in parts instead, on GPUs with locality domains: see ``expert_parts.py``.

    Expert load balancing moves experts in place, parameters and packed scales alike (see ``seams/expert_balance.py``).
    Nothing else is derived from them, and expert maps and ids are read at every call.
    """

    def __init__(
        self,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig,
        max_num_tokens: int | None = None,
        num_dispatchers: int | None = None,
    ) -> None:
        super().__init__(moe_config, quant_config, max_num_tokens, num_dispatchers)
        self.settings = settings.current()
        self.target = gpu.target()
        self.most_tokens = gpu.most_tokens()
        self.captured = captures_cuda_graphs()
        self._layer: Any = None  # buffers are looked up there at every call: vLLM may put others in their place
        self._parts: ExpertParts | None = None
        report.add_layer("experts", self)

    @property
    def takes_codes(self) -> bool:
        """Whether tokens may come as MXFP8 codes with row-major scales, quantized as the experts would."""
        return False

    def _gate_up_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """As in a fused epilogue: SwiGLU sees fp32 where its result is quantized at once."""
        return torch.float32 if self.settings.activation == Activation.MXFP8.value else dtype

    # What is supported; vLLM turns the first False into the reason of its refusal.

    @staticmethod
    def is_supported_config(
        cls: type[mk.FusedMoEExperts],
        moe_config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        activation_format: mk.FusedMoEActivationFormat,
    ) -> tuple[bool, str | None]:
        """vLLM's checks, then those that it has no hook for."""
        supported, reason = mk.FusedMoEExpertsModular.is_supported_config(
            cls, moe_config, weight_key, activation_key, activation_format
        )
        if not supported:
            return supported, reason
        target = gpu.target()
        if target is None and captures_cuda_graphs():
            return False, (
                "the torch reference kernels read expert counts on the host and can't be captured in CUDA graphs; "
                "add --enforce-eager"
            )
        if _is_elastic():
            return False, "kernel does not support elastic expert parallelism (--enable-elastic-ep)"
        if moe_config.has_bias:
            return False, "kernel does not support biases on experts"
        for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta"):
            if getattr(moe_config, name, None) is not None:
                return False, f"kernel does not support {name}={getattr(moe_config, name)}"
        for name in ("hidden_dim", "intermediate_size_per_partition"):
            if getattr(moe_config, name) % MXFP8_BLOCK:
                return False, f"{name}={getattr(moe_config, name)} is not a multiple of {MXFP8_BLOCK}"
        return (True, None) if target is None else _served_by_kernels(moe_config, target)

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cpu() or current_platform.is_cuda()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        return (weight_key, activation_key) == (kMxfp8Static, kMxfp8Dynamic)

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SILU

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return True  # is_supported_config names what it refuses

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check what was loaded; on a GPU, also pack the scales and warm up. Called through the weights seam."""
        expert_weights.check_loaded(layer)
        self._parts = ExpertParts.of(layer)
        if self._parts is not None:
            self._parts.pack({"w13": layer.w13_weight_scale.data, "w2": layer.w2_weight_scale.data})
        if self.target is None:
            return
        self._layer = layer
        expert_weights.pack_scales(layer, target=self.target)
        self._prepare(layer)

    def _prepare(self, layer: Any) -> None:
        """What a layer needs besides its weights, on a GPU."""
        raise NotImplementedError

    def _packed(self) -> dict[str, torch.Tensor]:
        """The packed scales, as the ops take them."""
        return {
            "w13_packed": getattr(self._layer, expert_weights.PACKED_W13),
            "w2_packed": getattr(self._layer, expert_weights.PACKED_W2),
        }


def numerics(config: RoseConfig) -> dict[str, Any]:
    """How tokens and SwiGLU's result are quantized, as kernels take it."""
    return {"activation": Activation(config.activation), "rounding": Rounding(config.rounding)}


def _served_by_kernels(moe_config: FusedMoEConfig, target: str) -> tuple[bool, str | None]:
    """What the kernels of a GPU take, beyond what the reference does."""
    if settings.current().activation == Activation.BF16.value and not target.startswith("sm_90"):
        return False, (
            f"activation=bf16 is served on sm_90 only, this is {target}: set ROSE_ACTIVATION=mxfp8 or "
            '--additional-config \'{"rose": {"activation": "mxfp8"}}\''
        )
    if moe_config.in_dtype not in OUT_DTYPES:
        return False, f"the kernel writes bf16 or fp16, not {moe_config.in_dtype}: serve with --dtype bfloat16"
    if moe_config.num_local_experts > MAX_GROUPS:
        return False, (
            f"the kernel takes up to {MAX_GROUPS} experts on a rank, here are {moe_config.num_local_experts}: "
            "add --enable-expert-parallel"
        )
    return True, None


def captures_cuda_graphs() -> bool:
    """Whether the configuration that is being built captures CUDA graphs."""
    from vllm.config import CUDAGraphMode, get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None or not current_platform.is_cuda():
        return False
    return config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE)


def _is_elastic() -> bool:
    """Whether the number of experts on a rank may change while it serves."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is not None and bool(config.parallel_config.enable_elastic_ep)
