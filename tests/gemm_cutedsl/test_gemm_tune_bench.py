"""What tuning runs on a device, with kernels replaced by torch: operands, comparison, and which groups calls touch."""

from dataclasses import replace

import pytest
import torch
from launch_emulation import emulated

from vllm_rose_plugin.kernels.contracts import Activation, TokenFormat
from vllm_rose_plugin.kernels.gemm import plan, tune_bench, workspace
from vllm_rose_plugin.kernels.gemm.call import Call, heuristic
from vllm_rose_plugin.kernels.gemm.candidates import candidates
from vllm_rose_plugin.kernels.gemm.config import Epilogue
from vllm_rose_plugin.kernels.gemm.tune_bench import DeviceBench

W8A8, W8A16, TCGEN05 = TokenFormat.MXFP8_FP32_SCALES, TokenFormat.BF16_PERMUTED, TokenFormat.MXFP8_TCGEN05


def call_of(token_format: TokenFormat, *, groups: int = 3, swiglu: bool = False, bias: bool = False) -> Call:
    return Call(
        target="sm_100a" if token_format is TCGEN05 else "sm_90a",
        sm_count=132,
        num_groups=groups,
        n=192,
        k=96,
        token_format=token_format,
        epilogue=Epilogue.SWIGLU if swiglu else Epilogue.PLAIN,
        out_format=token_format if swiglu else None,
        bias=bias,
    )


@pytest.fixture
def on_cpu(monkeypatch):
    """The bench's device is the CPU, with an L2 cache of 100 kB."""
    monkeypatch.setattr(tune_bench, "_current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(tune_bench, "_l2_bytes", lambda device: 100_000)
    monkeypatch.setattr(plan.Plan, "compile", lambda self: plan.compile_config(self.config, target=self.target))


CALLS = {
    "linear w8a8": call_of(W8A8, groups=1),
    "linear w8a16 with a bias": call_of(W8A16, groups=1, bias=True),
    "linear tcgen05": call_of(TCGEN05, groups=1),
    "w2 w8a8": call_of(W8A8),
    "w2 w8a16 with a bias": call_of(W8A16, bias=True),
    "w13 w8a8": call_of(W8A8, swiglu=True),
    "w13 w8a16": call_of(W8A16, swiglu=True),
    "w13 of unquantized tokens": replace(call_of(W8A16, swiglu=True), activation=Activation.BF16),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_heuristic_agrees_with_itself_and_a_wrong_kernel_is_found(monkeypatch, on_cpu, name):
    call, rows = CALLS[name], 12
    with emulated(monkeypatch, call.target):
        bench = DeviceBench(call, rows)
        first, second, *_ = candidates(call, rows)
        assert bench.fault(first) == bench.fault(second) == ""
        right = plan.compile_config(second, target=call.target)

        def spoiled(number, code):
            """A kernel that puts a number, or an E4M3 code, into a part of row 7."""

            def kernel(*arguments):
                right(*arguments)
                out = arguments[7]
                out[7, : out.shape[1] // 4] = code if out.dtype == torch.uint8 else number

            return lambda config, *, target: kernel

        for number, code, words in ((float("nan"), 0x7F, "not finite"), (5.0, 0x3C, "off by more than")):
            monkeypatch.setattr(plan, "compile_config", spoiled(number, code))
            assert words in bench.fault(second)


def test_stream_k_brings_its_workspace_also_into_a_capture(monkeypatch, on_cpu):
    call = replace(call_of(W8A16, groups=1), n=9216, k=96)
    with emulated(monkeypatch) as seen:
        bench = DeviceBench(call, 12)
        assert list(workspace._flags) == [torch.device("cpu")], "made before any capture"
        first, *_ = found = [config for config in candidates(call, 12) if config.stream_k]
        assert len(found) >= 2 and all(bench.fault(config) == "" for config in found)
        assert not seen.configs[0].stream_k, "what others are compared with"
        assert len({flags.data_ptr() for flags in seen.flags}) == 1 and len(seen.flags) == len(found)
        seen.capturing = True
        seen.flags.clear()
        for _ in range(3):
            bench._run(first, 12, 0)
        (captured,) = {flags.data_ptr() for flags in seen.flags}
        rows = workspace._flags[torch.device("cpu")].rows
        assert 0 < captured - rows.data_ptr() < rows.nbytes, "kept flags, other ones than outside of captures"


def test_nothing_written_is_not_finite(monkeypatch, on_cpu):
    for call in (call_of(W8A8), call_of(W8A8, swiglu=True), call_of(W8A16, swiglu=True)):
        with emulated(monkeypatch, call.target):
            bench = DeviceBench(call, 12)
            assert bench.fault(heuristic(call, 12)) == ""
            monkeypatch.setattr(plan, "compile_config", lambda config, *, target: lambda *arguments: None)
            assert "not finite" in bench.fault(heuristic(call, 12))


def test_calls_rotate_through_weights_and_groups_that_the_cache_cannot_hold(monkeypatch, on_cpu):
    call = call_of(W8A8, groups=16)
    with emulated(monkeypatch):
        bench = DeviceBench(call, 2)
        touched = set()
        for weight, offsets, counts in bench._of(2).runs:
            assert counts.sum() == 2 and offsets.tolist() == [0, *counts.cumsum(0).tolist()]
            pairs = {(weight.codes.data_ptr(), group) for group in counts.nonzero().flatten().tolist()}
            assert not pairs & touched, "nothing is read again before all was"
            touched |= pairs
        assert len(touched) * call.n * call.k >= 4 * 100_000
        first, second, *_ = (counts.tolist() for _, _, counts in bench._of(30).runs)
        assert sum(first) == sum(second) == 30 and first != second and max(first) > 2, "as a router spreads them"


def test_tiled_scales_of_runs_are_found_where_the_kernel_writes_them():
    from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens
    from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8
    from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import tile_scales

    counts = [130, 0, 3]
    codes = torch.randint(0, 0x70, (133, 96), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.randint(120, 130, (133, 3), dtype=torch.uint8)
    tiled = torch.cat([tile_scales(part) for part in scales.split([130, 3])])
    found = tune_bench._values(PackedTokens(TCGEN05, codes, tiled, 96), counts)
    assert torch.equal(found, dequantize_mxfp8(codes, scales))
