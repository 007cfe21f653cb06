"""How calls become launches: choices, refusals, and whole calls whose kernels run as PTX on the CPU."""

import contextlib

import pytest
import route_cases as cases
import test_dispatch_bits as bits
import torch

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding, TokenFormat
from vllm_rose_plugin.kernels.jit.fingerprint import config_text
from vllm_rose_plugin.kernels.moe_dispatch import config as dispatch
from vllm_rose_plugin.kernels.moe_dispatch import family, launch
from vllm_rose_plugin.kernels.moe_dispatch.reference import max_rows
from vllm_rose_plugin.kernels.moe_route import config as route
from vllm_rose_plugin.kernels.moe_route import launch as route_launch
from vllm_rose_plugin.kernels.moe_route.family import RouteShape
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import DeviceFacts
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8

ROUTE_ARGUMENTS = ("ids", "expert_map", "workspace", "counts", "offsets", "slots", "scale_rows")
DISPATCH_ARGUMENTS = ("x", "x_scales", "topk_weights", *ROUTE_ARGUMENTS, "rows", "scales")


@pytest.fixture
def calls(monkeypatch):
    """Within, host functions take CPU tensors, and their kernels run as PTX: the configs that ran."""
    seen = []

    def runner(names):
        def compile_config(config, *, target):
            def kernel(*arguments):
                seen.append(config)
                tensors = dict(zip(names, arguments, strict=True))
                inputs = {"ids", "expert_map", "x", "x_scales", "topk_weights"}
                cases.launched(config, target, tensors, set(names) - inputs, seed=len(seen))

            return kernel

        return compile_config

    for module in (launch, route_launch):
        monkeypatch.setattr(module, "device_facts", lambda index: DeviceFacts("sm_90a", cases.SM_COUNT))
        monkeypatch.setattr(module.torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launch, "check_rows", lambda x, what: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(launch, "compile_config", runner(DISPATCH_ARGUMENTS))
    monkeypatch.setattr(route_launch, "compile_config", runner(ROUTE_ARGUMENTS))
    route_launch._kernel_for.cache_clear()
    yield seen
    route_launch._kernel_for.cache_clear()


def buffers(x, ids, *, num_experts, alignment, token_format):
    """(routed, out) as views of memory of somebody else's, full of noise."""
    num_tokens, top_k = ids.shape
    hidden_size = (x.codes if isinstance(x, Mxfp8Tensor) else x).shape[1]
    rows = max_rows(num_tokens=num_tokens, top_k=top_k, num_local_experts=num_experts, alignment=alignment)
    size = {"num_rows": rows, "hidden_size": hidden_size, "num_local_experts": num_experts}
    size["token_format"] = token_format
    out = launch.tokens_views(cases.poisoned((launch.tokens_bytes(**size),), torch.uint8), **size)
    size = {"num_tokens": num_tokens, "top_k": top_k, "num_local_experts": num_experts}
    routed = route_launch.routed_views(
        cases.poisoned((route_launch.routed_size(**size),), torch.int32),
        **size,
        with_scale_rows=dispatch.needs_scale_rows(token_format=token_format, alignment=alignment),
    )
    return routed, out


@pytest.mark.parametrize("two_launches", [False, True])
@pytest.mark.parametrize("alignment", [1, 128])
@pytest.mark.parametrize("token_format", TokenFormat)
def test_whole_calls(calls, token_format, alignment, two_launches):
    shape = family.DispatchShape(
        RouteShape(19, 4, 6, 10, alignment, "int64"),
        96,
        "bfloat16",
        token_format,
        Activation.MXFP8,
        Rounding.RCEIL,
        weighted=alignment == 1,
    )
    x, ids, expert_map, weights = map(
        lambda t: None if t is None else cases.placed(t), family.make_inputs(shape, seed=3)
    )
    routed, out = buffers(x, ids, num_experts=6, alignment=alignment, token_format=token_format)
    result = launch.route_and_dispatch(
        x,
        ids,
        num_local_experts=6,
        workspace=cases.new_workspace(6),
        token_format=token_format,
        expert_map=expert_map,
        alignment=alignment,
        topk_weights=weights,
        routed=routed,
        out=out,
        two_launches=two_launches,
    )
    assert len(calls) == 1 + two_launches and isinstance(calls[0], route.RouteConfig) == two_launches
    assert result[1].data.data_ptr() == out.data.data_ptr() and result[0].slots is routed.slots
    expected = family.by_reference(shape)(x, ids, expert_map, weights)
    assert family.compare(result, expected) == ""
    result[0].slots[3, 1] += 1
    assert "slots are others" in family.compare(result, expected)
    result[0].slots[3, 1] -= 1
    out.data.view(torch.uint8)[int(expected[0].expert_offsets[-1]) - 1, 5] ^= 1
    assert "1 of" in family.compare(result, expected)


def test_tokens_that_arrive_quantized(calls):
    x = bits.random_x(9, 64)
    codes, scales = quantize_mxfp8(x)
    quantized = Mxfp8Tensor(cases.placed(codes.view(torch.uint8)).view(torch.float8_e4m3fn), cases.placed(scales))
    ids = cases.placed(bits.random_ids(9, 2, 4))
    routed, out = buffers(quantized, ids, num_experts=4, alignment=1, token_format=TokenFormat.MXFP8_FP32_SCALES)
    how = {"num_local_experts": 4, "workspace": cases.new_workspace(4), "routed": routed, "out": out}
    launch.route_and_dispatch(quantized, ids, token_format=TokenFormat.MXFP8_FP32_SCALES, **how)
    here = routed.slots >= 0
    rows = routed.slots[here].long()
    assert torch.equal(out.data.view(torch.uint8)[rows], codes.view(torch.uint8).unsqueeze(1).expand(-1, 2, -1)[here])
    with pytest.raises(ValueError, match="arrive quantized are taken as they are and are no bf16 activations"):
        launch.route_and_dispatch(quantized, ids, token_format=TokenFormat.BF16_PERMUTED, activation="bf16", **how)
    with pytest.raises(ValueError, match="can't be multiplied by router weights"):
        launch.route_and_dispatch(
            quantized, ids, token_format=TokenFormat.MXFP8_FP32_SCALES, topk_weights=torch.ones(9, 2), **how
        )


def test_no_tokens(calls):
    x, ids = torch.empty(0, 64, dtype=torch.bfloat16), torch.empty(0, 4, dtype=torch.int32)
    routed, out = buffers(x, ids, num_experts=5, alignment=8, token_format=TokenFormat.BF16_PERMUTED)
    launch.route_and_dispatch(
        x,
        ids,
        num_local_experts=5,
        workspace=cases.new_workspace(5),
        token_format=TokenFormat.BF16_PERMUTED,
        alignment=8,
        routed=routed,
        out=out,
    )
    assert not calls and not routed.expert_counts.any() and not routed.expert_offsets.any()


def choose(num_tokens: int, **how) -> dispatch.DispatchConfig:
    how = {"hidden_size": 4096, "top_k": 8, "num_experts": 128, "alignment": 1, "sm_count": 132, **how}
    how = {"token_format": TokenFormat.MXFP8_FP32_SCALES, "load_alignment": 16, "weighted": False, **how}
    return dispatch.choose_config(
        dtype="bfloat16",
        num_tokens=num_tokens,
        activation=Activation.MXFP8,
        rounding=Rounding.RCEIL,
        id_dtype="int32",
        **how,
    )


def test_few_tokens_are_one_launch():
    assert all(choose(n).route for n in (1, 8, 128, 256, 512)) and not choose(528).route
    assert choose(256).route.items == 8 and choose(257).route.items == 16
    assert not choose(512, weighted=True).route, "two blocks to an SM then"
    assert not choose(310, hidden_size=7168).route and not choose(512, sm_count=100).route
    assert choose(5).grid(5) == 6 and choose(5, alignment=4).grid(5) == 6 + 40


def test_warm_configs_are_all_that_calls_choose():
    how = {"dtype": "bfloat16", "hidden_size": 4096, "num_experts": 64, "alignment": 1, "weighted": False}
    how |= {"activation": Activation.MXFP8, "rounding": Rounding.RCEIL, "id_dtype": "int64", "has_map": True}
    how |= {"sm_count": 132, "token_format": TokenFormat.MXFP8_FP32_SCALES}
    warm = dispatch.warm_configs(max_tokens=8192, target="sm_90a", top_k=8, **how)
    found = {
        dispatch.choose_config(num_tokens=n, load_alignment=16, top_k=8, **how) for n in (*range(1, 700), 1000, 8192)
    }
    # A config without routing doesn't know of the ids.
    assert found == set(warm) and len(warm) == 6 and len({config_text(c) for c in warm}) == 6
    few = dispatch.warm_configs(max_tokens=64, target="sm_90a", top_k=8, **how)
    assert any(c.route for c in few) and [c for c in few if not c.route] == [c for c in warm if not c.route], "timed"
    how = {"num_experts": 64, "alignment": 1, "id_dtype": "int32", "has_map": False, "scale_rows": False}
    warm_routes = route.warm_configs(max_pairs=2**20, sm_count=132, **how)
    for pairs in (1, 540_672, 540_673, 1_000_000, 2**20):
        assert route.choose_config(num_pairs=pairs, sm_count=132, **how) in warm_routes


def test_what_no_kernel_takes_is_named():
    how = {"num_experts": 8, "alignment": 1, "id_dtype": "int32", "has_map": False, "scale_rows": False}
    with pytest.raises(ValueError, match="more than the 2162688 that one launch routes"):
        route.choose_config(num_pairs=2_162_689, sm_count=132, **how)
    with pytest.raises(ValueError, match="num_local_experts is 513; it must be 1 to 512"):
        choose(4, num_experts=513)
    with pytest.raises(ValueError, match="top_k is 17; it must be 1 to 16"):
        choose(4, top_k=17)
    with pytest.raises(ValueError, match="H is 100; it must be a multiple of 32"):
        choose(4, hidden_size=100)
    with pytest.raises(ValueError, match="alignment must be at least 1 row, got 0"):
        choose(4, alignment=0)
    with pytest.raises(ValueError, match="dispatch fewer at a time"):
        choose(2**23)


def test_tensors_that_do_not_fit_are_named(calls):
    ids, workspace = torch.zeros(4, 2, dtype=torch.int32), cases.new_workspace(8)
    how = {"num_local_experts": 8, "workspace": workspace}
    with pytest.raises(TypeError, match=r"topk_ids must be int32 or int64, got torch\.int16"):
        route_launch.route_tokens(ids.short(), **how)
    with pytest.raises(ValueError, match=r"topk_ids must be \[T, top_k\]"):
        route_launch.route_tokens(ids[0], **how)
    with pytest.raises(ValueError, match="topk_ids must be contiguous"):
        route_launch.route_tokens(ids.t(), **how)
    with pytest.raises(ValueError, match="expert_map must be contiguous int32"):
        route_launch.route_tokens(ids, expert_map=torch.zeros(8), **how)
    with pytest.raises(ValueError, match="at least one expert"):
        route_launch.route_tokens(ids, expert_map=torch.zeros(0, dtype=torch.int32), **how)
    with pytest.raises(ValueError, match="need a workspace of"):
        route_launch.route_tokens(ids, num_local_experts=9, workspace=workspace)
    x = bits.random_x(5, 64)
    routed, out = buffers(x[:4], ids, num_experts=8, alignment=1, token_format=TokenFormat.BF16_PERMUTED)
    with pytest.raises(ValueError, match="x has 5 tokens"):
        launch.dispatch_tokens(x, routed=routed, token_format=TokenFormat.BF16_PERMUTED)
    with pytest.raises(ValueError, match="needs routing with with_scale_rows=True"):
        launch.dispatch_tokens(x[:4], routed=routed, token_format=TokenFormat.MXFP8_TCGEN05)
    with pytest.raises(ValueError, match="asked for were"):
        launch.dispatch_tokens(x[:4], routed=routed, token_format=TokenFormat.MXFP8_FP32_SCALES, out=out)
    with pytest.raises(ValueError, match="topk_weights must be contiguous float32"):
        launch.dispatch_tokens(
            x[:4],
            routed=routed,
            token_format=TokenFormat.BF16_PERMUTED,
            topk_weights=torch.ones(4, 3),
            out=out,
        )
    with pytest.raises(ValueError, match="starts at a multiple of 16 bytes"):
        buffer = cases.aligned((200,), torch.int32)[1:]
        route_launch.routed_views(buffer, num_tokens=4, top_k=2, num_local_experts=8, with_scale_rows=False)
