"""The ops on a GPU: the bits of the CPU wherever no sum is involved, and no hidden synchronization."""

import pytest
import torch
from moe_chain import moe_chain, random_moe

rose = torch.ops.rose
pytestmark = pytest.mark.gpu


def cuda(tree):
    return torch.utils._pytree.tree_map(lambda t: t.cuda() if isinstance(t, torch.Tensor) else t, tree)


def assert_same_bits(on_gpu, on_cpu) -> None:
    for a, b in zip(on_gpu, on_cpu, strict=True):
        assert a.is_cuda and a.shape == b.shape and a.dtype == b.dtype
        assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))


def test_quantize_gives_the_bits_of_the_cpu():
    bits = torch.randint(-(2**31), 2**31, (512, 256), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    bits[:64] &= ~0x7F000000  # subnormals beside the smallest normal numbers
    x = torch.where(bits.view(torch.float32).isfinite(), bits, 0).view(torch.float32)
    for rounding in ("rceil", "floor"):
        for dtype in (torch.float32, torch.bfloat16):
            y = x.to(dtype)
            y = torch.where(y.isfinite(), y, 0)
            on_cpu = rose.mxfp8_quantize(y, rounding=rounding)
            assert_same_bits(rose.mxfp8_quantize(y.cuda(), rounding=rounding), on_cpu)
    y[5, 40] = float("nan")
    assert rose.mxfp8_quantize(y.cuda())[1][5, 1].item() == 255


def test_all_scale_codes_through_linear():
    codes = torch.ones(256, 32).to(torch.float8_e4m3fn)
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    x = torch.zeros(2, 32)
    x[:, 0] = torch.tensor([1.0, 2.0**-12])
    for activation in ("mxfp8", "bf16"):
        out = rose.mxfp8_linear(x.cuda(), codes.cuda(), scales.cuda(), activation=activation).cpu().double()
        expected = x[:, :1].double() * torch.ldexp(torch.ones(255).double(), torch.arange(255) - 127)
        assert torch.equal(out[:, :255], expected) and out[:, 255].isnan().all()


def test_route_and_dispatch_give_the_bits_of_the_cpu_without_synchronizing():
    x, ids, weights, _, _ = random_moe(2, tokens=300, top_k=4, experts=16, dtype=torch.bfloat16)
    ids[::7, 1] = -1
    ids[5] = 99
    expert_map = torch.full((16,), -1, dtype=torch.int32)
    expert_map[::2] = torch.arange(8, dtype=torch.int32).flip(0)
    options = {"num_local_experts": 8, "alignment": 32}
    on_cpu = rose.moe_route(ids, expert_map=expert_map, **options)
    x_gpu, ids_gpu, map_gpu, weights_gpu = cuda((x, ids, expert_map, weights))
    rose.mxfp8_quantize(x_gpu)  # makes what is made once
    torch.cuda.set_sync_debug_mode("error")
    try:
        on_gpu = rose.moe_route(ids_gpu, expert_map=map_gpu, **options)
        dispatched = [rose.moe_dispatch(x_gpu, on_gpu[2], activation=a, **options) for a in ("mxfp8", "bf16")]
        combined = rose.moe_combine(dispatched[1][0], on_gpu[2], topk_weights=weights_gpu)
        quantized = rose.swiglu_quantize(dispatched[1][0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same_bits(on_gpu, on_cpu)
    for activation, result in zip(("mxfp8", "bf16"), dispatched, strict=True):
        assert_same_bits(result, rose.moe_dispatch(x, on_cpu[2], activation=activation, **options))
    expected = rose.moe_combine(dispatched[1][0].cpu(), on_cpu[2], topk_weights=weights)
    assert torch.allclose(combined.cpu().float(), expected.float(), rtol=2**-7, atol=1e-5)
    assert quantized[0].shape == (dispatched[1][0].shape[0], 32)


def test_chain_equals_that_of_the_cpu():
    for activation, tolerance in (("bf16", 1e-5), ("mxfp8", 1e-2)):
        arguments = random_moe(3, tokens=70, top_k=3, experts=8, hidden=128, intermediate=96)
        out = moe_chain(*cuda(arguments), alignment=32, activation=activation).cpu()
        expected = moe_chain(*arguments, alignment=32, activation=activation)
        error = (out - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert (error < tolerance).all(), error.max()


def test_tokens_of_nan_change_no_bit_of_the_others_and_runs_repeat():
    x, ids, weights, w13, w2 = cuda(random_moe(4, tokens=64, dtype=torch.bfloat16))
    clean = moe_chain(x, ids, weights, w13, w2, alignment=32)
    for _ in range(20):
        assert torch.equal(moe_chain(x, ids, weights, w13, w2, alignment=32), clean)
    x[3] = float("nan")
    out = moe_chain(x, ids, weights, w13, w2, alignment=32)
    others = torch.arange(64, device="cuda") != 3
    assert torch.equal(out[others], clean[others]) and out[3].isnan().all()


def test_compiled_chain_equals_eager():
    arguments = cuda(random_moe(5, tokens=33, dtype=torch.bfloat16))
    compiled = torch.compile(moe_chain, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments, alignment=32), moe_chain(*arguments, alignment=32))
