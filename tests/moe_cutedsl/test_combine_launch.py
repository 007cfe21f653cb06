"""The weighted sum's host half: configs, refusals, what the self-check finds."""

from dataclasses import replace

import pytest
import torch

from vllm_rose_plugin.kernels.jit.fingerprint import config_text
from vllm_rose_plugin.kernels.moe_combine import config, family, launch, reference
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import DeviceFacts


def choose(num_tokens=1, **changes):
    arguments = {
        "hidden_size": 4096,
        "top_k": 8,
        "dtype": "bfloat16",
        "out_dtype": "bfloat16",
        "weighted": True,
        "target": "sm_90a",
        "sm_count": 132,
    }
    return config.choose_config(num_tokens=num_tokens, **{**arguments, **changes})


def test_a_thread_takes_one_vector_until_the_device_is_full():
    full = 132 * 1024 * 8 // 4096
    assert (choose(full).threads, choose(full + 1).threads) == (128, 256)
    assert choose(full, top_k=1).unroll == 1 and choose(full + 1, top_k=1).unroll == 8
    assert [choose(10**5, top_k=k).unroll for k in (1, 2, 3, 4, 5, 8, 16)] == [8, 4, 2, 2, 1, 1, 1]


def test_vectors_are_as_wide_as_target_and_registers_allow():
    assert choose().vector == 8 and choose(target="sm_100a").vector == 16
    assert choose(target="sm_100a", top_k=9).vector == 8, "16 loads of 32 bytes don't fit into registers"
    for size in (32, 64, 96, 2688, 4096, 7168):
        for target in ("sm_90a", "sm_107a"):
            made = choose(hidden_size=size, target=target)
            assert made.row_vectors * made.vector == size
    assert [choose(top_k=k).slot_bytes for k in (1, 2, 3, 4, 6, 8, 10)] == [4, 8, 4, 16, 8, 16, 8]
    assert choose(slot_alignment=8).slot_bytes == 8


@pytest.mark.parametrize("shared_dtype", [None, "float16"])
@pytest.mark.parametrize("target", ["sm_90a", "sm_100f"])
def test_warm_configs_are_all_that_aligned_calls_need(target, shared_dtype):
    for top_k, hidden_size in ((1, 96), (8, 4096), (10, 7168), (16, 2688)):
        how = {"top_k": top_k, "hidden_size": hidden_size, "target": target, "shared_dtype": shared_dtype}
        made = choose()
        common = {"dtype": made.dtype, "out_dtype": "float16", "weighted": False, "sm_count": 132}
        warm = config.warm_configs(**how, **common)
        assert len({config_text(each) for each in warm}) == len(warm) == 2
        for num_tokens in (1, 2, 127, 1000, 4096, 70000):
            assert config.choose_config(num_tokens=num_tokens, **how, **common) in warm


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, "H is 48; it must be a multiple of 32"),
        ({"top_k": 17}, "top_k is 17; it must be 1 to 16"),
        ({"dtype": "float32"}, "y is float32"),
        ({"shared_dtype": "float32"}, "shared is float32"),
        ({"out_dtype": "float32"}, "out is float32"),
        ({"num_tokens": 2**23}, "combine fewer tokens at a time"),
    ],
)
def test_what_no_kernel_takes_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        choose(**changes)


@pytest.fixture
def on_cpu(monkeypatch):
    """Calls on CPU tensors, whose kernel is the reference; the configs that were asked for."""
    configs = []

    def kernel_of(made, target):
        def kernel(y, slots, weights, shared, out):
            configs.append(made)
            assert slots.ndim == weights.ndim == 1 and weights.dtype == torch.float32
            out.copy_(
                reference.combine_tokens(
                    y,
                    slots=slots.view(-1, made.top_k),
                    topk_weights=weights.view(-1, made.top_k) if made.weighted else None,
                    shared=shared if made.shared_dtype else None,
                    out_dtype=out.dtype,
                )
            )

        return kernel

    monkeypatch.setattr(launch, "check_on_gpu", lambda what, x: None)
    monkeypatch.setattr(launch, "device_facts", lambda index: DeviceFacts("sm_100a", 132))
    monkeypatch.setattr(launch, "_kernel", kernel_of)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    launch._kernel_for.cache_clear()
    yield configs
    launch._kernel_for.cache_clear()


SHAPE = family.CombineShape(num_tokens=9, hidden_size=64, top_k=4, dtype="bfloat16", weighted=True)


def test_calls_hand_over_what_the_config_says(on_cpu):
    y, slots, weights = family.make_inputs(SHAPE, 1)
    wide = torch.randn(9, 65).bfloat16()
    for shared in (None, wide[:, :64].clone(), wide[:, 1:]):
        for topk_weights in (weights, None):
            how = {"slots": slots, "topk_weights": topk_weights, "shared": shared}
            out = launch.combine_tokens(y, out_dtype=torch.float16, **how)
            expected = reference.combine_tokens(y, out_dtype=torch.float16, **how)
            assert family.compare(out, expected) == ""
            given = torch.empty_like(y[:9])
            assert launch.combine_tokens(y, out=given, **how) is given
    assert [c.shared_bytes for c in on_cpu[-4:]] == [2] * 4 and on_cpu[4].shared_bytes == 32
    assert {c.out_dtype for c in on_cpu} == {"bfloat16", "float16"} and {c.weighted for c in on_cpu} == {True, False}
    assert launch.combine_tokens(y, slots=slots[:0]).shape == (0, 64)


def test_tensors_that_do_not_fit_are_named(on_cpu):
    y, slots, weights = family.make_inputs(SHAPE, 1)
    for error, message, change in (
        (TypeError, "slots must be torch.int32, got torch.int64", {"slots": slots.long()}),
        (ValueError, "slots must be contiguous", {"slots": slots.t().contiguous().t()}),
        (TypeError, "topk_weights must be torch.float32", {"topk_weights": weights.half()}),
        (ValueError, r"topk_weights must be contiguous \(9, 4\)", {"topk_weights": weights[:8]}),
        (ValueError, "shared must be", {"shared": y[:8]}),
        (TypeError, "shared must be torch.bfloat16 or torch.float16", {"shared": y[:9].float()}),
        (ValueError, "out must be contiguous", {"out": torch.empty(9, 65).bfloat16()[:, :64]}),
        (TypeError, "out must be torch.float16, got torch.bfloat16", {"out": y[:9], "out_dtype": torch.float16}),
        (ValueError, r"y must be \[S, H\]", {"y": y[0]}),
        (TypeError, "y must be torch.bfloat16 or torch.float16", {"y": y.float()}),
    ):
        given = {"y": y, "slots": slots, "topk_weights": weights, **change}
        with pytest.raises(error, match=message):
            launch.combine_tokens(given.pop("y"), **given)


def test_tensors_elsewhere_are_named():
    y, slots, _ = family.make_inputs(SHAPE, 1)
    with pytest.raises(ValueError, match="y can't be on cpu"):
        launch.combine_tokens(y, slots=slots)


@pytest.mark.parametrize(
    "shape", [SHAPE, replace(SHAPE, weighted=False, dtype="float16"), replace(SHAPE, num_tokens=1)]
)
def test_family_agrees_with_itself_and_ours_passes(on_cpu, monkeypatch, shape):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    inputs, again, other = (family.make_inputs(shape, seed) for seed in (1, 1, 2))
    assert torch.equal(inputs[0].view(torch.int16), again[0].view(torch.int16))
    assert not torch.equal(inputs[0].view(torch.int16), other[0].view(torch.int16))
    (rose,) = family.FAMILY.providers
    assert not rose.supports(shape, None) and rose.supports(shape, "sm_90a")
    expected = family.FAMILY.reference.make(shape)(*inputs)
    assert family.compare(rose.make(shape)(*inputs), expected) == ""
    assert on_cpu[-1].weighted == shape.weighted


@pytest.mark.parametrize("fault", ["element", "row", "nan", "no_nan", "dtype", "weight", "slot"])
def test_one_wrong_piece_is_found(fault):
    inputs = family.make_inputs(SHAPE, 4)
    expected = family.FAMILY.reference.make(SHAPE)(*inputs)
    wrong = expected.clone()
    row = next(i for i in range(9) if expected[i].isfinite().all() and (inputs[1][i] >= 0).any() and expected[i].any())
    if fault == "element":
        wrong.view(torch.int16)[row, 5] ^= 1
    elif fault == "row":
        wrong[row] = wrong[row] * 2
    elif fault == "nan":
        wrong[row, 3] = float("nan")
    elif fault == "no_nan":
        wrong = wrong.nan_to_num()
    elif fault == "dtype":
        wrong = wrong.half()
    else:
        y, slots, weights = (x.clone() for x in inputs)
        k = (slots[row] >= 0).nonzero()[0]
        if fault == "weight":
            weights[row, k] *= 2
        else:
            slots[row, k] = -1
        wrong = family.FAMILY.reference.make(SHAPE)(y, slots, weights)
    assert family.compare(wrong, expected)
