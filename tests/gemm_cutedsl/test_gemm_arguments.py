"""What launches hand to the compiled kernels is what these were compiled for: dtypes, shapes, strides, alignment."""

import contextlib

import pytest
import torch
from launch_emulation import emulated

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding, TokenFormat
from vllm_rose_plugin.kernels.gemm import launch, plan
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8

DTYPES = {
    "Uint8": torch.uint8,
    "Int32": torch.int32,
    "Float32": torch.float32,
    "BFloat16": torch.bfloat16,
    "Float16": torch.float16,
}


def check_argument(name: str, given: torch.Tensor, fake) -> None:
    assert given.dtype == DTYPES[fake.element_type.__name__], name
    for what, sizes, expected in (
        ("shape", given.shape, fake.shape),
        ("stride", given.stride(), fake.stride),
    ):
        assert len(sizes) == len(expected), (name, what)
        for size, wanted in zip(sizes, expected, strict=True):
            if isinstance(wanted, int):
                assert size == wanted or (what == "stride" and given.shape[0] == 1), (name, what, sizes, expected)
            else:
                assert size % (getattr(wanted, "divisibility", None) or 1) == 0, (name, what)
    # 64 bytes is all that torch promises on the CPU; on a GPU it is 512.
    assert given.data_ptr() % min(64, fake._assumed_align or 1) == 0, name


@contextlib.contextmanager
def checked(monkeypatch, target):
    """As :func:`emulated`, and every call is compared with what `build` describes."""
    operands = ["weight_codes", "weight_scales", "token_codes", "token_scales", "expert_offsets", "expert_counts"]
    names = [*operands, "bias", "out", "out_scales"]
    count = [0]
    with emulated(monkeypatch, target):
        inner = plan.compile_config

        def compile_config(config, *, target):
            from vllm_rose_plugin.kernels.gemm import sm90, sm100

            _, fakes = (sm90 if target.startswith("sm_90") else sm100).build(config)
            kernel = inner(config, target=target)

            def run(*arguments):
                assert len(arguments) == len(fakes) - 1  # the stream is torch's
                for name, given, fake in zip(names, arguments, fakes, strict=False):
                    check_argument(name, given, fake)
                rows = {given.shape[0] for given in (arguments[2], arguments[7])}
                assert len(rows) == 1 and isinstance(arguments[9], int) and arguments[9] >= 1
                count[0] += 1
                return kernel(*arguments)

            return run

        monkeypatch.setattr(plan, "compile_config", compile_config)
        yield count


def random_weight(*shape: int) -> Mxfp8Tensor:
    return Mxfp8Tensor(*quantize_mxfp8(torch.randn(*shape, generator=torch.Generator().manual_seed(1))))


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_107a"])
def test_linear(monkeypatch, target):
    with checked(monkeypatch, target) as count:
        for n, k in ((192, 96), (64, 192), (232, 2688)):
            packed = pack_weight(random_weight(n, k), target=target)
            for m, dtype, bias in ((1, torch.bfloat16, None), (70, torch.float16, torch.zeros(n))):
                launch.linear(torch.randn(m, k).to(dtype), packed, bias=bias)
        codes, scales = quantize_mxfp8(torch.randn(200, 2688))
        launch.linear(Mxfp8Tensor(codes, scales), packed, out_dtype=torch.float16)
    assert count[0] == 7


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_107a"])
def test_experts(monkeypatch, target):
    counts = [128, 0, 256]
    runs = {
        "expert_offsets": torch.tensor([0, 128, 128, 384], dtype=torch.int32),
        "expert_counts": torch.tensor(counts, dtype=torch.int32),
    }
    formats = [(TokenFormat.MXFP8_TCGEN05, Activation.MXFP8)]
    if target == "sm_90a":
        formats = [
            (TokenFormat.MXFP8_FP32_SCALES, Activation.MXFP8),
            (TokenFormat.BF16_PERMUTED, Activation.MXFP8),
            (TokenFormat.BF16_PERMUTED, Activation.BF16),
        ]
    with checked(monkeypatch, target) as count:
        for token_format, activation in formats:
            for size in (96, 64):
                w13 = pack_weight(random_weight(3, 2 * size, 96), target=target, gate_up=True)
                w2 = pack_weight(random_weight(3, 96, size), target=target)
                x = torch.randn(384, 96)
                tokens = launch.quantize_tokens(x, token_format=token_format, activation=activation)
                middle = launch.grouped_gemm_swiglu(
                    tokens, w13, activation=activation, rounding=Rounding.FLOOR, limit=7, **runs
                )
                bias = torch.zeros(3, 96)
                launch.grouped_gemm(middle, w2, out_dtype=torch.bfloat16, bias=bias, early_counts=True, **runs)
    assert count[0] == 4 * len(formats)
