"""What calls hand to the kernels, run on the CPU by kernels that torch emulates."""

import pytest
import torch
from launch_emulation import emulated

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, ScaleLayout, TokenFormat
from vllm_rose_plugin.kernels.gemm import launch, one_run, reference
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens, fp32_scales, unpack_tokens
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import tile_scales
from vllm_rose_plugin.kernels.swiglu_quantize.reference import swiglu_quantize

TARGETS = ["sm_90a", "sm_100a", "sm_107a"]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def random_weight(*shape: int, seed: int = 1) -> Mxfp8Tensor:
    x = random(*shape, seed=seed).float()
    spread = torch.randint(-6, 7, (*shape[:-1], 1), generator=torch.Generator().manual_seed(seed))
    return Mxfp8Tensor(*quantize_mxfp8(x * torch.exp2(spread.float())))


def assert_rows(out: torch.Tensor, expected: torch.Tensor, tolerance: float = 3e-3) -> None:
    assert out.shape == expected.shape and out.dtype == expected.dtype
    error = (out.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    assert error.max() < tolerance


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("n", "k"), [(192, 96), (96, 192), (64, 2688), (1856 // 8, 128)])
def test_linear(monkeypatch, target, n, k):
    weight, bias = random_weight(n, k), random(n, seed=3)
    with emulated(monkeypatch, target):
        packed = pack_weight(weight, target=target)
        for m in (0, 1, 7, 45, 200):
            for dtype in (torch.bfloat16, torch.float16):
                x = random(m, k, seed=m).to(dtype)
                out = launch.linear(x, packed, bias=bias, rounding="floor")
                expected = reference.mxfp8_linear(x, weight, bias=bias, rounding="floor")
                assert out.shape == (m, n) and out.dtype == dtype
                if m:
                    assert_rows(out, expected)


def test_linear_of_unquantized_tokens(monkeypatch):
    weight = random_weight(96, 160)
    with emulated(monkeypatch) as seen:
        for m in (1, 100):
            x = random(m, 160)
            out = launch.linear(x, pack_weight(weight, target="sm_90a"), activation="bf16")
            assert_rows(out, reference.mxfp8_linear(x, weight, activation="bf16"))
        assert {config.token_format for config in seen.configs} == {TokenFormat.BF16_PERMUTED}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", [ScaleLayout.ROW_MAJOR, ScaleLayout.TCGEN05_128X4])
def test_linear_of_tokens_that_are_quantized_already(monkeypatch, target, layout):
    weight = random_weight(64, 96)
    with emulated(monkeypatch, target):
        packed = pack_weight(weight, target=target)
        for m in (1, 3, 150):
            codes, scales = quantize_mxfp8(random(m, 96, seed=m))
            laid_out = scales if layout is ScaleLayout.ROW_MAJOR else tile_scales(scales)
            out = launch.linear(Mxfp8Tensor(codes, laid_out, layout), packed, out_dtype=torch.bfloat16)
            expected = reference.mxfp8_linear(Mxfp8Tensor(codes, scales), weight, out_dtype=torch.bfloat16)
            assert_rows(out, expected)
        with pytest.raises(TypeError, match="pass out_dtype"):
            launch.linear(Mxfp8Tensor(codes, scales), packed)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("activation", Activation)
def test_batch_invariant_mode_runs_one_config(monkeypatch, target, activation):
    weight = random_weight(64, 96)
    with emulated(monkeypatch, target) as seen:
        if activation is Activation.BF16 and target != "sm_90a":
            with pytest.raises(ValueError, match="activation='bf16' is served on sm_90 only"):
                launch.linear(random(3, 96), pack_weight(weight, target=target), activation=activation)
            return
        packed, x = pack_weight(weight, target=target), random(700, 96)
        outs = {
            m: launch.linear(x[:m], packed, activation=activation, batch_invariant=True) for m in (1, 40, 64, 65, 700)
        }
        assert len(set(seen.configs)) == 1
        assert all(torch.equal(out, outs[700][:m]) for m, out in outs.items())
        launch.linear(x[:1], packed, activation=activation)
        assert len(set(seen.configs)) == 2, "the usual config of one token is another"


@pytest.mark.parametrize("token_format", [TokenFormat.MXFP8_FP32_SCALES, TokenFormat.BF16_PERMUTED])
@pytest.mark.parametrize("activation", Activation)
def test_grouped_chain_on_sm90(monkeypatch, token_format, activation):
    if activation is Activation.BF16 and token_format is not TokenFormat.BF16_PERMUTED:
        return
    chain(monkeypatch, "sm_90a", token_format, activation, counts=[0, 5, 0, 1, 70, 0], gaps=[3, 0, 1, 0, 2, 0])


@pytest.mark.parametrize("target", TARGETS[1:])
def test_grouped_chain_on_sm100(monkeypatch, target):
    counts = [5, 130, 0, 128]
    gaps = [-count % 128 for count in counts]
    chain(monkeypatch, target, TokenFormat.MXFP8_TCGEN05, Activation.MXFP8, counts=counts, gaps=gaps)


def chain(monkeypatch, target, token_format, activation, *, counts, gaps):
    """w13 with SwiGLU, then w2, against the reference; `gaps` are rows after each run that belong to nobody."""
    hidden, size, groups = 96, 96, len(counts)
    offsets = [0]
    for count, gap in zip(counts, gaps, strict=True):
        offsets.append(offsets[-1] + count + gap)
    w13, w2 = random_weight(groups, 2 * size, hidden, seed=5), random_weight(groups, hidden, size, seed=6)
    x = random(offsets[-1], hidden)
    runs = {
        "expert_offsets": torch.tensor(offsets, dtype=torch.int32),
        "expert_counts": torch.tensor(counts, dtype=torch.int32),
    }
    bias = torch.randn(groups, hidden, generator=torch.Generator().manual_seed(7))
    with emulated(monkeypatch, target):
        tokens = launch.quantize_tokens(x, token_format=token_format, activation=activation, rounding="floor")
        packed = pack_weight(w13, target=target, gate_up=True)
        middle = launch.grouped_gemm_swiglu(tokens, packed, activation=activation, limit=4, rounding="floor", **runs)
        out = torch.full((offsets[-1], hidden), 77.0, dtype=torch.bfloat16)
        packed = pack_weight(w2, target=target)
        result = launch.grouped_gemm(
            middle, packed, out_dtype=torch.bfloat16, bias=bias, out=out, early_counts=True, expected_rows=9, **runs
        )
    assert result is out and middle.k == size and middle.token_format is token_format
    first = x if activation is Activation.BF16 else Mxfp8Tensor(*quantize_mxfp8(x, rounding="floor"))
    gate_up = reference.grouped_gemm(first, w13, out_dtype=torch.float32, **runs)
    between = swiglu_quantize(gate_up, activation=activation, limit=4, rounding="floor")
    expected = reference.grouped_gemm(between, w2, out_dtype=torch.float32, **runs)
    inside = torch.zeros(offsets[-1], dtype=torch.bool)
    for g, count in enumerate(counts):
        inside[offsets[g] : offsets[g] + count] = True
        expected[offsets[g] : offsets[g] + count] += bias[g]
    assert_rows(out[inside].float(), expected[inside], 5e-3)
    assert (out[~inside] == 77).all()
    if activation is Activation.MXFP8:
        values = unpack_tokens(middle)[inside]
        codes, scales = between.codes, between.scales
        assert_rows(values, reference.dequantize_mxfp8(codes, scales)[inside], 2e-2)


def test_nothing_that_a_capture_makes_is_kept(monkeypatch):
    weight, x = random_weight(64, 96), random(20_000, 96)
    with emulated(monkeypatch) as seen:
        packed = pack_weight(weight, target="sm_90a")
        seen.capturing = True
        in_capture = launch.linear(x[:5], packed)
        assert not one_run._tables
        seen.capturing = False
        one_run.prepare_device(packed.codes.device, max_rows=16_384)  # one more than the first table has
        table = one_run._tables[packed.codes.device]
        assert len(table) > 16_384
        assert torch.equal(launch.linear(x[:5], packed), in_capture)
        launch.linear(x[:16_384], packed)
        assert one_run._tables[packed.codes.device] is table
        seen.capturing = True
        first, second = (one_run.one_run(packed.codes.device, 5) for _ in range(2))
        assert first[0] is second[0] and first[0].tolist() == [0, 5] and first[1].tolist() == [5]


def test_kernels_are_looked_up_not_chosen_again(monkeypatch):
    weight = random_weight(64, 96)
    with emulated(monkeypatch, "sm_100a") as seen:
        packed = pack_weight(weight, target="sm_100a")
        for _ in range(3):
            launch.linear(random(20, 96), packed)
        info = launch._kernel.cache_info()
        assert (info.misses, info.hits) == (1, 2) and len(seen.configs) == 3
        launch.linear(random(4000, 96), packed)
        assert seen.grids[-1] > seen.grids[0]


def test_what_does_not_fit_is_named(monkeypatch):
    weight = random_weight(64, 96)
    x = random(3, 96)
    with pytest.raises(ValueError, match="the weight can't be on cpu"):
        launch.linear(x, pack_weight(weight, target="sm_90a"))
    runs = {
        "expert_offsets": torch.tensor([0, 3], dtype=torch.int32),
        "expert_counts": torch.tensor([3], dtype=torch.int32),
    }
    with emulated(monkeypatch):
        packed = pack_weight(weight, target="sm_90a")
        with pytest.raises(ValueError, match=r"tokens have K = 64, the weight \[64, 96\] needs 96"):
            launch.linear(random(3, 64), packed)
        with pytest.raises(TypeError, match="float32"):
            launch.linear(x.float(), packed)
        with pytest.raises(ValueError, match=r"bias must be \[64\] on cpu, got \(63,\)"):
            launch.linear(x, packed, bias=torch.zeros(63))
        with pytest.raises(ValueError, match="one group"):
            launch.linear(x, pack_weight(random_weight(2, 64, 96), target="sm_90a"))
        tokens = launch.quantize_tokens(x, token_format=TokenFormat.MXFP8_FP32_SCALES)
        how = {"out_dtype": torch.bfloat16, **runs}
        with pytest.raises(ValueError, match=r"expert_offsets must be contiguous torch.int32 \(2,\)"):
            launch.grouped_gemm(tokens, packed, **{**how, "expert_offsets": runs["expert_offsets"].long()})
        with pytest.raises(ValueError, match=r"expert_counts must be contiguous torch.int32 \(1,\)"):
            launch.grouped_gemm(tokens, packed, **{**how, "expert_counts": runs["expert_offsets"]})
        with pytest.raises(ValueError, match="expected_rows is 4; it must be 1 to S = 3"):
            launch.grouped_gemm(tokens, packed, expected_rows=4, **how)
        with pytest.raises(ValueError, match=r"out must be contiguous torch.bfloat16 \(3, 64\)"):
            launch.grouped_gemm(tokens, packed, out=torch.zeros(3, 64), **how)
        with pytest.raises(ValueError, match=r"bias must be contiguous torch.float32 \(1, 64\)"):
            launch.grouped_gemm(tokens, packed, bias=torch.zeros(64), **how)
        narrow = PackedTokens(tokens.token_format, tokens.data, fp32_scales(torch.zeros(3, 2, dtype=torch.uint8)), 96)
        with pytest.raises(ValueError, match=r"token scales must be contiguous torch.float32 \(3, 4\)"):
            launch.grouped_gemm(narrow, packed, **how)
        with pytest.raises(ValueError, match=r"sm_90a reads .*, got TokenFormat.MXFP8_TCGEN05"):
            launch.grouped_gemm(launch.quantize_tokens(x, token_format=TokenFormat.MXFP8_TCGEN05), packed, **how)
        with pytest.raises(ValueError, match="holds quantized tokens only"):
            launch.quantize_tokens(x, token_format=TokenFormat.MXFP8_FP32_SCALES, activation="bf16")
        with pytest.raises(ValueError, match="gate_up=True"):
            launch.grouped_gemm_swiglu(tokens, packed, **runs)
        gate_up = pack_weight(random_weight(1, 64, 96), target="sm_90a", gate_up=True)
        with pytest.raises(ValueError, match="activation='bf16' needs out_format"):
            launch.grouped_gemm_swiglu(tokens, gate_up, activation="bf16", **runs)
        with pytest.raises(ValueError, match=r"can't write TokenFormat.MXFP8_TCGEN05"):
            launch.grouped_gemm_swiglu(tokens, gate_up, out_format=TokenFormat.MXFP8_TCGEN05, **runs)
        shifted = PackedTokens(tokens.token_format, torch.zeros(400, dtype=torch.uint8)[4:292], tokens.scales, 96)
        shifted = PackedTokens(
            shifted.token_format, shifted.data.view(torch.float8_e4m3fn).view(3, 96), shifted.scales, 96
        )
        with pytest.raises(ValueError, match="tokens must start at a multiple of 16 bytes"):
            launch.grouped_gemm(shifted, packed, **how)


@pytest.mark.parametrize("target", TARGETS)
def test_the_op_under_torch_compile(monkeypatch, target):
    import vllm_rose_plugin.kernels.ops  # noqa: F401  registers it

    torch._dynamo.reset()
    weight, bias = random_weight(64, 96), random(64)
    packed = pack_weight(weight, target=target).scales
    graphs = []

    def layer(x):
        out = torch.ops.rose.mxfp8_linear(x, weight.codes, weight.scales, bias=bias, packed_scales=packed)
        return out + x[:, :64]

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    with emulated(monkeypatch, target) as seen:
        for m in (9, 3, 70):
            x = random(m, 96, seed=m)
            assert torch.equal(compiled(x), layer(x))
            assert_rows(compiled(x) - x[:, :64], reference.mxfp8_linear(x, weight, bias=bias), 2e-2)
    assert len(graphs) == 1 and seen.configs, "one graph for all numbers of tokens, and it runs our kernel"
    calls = len(seen.configs)
    assert_rows(layer(x) - x[:, :64], reference.mxfp8_linear(x, weight, bias=bias), 2e-2)
    assert len(seen.configs) == calls, "without a verdict the reference serves, whatever was packed"
