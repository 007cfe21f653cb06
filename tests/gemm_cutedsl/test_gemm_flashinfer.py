"""FlashInfer as a provider of the linear layer: its function is replaced by torch, which checks what it is given."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from launch_emulation import emulated
from test_gemm_family import SHAPE

from vllm_rose_plugin.kernels import ops
from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, ScaleLayout
from vllm_rose_plugin.kernels.gemm import family, flashinfer
from vllm_rose_plugin.kernels.gemm.family import FAMILY
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.kernels.jit import chosen
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import DeviceFacts
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8, quantize_mxfp8
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import tile_scales, untile_scales

WIDE = replace(SHAPE, n=160, k=128)
TARGETS = ("sm_100a", "sm_100f", "sm_103a", "sm_107a")


def mm_mxfp8(a, b, a_descale, b_descale, out=None, out_dtype=torch.bfloat16, use_8x4_sf_layout=False, backend="auto"):
    """What FlashInfer 0.7 documents: a [m, k], b [k, n] column-major, flat 128x4 scales of exactly the padded size."""
    (m, k), n = a.shape, b.shape[1]
    assert b.shape[0] == k and a.is_contiguous() and b.stride() == (1, k) and n >= 128 and k >= 128 and m > 0
    assert a.dtype == b.dtype == torch.float8_e4m3fn and a_descale.dtype == b_descale.dtype == torch.uint8
    assert (out, use_8x4_sf_layout, backend) == (None, False, "cutlass")
    left = dequantize_mxfp8(a, untile_scales(a_descale, num_rows=m, num_blocks=k // 32)).double()
    right = dequantize_mxfp8(b.T.contiguous(), untile_scales(b_descale, num_rows=n, num_blocks=k // 32)).double()
    mm_mxfp8.calls += 1
    return (left @ right.T).to(out_dtype)


@pytest.fixture
def fake(monkeypatch):
    module = ModuleType("flashinfer")
    module.mm_mxfp8 = mm_mxfp8
    mm_mxfp8.calls = 0
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer, "installed_version", lambda: "0.7.2")
    monkeypatch.setattr(family, "device_facts", lambda index: DeviceFacts("sm_100a", 148))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(family.quantize, "warm_up", lambda **call: None)
    monkeypatch.setattr(flashinfer, "check_on_gpu", lambda what, x: None)
    with emulated(monkeypatch, "sm_100a"):
        yield mm_mxfp8


def packed_inputs(shape, seed=3):
    x, weight, _, bias = family.make_inputs(shape, seed)
    return x, weight, pack_weight(weight, target="sm_100a"), bias


@pytest.mark.parametrize("shape", [WIDE, replace(WIDE, num_tokens=1, bias=False), replace(WIDE, dtype="float16")])
def test_it_passes_the_self_check_and_is_called_before_it_serves(fake, monkeypatch, shape):
    provider = next(p for p in FAMILY.providers if p.name == "flashinfer")
    inputs = packed_inputs(shape)
    monkeypatch.setattr(family, "make_inputs", lambda shape, seed: inputs)
    kernel = provider.make(shape)
    assert fake.calls == 1
    assert FAMILY.compare(kernel(*inputs), FAMILY.reference.make(shape)(*inputs)) == "" and fake.calls == 2


@pytest.mark.parametrize("target", TARGETS)
def test_where_it_is_a_candidate(monkeypatch, target):
    supports = next(p for p in FAMILY.providers if p.name == "flashinfer").supports
    monkeypatch.setattr(flashinfer, "installed_version", lambda: "0.7.2")
    assert supports(WIDE, target)
    for other in (
        replace(WIDE, n=96),
        replace(WIDE, k=96),
        replace(WIDE, activation=Activation.BF16),
        replace(WIDE, batch_invariant=True),
    ):
        assert not supports(other, target)
    assert not supports(WIDE, "sm_90a") and not supports(WIDE, None)
    monkeypatch.setattr(flashinfer, "installed_version", lambda: "")
    assert not supports(WIDE, target)


def test_the_op_gives_the_layer_to_the_chosen_provider(fake, monkeypatch):
    x, weight, packed, bias = packed_inputs(WIDE)
    codes, scales = quantize_mxfp8(x)
    how = {"bias": bias, "packed_scales": packed.scales, "out_dtype": x.dtype}
    with monkeypatch.context() as patch:  # undone before the emulation is
        patch.setattr(chosen, "provider", lambda name, x: "flashinfer" if name == "mxfp8_linear" else "reference")
        plain = ops._mxfp8_linear(x, weight.codes, weight.scales, **how)
        tiled = ops._mxfp8_linear(codes, weight.codes, weight.scales, x_scales=tile_scales(scales), **how)
    assert fake.calls == 2 and torch.equal(plain.nan_to_num(), tiled.nan_to_num())
    expected = FAMILY.reference.make(WIDE)(x, weight, None, bias)
    assert FAMILY.compare(plain, expected) == ""


def test_no_tokens_and_what_it_refuses(fake):
    x, weight, packed, _ = packed_inputs(WIDE)
    assert flashinfer.linear(x[:0], packed).shape == (0, WIDE.n) and fake.calls == 0
    with pytest.raises(ValueError, match="one group packed from sm_100 on, got 1 for sm_90a"):
        flashinfer.linear(x, pack_weight(weight, target="sm_90a"))
    with pytest.raises(ValueError, match="tokens have K = 64"):
        flashinfer.linear(x[:, :64], packed)
    with pytest.raises(TypeError, match="pass out_dtype"):
        flashinfer.linear(Mxfp8Tensor(*quantize_mxfp8(x), ScaleLayout.ROW_MAJOR), packed)
