"""What the self-check of each family lets through and what it finds. `-m gpu`: our kernels under the check itself."""

from dataclasses import replace

import pytest
import torch

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding
from vllm_rose_plugin.kernels.jit import chosen, providers
from vllm_rose_plugin.kernels.mxfp8_quantize import family as quantize
from vllm_rose_plugin.kernels.mxfp8_quantize import launch as quantize_launch
from vllm_rose_plugin.kernels.qk_norm import family as qk_norm
from vllm_rose_plugin.kernels.swiglu_quantize import family as swiglu

QUANTIZE = quantize.QuantizeShape(num_tokens=65, hidden_size=96, dtype="bfloat16", rounding=Rounding.RCEIL)
SWIGLU = swiglu.SwigluShape(
    num_tokens=65, intermediate_size=96, dtype="float32", activation=Activation.MXFP8, rounding=Rounding.RCEIL
)
NORM = qk_norm.QkNormShape(
    num_tokens=65, num_q_heads=4, num_kv_heads=2, head_dim=64, dtype="bfloat16", weight_dtype="bfloat16", eps=1e-6
)
ROPE = replace(NORM, rotary_dim=64, cos_sin_dtype="bfloat16")
CASES = {
    "quantize": (quantize.FAMILY, QUANTIZE),
    "quantize_floor": (quantize.FAMILY, replace(QUANTIZE, rounding=Rounding.FLOOR, dtype="float32")),
    "swiglu": (swiglu.FAMILY, SWIGLU),
    "swiglu_bf16": (swiglu.FAMILY, replace(SWIGLU, activation=Activation.BF16, dtype="bfloat16")),
    "qk_norm": (qk_norm.FAMILY, NORM),
    "qk_norm_rope": (qk_norm.FAMILY, ROPE),
    "qk_norm_rope_interleaved": (qk_norm.FAMILY, replace(ROPE, interleaved=True, cos_sin_dtype="float32")),
}


def tensors(result):
    if isinstance(result, Mxfp8Tensor):
        return [result.codes.view(torch.uint8), result.scales]
    return [result] if isinstance(result, torch.Tensor) else list(result)


def clone(result):
    if isinstance(result, Mxfp8Tensor):
        return Mxfp8Tensor(result.codes.clone(), result.scales.clone())
    return result.clone() if isinstance(result, torch.Tensor) else tuple(x.clone() for x in result)


def reference_result(family, shape):
    return family.reference.make(shape)(*family.make_inputs(shape, 3))


@pytest.mark.parametrize("case", CASES)
def test_inputs_repeat_with_the_seed_and_only_then(case):
    family, shape = CASES[case]
    first, again, other = (family.make_inputs(shape, seed)[0].view(torch.uint8) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("case", CASES)
def test_the_reference_agrees_with_itself(case):
    family, shape = CASES[case]
    expected = reference_result(family, shape)
    assert family.compare(clone(expected), expected) == ""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fault", ["one_element", "one_row_of_another_token", "nan"])
def test_one_wrong_row_is_found(case, fault):
    family, shape = CASES[case]
    expected = reference_result(family, shape)
    for index, tensor in enumerate(tensors(expected)):
        if fault == "nan" and not tensor.is_floating_point():
            continue
        wrong = clone(expected)
        target = tensors(wrong)[index]
        if fault == "one_element":
            target[7, ..., 5 % target.shape[-1]] = target[7, ..., 5 % target.shape[-1]] * 2 + 1
        elif fault == "nan":
            target[7, ..., -1] = float("nan")
        else:
            target[7] = target[8]
        assert family.compare(wrong, expected) != "", index


def test_a_result_of_another_kind_is_found():
    plain = reference_result(*CASES["swiglu_bf16"])
    assert "Tensor instead of" in swiglu.compare(plain, reference_result(*CASES["swiglu"]))


def test_nothing_of_ours_is_a_candidate_without_a_gpu():
    for family, shape in CASES.values():
        (rose,) = family.providers
        assert rose.name == quantize.ROSE
        assert not rose.supports(shape, None) and rose.supports(shape, "sm_90a"), family.name


def test_ops_use_the_reference_until_a_check_has_chosen(monkeypatch):
    monkeypatch.setattr(chosen, "_providers", {})
    on_gpu = type("OnGpu", (), {"is_cuda": True})()
    assert chosen.provider("mxfp8_quantize", on_gpu) == "reference"
    chosen.use(quantize.FAMILY, providers.Choice("rose", {}, None))
    assert chosen.provider("mxfp8_quantize", on_gpu) == "rose"
    assert chosen.provider("mxfp8_quantize", torch.zeros(1)) == "reference"
    assert chosen.provider("swiglu_quantize", on_gpu) == "reference"
    assert chosen.snapshot() == {"mxfp8_quantize": "rose"}


LARGE = {
    "quantize": (quantize.FAMILY, replace(QUANTIZE, num_tokens=2048, hidden_size=4096)),
    "swiglu": (swiglu.FAMILY, replace(SWIGLU, num_tokens=16384, intermediate_size=1536)),
    "qk_norm": (qk_norm.FAMILY, replace(NORM, num_tokens=2048, num_q_heads=64, num_kv_heads=4, head_dim=128)),
    "qk_norm_rope": (
        qk_norm.FAMILY,
        replace(ROPE, num_tokens=2048, num_q_heads=64, num_kv_heads=4, head_dim=128, rotary_dim=128),
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *(f"{name}-large" for name in LARGE)])
def test_our_kernel_passes_and_is_chosen(case, tmp_path, monkeypatch):
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path))
    family, shape = LARGE[case.removesuffix("-large")] if case.endswith("-large") else CASES[case]
    choice = providers.choose(family=family, shapes=[replace(shape, num_tokens=1), shape])
    assert choice.verdict.failed == {}
    assert set(choice.verdict.microseconds) == {"rose", "reference"}
    assert choice.provider == "rose"


@pytest.mark.gpu
def test_ops_run_the_chosen_provider_with_the_same_bits(monkeypatch):
    import vllm_rose_plugin.kernels.ops  # noqa: F401
    from vllm_rose_plugin.kernels import call_counts

    monkeypatch.setattr(chosen, "_providers", {})
    x = quantize.random_rows(130, 192, "bfloat16", 5).view(2, 65, 192)
    plain = torch.ops.rose.mxfp8_quantize(x)
    gated = torch.ops.rose.swiglu_quantize(x)
    before = call_counts.snapshot()
    for family in (quantize.FAMILY, swiglu.FAMILY):
        chosen.use(family, providers.Choice("rose", {}, None))
    for ours, theirs in zip(torch.ops.rose.mxfp8_quantize(x), plain, strict=True):
        assert ours.shape == theirs.shape and torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    ours = torch.ops.rose.swiglu_quantize(x)
    assert swiglu.compare(*(Mxfp8Tensor(c.flatten(0, 1), s.flatten(0, 1)) for c, s in (ours, gated))) == ""
    after = call_counts.snapshot()
    for op in ("mxfp8_quantize", "swiglu_quantize"):
        assert after[op].get("rose", 0) == before[op].get("rose", 0) + 1


DEVICES = [("sm_90a", 132), ("sm_100a", 148), ("sm_107a", 212)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["quantize", "swiglu", "qk_norm", "qk_norm_rope"])
@pytest.mark.parametrize("size", ["model", "one_of_eight_ranks"])
def test_every_kernel_that_a_step_can_launch_is_among_those_checked(case, device, size):
    """A shard has its prefill kernel begin at far more tokens than a whole model."""
    from vllm_rose_plugin.layers import self_check

    family, shape = LARGE[case]
    if size != "model":
        names = {"hidden_size": 1024, "intermediate_size": 384, "num_q_heads": 4, "num_kv_heads": 1}
        shape = replace(shape, **{name: value for name, value in names.items() if hasattr(shape, name)})
    facts = quantize_launch.DeviceFacts(*device)

    def shape_of(tokens):
        return replace(shape, num_tokens=tokens)

    largest = 32768
    counts = self_check.token_counts(family, shape_of, largest=largest, facts=facts)
    checked = {family.config_of(shape_of(tokens), *device) for tokens in counts}
    launched = {family.config_of(shape_of(tokens), *device) for tokens in range(1, largest + 1, 7)}
    assert launched <= checked and len(checked) == 2, counts


def silu(x):
    return x / (1 + torch.exp(-x))


WRONG_ACTIVATIONS = {
    "truncated": lambda p, g, u: (p.view(torch.int32) & ~0xFFFF).view(torch.float32),
    "silu_rounded": lambda p, g, u: silu(g).bfloat16().float() * u,
    "scaled": lambda p, g, u: p * 1.006,
    "inf_saturated": lambda p, g, u: p.clamp(-3.38e38, 3.38e38),
}


@pytest.mark.parametrize("fault", WRONG_ACTIVATIONS)
def test_wrong_roundings_of_swiglu_are_found(fault):
    shape = replace(SWIGLU, num_tokens=512, activation=Activation.BF16, dtype="bfloat16")
    (x,) = swiglu.make_inputs(shape, 1)
    gate, up = x.float().chunk(2, -1)
    wrong = WRONG_ACTIVATIONS[fault](silu(gate) * up, gate, up).bfloat16()
    assert swiglu.compare(wrong, swiglu.FAMILY.reference.make(shape)(x)) != ""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("num_tokens", [1, 64, 4096])
def test_another_legitimate_order_of_swiglu_passes(dtype, num_tokens):
    shape = replace(SWIGLU, num_tokens=num_tokens, activation=Activation.BF16, dtype=dtype)
    for seed in range(4):
        (x,) = swiglu.make_inputs(shape, seed)
        gate, up = x.float().chunk(2, -1)
        ours = (gate * torch.sigmoid(gate) * up).to(x.dtype)
        assert swiglu.compare(ours, swiglu.FAMILY.reference.make(shape)(x)) == "", seed


def test_a_block_that_saturates_on_one_side_only_passes_with_floor():
    product = torch.full((64, 96), 3.0)
    above, below = product.clone(), product.clone()
    above[5, 40], below[5, 40] = 512.0, 511.99997
    results = [Mxfp8Tensor(*quantize.reference.quantize_mxfp8(p, rounding="floor")) for p in (above, below)]
    assert not torch.equal(results[0].scales, results[1].scales)
    assert swiglu.compare(*results) == "" and swiglu.compare(*reversed(results)) == ""


def test_the_last_code_of_every_row_is_not_too_few():
    expected = reference_result(swiglu.FAMILY, replace(SWIGLU, num_tokens=8, intermediate_size=1536))
    wrong = clone(expected)
    wrong.codes.view(torch.uint8)[:, -1] ^= 1
    assert "differ" in swiglu.compare(wrong, expected)


def test_one_flipped_element_of_a_single_key_head_is_rounding():
    shape = replace(ROPE, num_tokens=1, num_kv_heads=1, head_dim=128, rotary_dim=128)
    expected = reference_result(qk_norm.FAMILY, shape)
    ours = clone(expected)
    for element in (3, 67):
        ours[1][0, 0, element] = torch.nextafter(ours[1][0, 0, element], torch.tensor(9e9, dtype=torch.bfloat16))
    assert qk_norm.compare(ours, expected) == ""
