"""torch.ops.rose.qk_norm and qk_norm_rope on a CPU, in eager mode and compiled; the self-check's comparison."""

from dataclasses import replace

import pytest
import torch
from qk_norm_cases import random_cache, random_heads, random_weight
from torch._inductor.utils import run_and_get_code

from vllm_rose_plugin.kernels import call_counts
from vllm_rose_plugin.kernels.qk_norm import ops
from vllm_rose_plugin.kernels.qk_norm.family import FAMILY, QkNormShape
from vllm_rose_plugin.kernels.qk_norm.launch import _alignment
from vllm_rose_plugin.kernels.qk_norm.reference import normalize_heads, rotate_heads

rose = torch.ops.rose
BF16 = torch.bfloat16
Q, KV, D, T = 6, 2, 64, 5
SHAPE = QkNormShape(
    num_tokens=64, num_q_heads=8, num_kv_heads=2, head_dim=64, dtype="bfloat16", weight_dtype="bfloat16", eps=1e-6
)
SHAPES = [
    SHAPE,
    replace(SHAPE, rotary_dim=64, cos_sin_dtype="bfloat16"),
    replace(SHAPE, rotary_dim=32, interleaved=True, cos_sin_dtype="float32", dtype="float16", weight_dtype="float32"),
]


def qkv_of(tokens=T):
    return random_heads(tokens, Q + 2 * KV, D, BF16).flatten(1)


def views(qkv):
    return qkv.split([Q * D, KV * D, KV * D], -1)


WEIGHTS = random_weight(D, BF16), random_weight(D, BF16, seed=1)
POSITIONS, CACHE = torch.tensor([0, 63, 7, 7, 31]), random_cache(64, D, BF16)


@pytest.mark.parametrize("rope", [None, False, True])
def test_results_are_the_references_and_new_memory(rope):
    qkv = qkv_of()
    before, (q, k, _) = qkv.clone(), views(qkv)
    if rope is None:
        results = rose.qk_norm(q, k, *WEIGHTS, eps=1e-6)
    else:
        results = rose.qk_norm_rope(q, k, *WEIGHTS, POSITIONS, CACHE, eps=1e-6, interleaved=rope)
    for result, x, weight in zip(results, (q, k), WEIGHTS, strict=True):
        expected = normalize_heads(x.unflatten(1, (-1, D)), weight, eps=1e-6)
        if rope is not None:
            expected = rotate_heads(expected, POSITIONS, CACHE, interleaved=rope)
        assert torch.equal(result, expected.flatten(1)) and result.is_contiguous()
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("tokens", [1, T])
@pytest.mark.parametrize("rope", [False, True])
def test_opcheck(tokens, rope):
    q, k, _ = views(qkv_of(tokens))
    arguments = (q, k, *WEIGHTS, *((POSITIONS[:tokens], CACHE) if rope else ()))
    op = rose.qk_norm_rope if rope else rose.qk_norm
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    results = torch.library.opcheck(op.default, arguments, {"eps": 1e-6}, test_utils=checks)
    assert results == dict.fromkeys(checks, "SUCCESS")


def test_no_tokens():
    q, k, _ = views(qkv_of(0))
    assert [x.shape for x in rose.qk_norm(q, k, *WEIGHTS, eps=1e-6)] == [(0, Q * D), (0, KV * D)]
    rotated = rose.qk_norm_rope(q, k, *WEIGHTS, POSITIONS[:0], CACHE, eps=1e-6)
    assert [x.shape for x in rotated] == [(0, Q * D), (0, KV * D)]


def test_every_call_is_counted():
    q, k, _ = views(qkv_of())
    before = call_counts.snapshot()
    rose.qk_norm(q, k, *WEIGHTS, eps=1e-6)
    rose.qk_norm_rope(q, k, *WEIGHTS, POSITIONS, CACHE, eps=1e-6)
    after = call_counts.snapshot()
    for name in ops.SCHEMAS:
        assert after[name]["reference"] == before.get(name, {}).get("reference", 0) + 1


def test_a_second_registration_changes_nothing():
    assert ops.register() is ops.register()


@pytest.mark.slow
def test_compiled_between_two_products_nothing_is_copied():
    """Inductor hands the op views into the projection's result, and its results to the next op, as they are."""
    generator = torch.Generator().manual_seed(0)
    projection = torch.randn((Q + 2 * KV) * D, 96, generator=generator).to(BF16)
    output = torch.randn(96, (Q + 2 * KV) * D, generator=generator).to(BF16)

    def attention(x, positions):
        q, k, v = views(x @ projection.T)
        q, k = rose.qk_norm_rope(q, k, *WEIGHTS, positions, CACHE, eps=1e-6)
        return q @ output[:, : Q * D].T, k, v

    x = torch.randn(T, 96, generator=generator).to(BF16)
    with torch.inference_mode():
        expected = attention(x, POSITIONS)
        results, code = run_and_get_code(torch.compile(attention, fullgraph=True), x, POSITIONS)
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result, wanted)
    assert "qk_norm_rope" in code[0]
    assert "cpp_fused" not in code[0] and "copy_" not in code[0] and "clone" not in code[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_check_passes_the_reference_and_sees_faults(shape):
    kernel = FAMILY.reference.make(shape)
    q, k, *rest = FAMILY.make_inputs(shape, 3)
    q_expected, k_expected = expected = kernel(q, k, *rest)
    assert FAMILY.compare(kernel(q, k, *rest), expected) == ""
    off = k_expected.clone()
    off[3, 1, 5] += off[3, 1].abs().max() * 0.05
    assert "1 heads of k are off by more than rounding, the first is 1 of token 3" in FAMILY.compare(
        (q_expected, off), expected
    )
    off = q_expected.clone()
    off[0, 0, 0] = float("nan")
    assert FAMILY.compare((off, k_expected), expected) == "other elements of q are NaN"
    smallest_step = torch.nextafter(q_expected, torch.full_like(q_expected, torch.inf))
    smallest_step = torch.where(q_expected == 0, q_expected, smallest_step)  # one head is zero, and must stay so
    assert "elements of q differ" in FAMILY.compare((smallest_step, k_expected), expected)
    off = q_expected.clone()
    off[-1, 0, 7] = 1e-3
    assert "the first is 0 of token 63" in FAMILY.compare((off, k_expected), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "fault",
    [
        {"eps": 1.0},
        {"rotary_dim": 0},
        {"interleaved": None},
    ],
    ids=str,
)
def test_the_check_sees_a_kernel_of_other_constants(shape, fault):
    if "interleaved" in fault:
        fault = {"interleaved": not shape.interleaved}
    if shape.rotary_dim == 0 and "eps" not in fault:
        fault = {"eps": 1e-2}
    inputs = FAMILY.make_inputs(shape, 4)
    expected = FAMILY.reference.make(shape)(*inputs)
    assert FAMILY.compare(FAMILY.reference.make(replace(shape, **fault))(*inputs), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_inputs_lie_as_the_warm_up_assumes(shape):
    """Views into the qkv buffer, aligned so that the widest load serves; the same for the same seed."""
    q, k, *rest = FAMILY.make_inputs(shape, 5)
    assert q.stride() == k.stride() == (12 * 64, 1) and k.data_ptr() == q.data_ptr() + q.shape[1] * 2
    for x in (q, k):
        assert _alignment(x.unflatten(1, (-1, 64))) == 32
    assert (rest[2] is None) == (shape.rotary_dim == 0)
    again = FAMILY.make_inputs(shape, 5)
    bits, *others = (x.contiguous().view(torch.int16) for x in (q, again[0], FAMILY.make_inputs(shape, 6)[0]))
    assert torch.equal(bits, others[0]) and not torch.equal(bits, others[1])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_after_the_warm_up_no_call_compiles_or_loads(shape, monkeypatch):
    """Any number of tokens, views into a qkv buffer: what vLLM's steps and its captures of CUDA graphs will call."""
    from vllm_rose_plugin.kernels.jit import chosen, providers
    from vllm_rose_plugin.kernels.jit.compile import counts

    monkeypatch.setattr(chosen, "_providers", {})
    (ours,) = FAMILY.providers
    ours.make(shape)
    chosen.use(FAMILY, providers.Choice("rose", {}, None))
    made = counts.compiled, counts.loaded
    before = call_counts.snapshot()
    for tokens in (1, 2, 33, 300, 5000):
        this = replace(shape, num_tokens=tokens)
        q, k, *rest = inputs = FAMILY.make_inputs(this, tokens)
        if shape.rotary_dim:
            results = rose.qk_norm_rope(q, k, *rest, eps=shape.eps, interleaved=shape.interleaved)
        else:
            results = rose.qk_norm(q, k, *rest[:2], eps=shape.eps)
        heads = tuple(x.unflatten(1, (-1, shape.head_dim)) for x in results)
        assert FAMILY.compare(heads, FAMILY.reference.make(this)(*inputs)) == ""
    assert (counts.compiled, counts.loaded) == made
    op = "qk_norm_rope" if shape.rotary_dim else "qk_norm"
    assert call_counts.snapshot()[op]["rose"] == before.get(op, {}).get("rose", 0) + 5
