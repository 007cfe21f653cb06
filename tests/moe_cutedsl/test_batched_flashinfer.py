"""FlashInfer as a provider of batched experts: a stand-in checks what it is given and computes from those bytes.

FlashInfer 0.7's masked grouped GEMM as its documentation and sources describe it (``gemm/kernels/
grouped_gemm_masked_wrapper.py`` and ``grouped_gemm_masked_blackwell.py``): it takes pointers, so layouts count, and it
writes whole tiles of 128 rows. Our kernels in front of it are emulated here; ``test_masked_bits.py`` runs their PTX.
"""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from experts_emulation import aligned_bytes, emulated
from test_batched_launch import SHAPE, reference, valid_rows
from test_batched_launch import packed as pack

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.kernels.jit import chosen, providers
from vllm_rose_plugin.kernels.jit.fingerprint import config_text
from vllm_rose_plugin.kernels.moe_batched import family, flashinfer, launch, ops
from vllm_rose_plugin.kernels.moe_batched.family import FAMILY, compare, make_inputs
from vllm_rose_plugin.kernels.moe_experts.config import token_formats_of
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8
from vllm_rose_plugin.kernels.swiglu_quantize.reference import swiglu_quantize

WIDE = replace(SHAPE, intermediate_size=128)
TARGETS = ("sm_100a", "sm_103a", "sm_107a")
PROVIDER = next(p for p in FAMILY.providers if p.name == "flashinfer")


def e4m3_values():
    """float64 [256], from the format's definition."""
    code = torch.arange(256)
    exponent, mantissa = code >> 3 & 15, (code & 7).double()
    size = torch.where(exponent > 0, (1 + mantissa / 8) * torch.exp2(exponent.double() - 7), mantissa / 8 * 2.0**-6)
    size[code & 127 == 127] = float("nan")
    return torch.where(code >= 128, -size, size)


def scale_places(rows, blocks, *, tiles_down, tiles_across, group):
    """int64 [rows, blocks]: byte of every scale, from the words of FlashInfer's ``(l, rm, rk, m32, m4, k4)``."""
    r, b = torch.arange(rows).unsqueeze(1), torch.arange(blocks)
    tile = (group * tiles_down + r // 128) * tiles_across + b // 4
    return tile * 512 + r % 32 * 16 + r // 32 % 4 * 4 + b % 4


def operand(data, scales, *, group):
    """float64 [rows, K] of a group, where FlashInfer reads it."""
    rows, k, groups = data.shape
    assert data.dtype == torch.float8_e4m3fn and data.stride() == (k, 1, rows * k) and k % 32 == 0
    down, across = -(-rows // 128), -(-k // 128)
    assert scales.dtype == torch.float8_e8m0fnu and scales.shape == (32, 4, down, 4, across, groups)
    assert scales.stride() == (16, 4, across * 512, 1, 512, down * across * 512)
    assert data.data_ptr() % 16 == 0 and scales.data_ptr() % 16 == 0
    flat = torch.as_strided(scales.view(torch.uint8), (groups * down * across * 512,), (1,))
    code = flat[scale_places(rows, k // 32, tiles_down=down, tiles_across=across, group=group)]
    factor = torch.exp2(code.double() - 127).masked_fill(code == 255, float("nan"))
    codes = torch.as_strided(data.view(torch.uint8), (rows, k), (k, 1), group * rows * k + data.storage_offset())
    return e4m3_values()[codes.long()] * factor.repeat_interleave(32, 1)


class Masked:
    """``grouped_gemm_nt_masked``, with what it would have compiled."""

    def __init__(self):
        self.calls, self.compiled, self.weights = [], set(), set()

    def __call__(self, lhs, rhs, out, masked_m, *, ab_dtype, sf_dtype, c_dtype, sf_vec_size):
        assert (ab_dtype, sf_dtype, sf_vec_size) == ("float8_e4m3fn", "float8_e8m0fnu", 32)
        assert str(out.dtype) == f"torch.{c_dtype}"
        (m, k, groups), n = lhs[0].shape, rhs[0].shape[0]
        assert rhs[0].shape == (n, k, groups) and out.shape == (m, n, groups) and m > 0 and n % 8 == 0
        assert out.permute(2, 0, 1).is_contiguous() and out.data_ptr() % 16 == 0
        assert masked_m.dtype == torch.int32 and masked_m.shape == (groups,) and masked_m.data_ptr() % 16 == 0
        assert masked_m.is_contiguous() and int(masked_m.max()) <= m
        self.calls.append((m, n, k))
        self.compiled.add((m, n, k, groups, c_dtype))
        self.weights |= {rhs[0].data_ptr(), rhs[1].data_ptr()}
        for group, count in enumerate(masked_m.tolist()):
            if count:
                rows = min(m, -(-count // 128) * 128)
                product = operand(*lhs, group=group)[:rows] @ operand(*rhs, group=group).T
                out.permute(2, 0, 1)[group, :rows] = product.to(out.dtype)


def compile_config(config, *, target):
    """Our kernels in front: they read and write valid rows only."""

    def kernel(x, x_scales, counts, y, scales):
        rows, k = config.rows, config.rows.hidden_size
        each = len(x) // rows.num_experts
        assert x.shape == (len(y), k * (2 if config.swiglu else 1)) and y.shape[1] == k
        assert y.dtype == scales.dtype == torch.uint8 and (x_scales is not None) == (rows.dtype == "mxfp8")
        for group, count in enumerate(counts.tolist()):
            place = slice(group * each, group * each + count)
            if not count:
                continue
            if x_scales is not None:
                codes, found = x[place], x_scales.view(len(x), -1)[place]
            elif config.swiglu:
                codes, found = swiglu_of(x[place], rows.rounding)
            else:
                codes, found = quantize_mxfp8(x[place], rounding=rows.rounding)
            y[place] = codes.view(torch.uint8)
            where = {"tiles_down": -(-each // 128), "tiles_across": -(-k // 128), "group": group}
            padded = torch.nn.functional.pad(found, (0, -found.shape[1] % 4))
            scales[scale_places(count, padded.shape[1], **where)] = padded

    return kernel


def swiglu_of(x, rounding):
    result = swiglu_quantize(x, activation=Activation.MXFP8, rounding=rounding)
    return result.codes, result.scales


@pytest.fixture(params=["sm_100a"])
def fake(request, monkeypatch):
    module, gemm = ModuleType("flashinfer"), ModuleType("flashinfer.gemm")
    module.gemm, gemm.grouped_gemm_nt_masked = gemm, Masked()
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setitem(sys.modules, "flashinfer.gemm", gemm)
    monkeypatch.setattr(flashinfer, "installed_version", lambda: "0.7.2")
    monkeypatch.setattr(flashinfer, "check_on_gpu", lambda what, x: None)
    monkeypatch.setattr(flashinfer, "compile_config", compile_config)
    monkeypatch.setattr(flashinfer, "_ready", set())
    monkeypatch.setattr(torch, "empty", new_memory(torch.empty))
    flashinfer._kernel_for.cache_clear()
    with emulated(monkeypatch, request.param):
        yield gemm.grouped_gemm_nt_masked
    flashinfer._kernel_for.cache_clear()


def new_memory(empty):
    """torch.empty whose memory starts where that of a GPU would, and holds NaN."""

    def made(*shape, dtype=None, device=None, **how):
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        like = empty(0, dtype=dtype)
        size = torch.Size(shape).numel() * like.element_size()
        around = empty(size + 256, dtype=torch.uint8).fill_(0xFF)
        start = -around.data_ptr() % 256
        return around[start : start + size].view(like.dtype).view(shape)

    return made


def sizes_of(shape):
    return {
        "max_tokens": shape.max_tokens,
        "num_local_experts": shape.num_local_experts,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
    }


def warmed(shape, weights):
    dtype = getattr(torch, shape.dtype)
    flashinfer.warm_up(*weights, max_tokens=shape.max_tokens, dtype=dtype, rounding=shape.rounding)


def run(shape, inputs, **how):
    """A call in a workspace full of NaN that is exactly large enough, between fences; nothing is allocated."""
    weights = pack(inputs, "sm_100a")
    warmed(shape, weights)
    size = flashinfer.workspace_bytes(**sizes_of(shape))
    around = aligned_bytes(size + 512)
    out = torch.full((shape.num_local_experts, shape.max_tokens, shape.hidden_size), 7.0)
    out = out.to(getattr(torch, shape.dtype))
    counts = torch.empty(shape.num_local_experts, dtype=torch.int32).copy_(inputs.expert_counts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", None)
        flashinfer.moe_batched(
            how.pop("x", inputs.x),
            expert_counts=counts,
            w13=weights[0],
            w2=weights[1],
            out=out,
            workspace=around[:size],
            rounding=shape.rounding,
        )
    assert (around[size:] == 0xFF).all(), "memory beside was written"
    return out


def check(shape, inputs, **how):
    expected = reference(shape, inputs, out_dtype=getattr(torch, shape.dtype), **how)
    out = run(shape, inputs, **how)
    valid = valid_rows(shape, inputs.expert_counts)
    assert compare(torch.where(valid.unsqueeze(-1), out, 0), expected) == ""


@pytest.mark.parametrize("max_tokens", [1, 24, 128, 140])
@pytest.mark.parametrize("sizes", [(96, 128), (256, 384)])
def test_layer(fake, max_tokens, sizes):
    shape = replace(WIDE, max_tokens=max_tokens, hidden_size=sizes[0], intermediate_size=sizes[1])
    check(shape, make_inputs(shape, max_tokens))
    w13, w2 = (max_tokens, 2 * sizes[1], sizes[0]), (max_tokens, sizes[0], sizes[1])
    assert fake.calls == [w13, w2] * 2, "a call without tokens, then this one"


@pytest.mark.parametrize(
    "change", [{"rounding": Rounding.FLOOR}, {"dtype": "float16"}, {"num_local_experts": 1, "max_tokens": 40}]
)
def test_variants(fake, change):
    shape = replace(WIDE, **change)
    check(shape, make_inputs(shape, 3))


@pytest.mark.parametrize("counts", [[0] * 5, [300] * 5, [0, 0, 1, 0, 0], [300, 0, 129, 128, 127]])
def test_counts(fake, counts):
    shape = replace(WIDE, max_tokens=300, expected_rows=700)
    inputs, lengths = make_inputs(shape, 4), torch.tensor(counts, dtype=torch.int32)
    x = torch.randn(5, 300, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[~valid_rows(shape, lengths)] = float("nan")
    check(shape, inputs._replace(x=x, expert_counts=lengths))


def test_tokens_that_arrive_quantized(fake):
    inputs = make_inputs(WIDE, 6)
    x = Mxfp8Tensor(*quantize_mxfp8(inputs.x))
    x.codes.view(torch.uint8)[~valid_rows(WIDE, inputs.expert_counts)] = 0x7F
    check(WIDE, inputs, x=x)


def test_weights_are_those_that_our_kernel_reads(fake):
    inputs = make_inputs(WIDE, 1)
    weights = pack(inputs, "sm_100a")
    warmed(WIDE, weights)
    assert fake.weights == {part.data_ptr() for weight in weights for part in (weight.codes, weight.scales)}
    assert weights[0].codes.data_ptr() == inputs.w13.codes.data_ptr()


# The self-check and the choice


def with_weights(monkeypatch, target="sm_100a"):
    def made(shape, seed):
        inputs = make_inputs(shape, seed)
        counts = torch.empty(len(inputs.expert_counts), dtype=torch.int32).copy_(inputs.expert_counts)
        return inputs._replace(packed=pack(inputs, target), expert_counts=counts)

    monkeypatch.setattr(family, "make_inputs", made)
    return made


def test_it_passes_the_self_check_and_is_compiled_before_it_serves(fake, monkeypatch):
    made = with_weights(monkeypatch)
    shape = replace(WIDE, max_tokens=140, expected_rows=400, served_tokens=256)
    kernel = PROVIDER.make(shape)
    assert [m for m, _, _ in fake.calls] == [140, 140, 256, 256] and len(fake.compiled) == 4
    for seed in (1, 2):
        inputs = made(shape, seed)
        assert FAMILY.compare(kernel(*inputs), FAMILY.reference.make(shape)(*inputs)) == ""
    PROVIDER.make(shape)
    assert len(fake.compiled) == 4 and len(fake.calls) == 8, "another layer alike calls nothing"


def test_the_environment_pins_it(fake, monkeypatch, tmp_path):
    made = with_weights(monkeypatch)
    machine = providers.Machine(device="GB200", driver="1", target="sm_100a")
    monkeypatch.setenv("ROSE_PROVIDER_MOE_BATCHED", "flashinfer")
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path))
    choice = providers.choose(family=replace(FAMILY, make_inputs=made), shapes=[WIDE], machine=machine)
    assert choice.provider == "flashinfer" and not choice.verdict.failed
    with pytest.raises(providers.NoProviderError, match="which ROSE_PROVIDER_MOE_BATCHED pins"):
        providers.choose(family=FAMILY, shapes=[SHAPE], machine=machine)


@pytest.mark.parametrize("target", TARGETS)
def test_where_it_is_a_candidate(monkeypatch, target):
    monkeypatch.setattr(flashinfer, "installed_version", lambda: "0.7.2")
    assert PROVIDER.supports(WIDE, target)
    assert not PROVIDER.supports(SHAPE, target), "up rows begin within a tile of FlashInfer's"
    assert not PROVIDER.supports(replace(WIDE, activation=Activation.BF16), target)
    for other in ("sm_90a", "sm_100f", None):
        assert not PROVIDER.supports(WIDE, other)
    monkeypatch.setattr(flashinfer, "installed_version", lambda: "")
    assert not PROVIDER.supports(WIDE, target)


def test_the_op_gives_the_layer_to_the_chosen_provider(fake, monkeypatch):
    inputs = make_inputs(WIDE, 1)
    weights, out = pack(inputs, "sm_100a"), torch.empty(5, 24, 96, dtype=torch.bfloat16)
    warmed(WIDE, weights)
    rose = ops.workspace_bytes(target="sm_100a", activation=Activation.MXFP8, **sizes_of(WIDE))
    assert rose == launch.workspace_bytes(token_formats=token_formats_of("sm_100a", Activation.MXFP8), **sizes_of(WIDE))
    with monkeypatch.context() as patch:
        patch.setattr(chosen, "_providers", {"moe_batched": "flashinfer"})
        patch.setattr(chosen, "provider", lambda name, x: chosen.snapshot().get(name, "reference"))
        size = ops.workspace_bytes(target="sm_100a", activation=Activation.MXFP8, **sizes_of(WIDE))
        assert size == flashinfer.workspace_bytes(**sizes_of(WIDE))
        torch.ops.rose.moe_batched(
            inputs.x,
            None,
            torch.empty(5, dtype=torch.int32).copy_(inputs.expert_counts),
            inputs.w13.codes,
            inputs.w13.scales,
            inputs.w2.codes,
            inputs.w2.scales,
            out=out,
            w13_packed=weights[0].scales,
            w2_packed=weights[1].scales,
            workspace=aligned_bytes(size),
            expected_rows=40,
        )
    assert len(fake.calls) == 4
    valid = valid_rows(WIDE, inputs.expert_counts).unsqueeze(-1)
    assert compare(torch.where(valid, out, 0), reference(WIDE, inputs)) == ""


# Memory, and what doesn't fit


def test_more_tokens_never_need_less():
    needed = [flashinfer.workspace_bytes(**sizes_of(replace(WIDE, max_tokens=m))) for m in range(300)]
    assert needed == sorted(needed) and needed[0] == 0


def test_no_tokens(fake):
    inputs = make_inputs(WIDE, 1)
    weights = pack(inputs, "sm_100a")
    none = inputs.x[:, :0]
    flashinfer.moe_batched(
        none, expert_counts=inputs.expert_counts, w13=weights[0], w2=weights[1], out=none, workspace=aligned_bytes(0)
    )
    assert not fake.calls


REFUSALS = {
    "max_tokens": (lambda i: {"x": i.x[:, :23].contiguous(), "out": i.x[:, :23].clone()}, "compiled for 23 rows"),
    "out_dtype": (lambda i: {"out": i.x.half()}, "compiled for 24 rows an expert and torch.float16"),
    "counts": (lambda i: {"expert_counts": torch.empty(6, dtype=torch.int32)[1:]}, "start at a multiple of 16 bytes"),
    "workspace": (lambda i: {"workspace": aligned_bytes(256)}, "24 tokens an expert must be flat torch.uint8"),
    "workspace_start": (lambda i: {"workspace": aligned_bytes(2**18 + 8)[8:]}, "multiple of 128 bytes"),
    "gate_up": (lambda i: {"w13": pack_weight(i.w13, target="sm_100a")}, "packed with gate_up=True"),
    "hopper": (lambda i: {"w13": pack_weight(i.w13, target="sm_90a", gate_up=True)}, "from sm_100 on"),
    "narrow": (lambda i: {"w2": pack(make_inputs(SHAPE, 1), "sm_100a")[1]}, "I a multiple of 128, got I = 64"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_named(fake, case):
    inputs = make_inputs(WIDE, 1)
    weights = pack(inputs, "sm_100a")
    warmed(WIDE, weights)
    given = {
        "x": inputs.x,
        "expert_counts": torch.empty(5, dtype=torch.int32).copy_(inputs.expert_counts),
        "w13": weights[0],
        "w2": weights[1],
        "out": torch.empty(5, 24, 96, dtype=torch.bfloat16),
        "workspace": aligned_bytes(2**18),
    }
    flashinfer.moe_batched(given["x"], **{k: v for k, v in given.items() if k != "x"})
    change, message = REFUSALS[case]
    given |= change(inputs)
    with pytest.raises((ValueError, TypeError), match=message):
        flashinfer.moe_batched(given.pop("x"), **given)


def test_the_layout_of_scales_is_that_of_the_documented_dimensions():
    """Against flat bytes that count up."""
    scales = torch.arange(2 * 2 * 3 * 512, dtype=torch.int32).to(torch.uint8)
    view = flashinfer._scales(scales, num_groups=2, num_rows=130, k=288).view(torch.uint8)
    assert view.shape == (32, 4, 2, 4, 3, 2)
    for m32, m4, rm, k4, rk, group in ((0, 0, 0, 0, 0, 0), (31, 3, 1, 3, 2, 1), (5, 2, 1, 1, 1, 0)):
        place = ((group * 2 + rm) * 3 + rk) * 512 + m32 * 16 + m4 * 4 + k4
        assert view[m32, m4, rm, k4, rk, group] == scales[place]


def test_configs_have_a_text_for_the_cache():
    shape = flashinfer._shape(*pack(make_inputs(WIDE, 1), "sm_100a"))
    configs = [
        flashinfer._tokens_config(shape, "bfloat16", Rounding.RCEIL, 32),
        flashinfer._swiglu_config(shape, Rounding.RCEIL),
    ]
    assert len({config_text(config) for config in configs}) == 2
