"""The kernel's PTX, run on the CPU, against the reference: every bit."""

from dataclasses import replace

import combine_cases as cases
import pytest
import torch

from vllm_rose_plugin.kernels.moe_combine.config import choose_config
from vllm_rose_plugin.kernels.moe_combine.reference import combine_tokens

pytestmark = pytest.mark.slow
MANY = 10**6
"""As many tokens make the launch shape that takes several vectors a thread."""


def config_for(y, slots, target, *, bulk=False, weighted=True, shared=None, out_dtype=None, **how):
    name = str(y.dtype).removeprefix("torch.")
    return choose_config(
        num_tokens=MANY if bulk else len(slots),
        hidden_size=y.shape[1],
        top_k=slots.shape[1],
        dtype=name,
        out_dtype=out_dtype or name,
        weighted=weighted,
        shared_dtype=None if shared is None else str(shared.dtype).removeprefix("torch."),
        target=target,
        sm_count=cases.SM_COUNT,
        **how,
    )


def check(config, target, y, slots, weights, shared, **how):
    weights = weights if config.weighted else None
    shared = shared if config.shared_dtype else None
    expected = combine_tokens(
        y, slots=slots, topk_weights=weights, shared=shared, out_dtype=getattr(torch, config.out_dtype)
    )
    cases.assert_bits(cases.run(config, target, y, slots, weights, shared, **how), expected)


@pytest.mark.parametrize("target", cases.TARGETS)
def test_both_launch_shapes_on_every_target(target):
    for num_tokens, top_k, hidden_size in ((1, 8, 4096), (5, 10, 64), (33, 1, 96), (3, 16, 32), (7, 3, 2688)):
        operands = cases.operands(num_tokens, num_tokens=num_tokens, top_k=top_k, hidden_size=hidden_size)
        check(config_for(*operands[:2], target), target, *operands)
        check(config_for(*operands[:2], target, bulk=True, shared=operands[3]), target, *operands)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("weighted", [True, False])
def test_dtypes_and_no_weights(dtype, out_dtype, weighted):
    operands = cases.operands(4, num_tokens=6, top_k=4, hidden_size=96, dtype=dtype)
    for target in ("sm_90a", "sm_100f"):
        for shared in (None, operands[3]):
            config = config_for(*operands[:2], target, weighted=weighted, shared=shared, out_dtype=out_dtype)
            check(config, target, *operands)


@pytest.mark.parametrize(("gap", "alignment"), [(0, 32), (8, 16), (4, 8), (2, 4), (1, 2)])
def test_rows_of_the_shared_output_anywhere(gap, alignment):
    operands = cases.operands(5, num_tokens=6, top_k=2, hidden_size=64)
    for target in ("sm_90a", "sm_100f"):
        config = config_for(*operands[:2], target, shared=operands[3], shared_alignment=alignment)
        assert config.shared_bytes == min(alignment, 2 * config.vector)
        check(config, target, *operands, shared_gap=gap)


@pytest.mark.parametrize(("alignment", "offset"), [(16, 0), (8, 8), (4, 4)])
@pytest.mark.parametrize("top_k", [1, 2, 6, 8])
def test_slots_and_weights_out_of_line(alignment, offset, top_k):
    operands = cases.operands(6, num_tokens=6, top_k=top_k, hidden_size=64)
    config = config_for(*operands[:2], "sm_90a", slot_alignment=alignment)
    assert config.slot_bytes <= alignment
    check(config, "sm_90a", *operands, offset=offset)


def test_products_and_sums_are_rounded_one_by_one():
    """An FMA would keep what the product's own rounding drops: one and the same last bit decides."""
    y = torch.full((2, 32), 1 + 2**-7, dtype=torch.bfloat16)
    weights = torch.tensor([[-1.0, 1 + 2**-23]])
    slots = torch.tensor([[0, 1]], dtype=torch.int32)
    expected = combine_tokens(y, slots=slots, topk_weights=weights)
    exact = (1 + 2**-7) * (1 + 2**-23) - (1 + 2**-7)
    assert expected[0, 0].item() != torch.tensor(exact).bfloat16().item()
    check(config_for(y, slots, "sm_90a"), "sm_90a", y, slots, weights, None)


def test_the_interpreter_sees_a_wrong_config():
    """The check itself can fail: a kernel for other operands is caught."""
    operands = cases.operands(7, num_tokens=5, top_k=4, hidden_size=64)
    config = replace(config_for(*operands[:2], "sm_90a"), weighted=False)
    expected = combine_tokens(operands[0], slots=operands[1], topk_weights=operands[2])
    with pytest.raises(AssertionError):
        cases.assert_bits(cases.run(config, "sm_90a", *operands[:2], None, None), expected)
