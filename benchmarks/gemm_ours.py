"""Our GEMMs as bench_gemm_grouped.py and bench_gemm_dense.py call them: through kernels/gemm/launch.py."""

import torch
from gemm_peers import MoeWeights

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, TokenFormat
from vllm_rose_plugin.kernels.gemm import launch
from vllm_rose_plugin.kernels.gemm.plan import token_format_of
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts

W8A8, W8A16 = TokenFormat.MXFP8_FP32_SCALES, TokenFormat.BF16_PERMUTED
BF16 = torch.bfloat16


def target() -> str:
    """Of this device."""
    return device_facts(torch.cuda.current_device()).target


def on_hopper() -> bool:
    """Whether there are two main loops to choose from."""
    return target().startswith("sm_90")


def choose_format(num_groups: int, num_rows: int) -> TokenFormat:
    """The heuristic's choice for quantized activations."""
    return token_format_of(target=target(), activation=Activation.MXFP8, num_groups=num_groups, num_rows=num_rows)


def quantize(x: torch.Tensor, token_format: TokenFormat) -> PackedTokens:
    """One launch: bf16 ``[S, K]`` to MXFP8 in a kernel's format."""
    return launch.quantize_tokens(x, token_format=token_format)


def unquantized(x: torch.Tensor) -> PackedTokens:
    """Permuted, in one launch."""
    return launch.quantize_tokens(x, token_format=W8A16, activation=Activation.BF16)


class Experts:
    """w13 and w2 of local experts. Tokens of one run follow those of the one before."""

    def __init__(self, weights: MoeWeights):
        self.w13 = pack_weight(Mxfp8Tensor(weights.w13, weights.w13_scales), target=target(), gate_up=True)
        self.w2 = pack_weight(Mxfp8Tensor(weights.w2, weights.w2_scales), target=target())

    def run(self, tokens: PackedTokens, offsets: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Two launches; counts were there long before."""
        self.second(self.first(tokens, offsets, counts), offsets, counts, out)
        return out

    def first(self, tokens: PackedTokens, offsets: torch.Tensor, counts: torch.Tensor) -> PackedTokens:
        """w13 and SwiGLU."""
        return launch.grouped_gemm_swiglu(
            tokens, self.w13, expert_offsets=offsets, expert_counts=counts, early_counts=True
        )

    def second(
        self, tokens: PackedTokens, offsets: torch.Tensor, counts: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """w2."""
        return launch.grouped_gemm(
            tokens, self.w2, expert_offsets=offsets, expert_counts=counts, out_dtype=BF16, out=out, early_counts=True
        )


class Linear:
    """A linear layer: one group."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor):
        self.weight = pack_weight(Mxfp8Tensor(codes, scales), target=target())

    def gemm(
        self, tokens: PackedTokens, offsets: torch.Tensor, counts: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """One launch, on tokens in the kernel's format."""
        return launch.grouped_gemm(
            tokens,
            self.weight,
            expert_offsets=offsets,
            expert_counts=counts,
            out_dtype=BF16,
            out=out,
            early_counts=True,
        )

    def __call__(self, x: torch.Tensor, *, unquantized: bool = False) -> torch.Tensor:
        """As the linear backend calls it: bf16 in and out.

        Args:
            unquantized: activations stay bf16.
        """
        activation = Activation.BF16 if unquantized else Activation.MXFP8
        return launch.linear(x, self.weight, activation=activation)


def one_run(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(offsets, counts) of a linear layer."""
    offsets = torch.tensor([0, num_rows], dtype=torch.int32, device="cuda")
    return offsets, offsets[1:].clone()
