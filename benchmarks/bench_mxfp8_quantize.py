"""Speed of MXFP8 quantization against vLLM's and FlashInfer's quantizers, a copy, and an empty kernel.

    python benchmarks/bench_mxfp8_quantize.py [--check] [--sweep]

Writes benchmarks/results/mxfp8_quantize.csv. Bytes are those a call must move: the input once, codes and scales once.
FlashInfer 0.7.2's quantizers need sm_100 or later and are left out on a Hopper GPU.
`--check` compares the bits with the reference first; `--sweep` also times other launch shapes (not in the CSV).
"""

import argparse
import dataclasses
import itertools
import time

import quantize_timing as timing
import torch

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor, Rounding, ScaleLayout
from vllm_rose_plugin.kernels.mxfp8_quantize import launch
from vllm_rose_plugin.kernels.mxfp8_quantize.config import choose_config
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import quantize_mxfp8
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8 as reference
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import scale_shape, tile_scales

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DECODE = [(t, h) for h in (4096, 7168) for t in (1, 8, 32, 128)]
PREFILL = [(1024, 4096), (4096, 4096), (8192, 4096), (8192, 7168), (16384, 4096), (65536, 4096)]
TILED = ScaleLayout.TCGEN05_128X4
BYTE_LAYOUTS = (ScaleLayout.ROW_MAJOR, TILED)


def peers(x: list[torch.Tensor]) -> dict[str, timing.Calls]:
    """Other quantizers that give row-major scales."""
    found: dict[str, timing.Calls] = {}
    try:
        from vllm.model_executor.layers.quantization.utils import mxfp8_utils as vllm
    except ImportError as error:
        print(f"left out: vllm: {error}")
    else:
        compiled = _compiled(vllm._mxfp8_e4m3_quantize_torch)
        found["vllm_torch"] = lambda i: vllm._mxfp8_e4m3_quantize_torch(x[i])
        found["vllm_torch_compiled"] = lambda i: compiled(x[i])
        if hasattr(vllm, "_mxfp8_e4m3_quantize_triton"):
            found["vllm_triton"] = lambda i: vllm._mxfp8_e4m3_quantize_triton(x[i])
    try:
        from flashinfer import mxfp8_quantize
    except ImportError as error:
        print(f"left out: flashinfer: {error}")
    else:
        found["flashinfer"] = lambda i: mxfp8_quantize(x[i], is_sf_swizzled_layout=False, backend="cute-dsl")
    return found


_once: dict = {}


def _compiled(function):
    return _once.setdefault(function, torch.compile(function, dynamic=True))


def empty_result(num_rows: int, hidden_size: int, layout: ScaleLayout) -> Mxfp8Tensor:
    shape = scale_shape(num_rows=num_rows, hidden_size=hidden_size, layout=layout)
    codes = torch.empty((num_rows, hidden_size), dtype=torch.float8_e4m3fn, device="cuda")
    return Mxfp8Tensor(codes, torch.empty(shape, dtype=torch.uint8, device="cuda"), layout)


def bytes_moved(num_rows: int, hidden_size: int, dtype: torch.dtype, layout: ScaleLayout) -> int:
    scales = 1
    for extent in scale_shape(num_rows=num_rows, hidden_size=hidden_size, layout=layout):
        scales *= extent
    return num_rows * hidden_size * (dtype.itemsize + 1) + scales


def config_for(num_rows: int, hidden_size: int, dtype: torch.dtype, layout: ScaleLayout):
    facts = launch.device_facts(torch.cuda.current_device())
    return choose_config(
        dtype=launch.DTYPE_NAMES[dtype],
        num_rows=num_rows,
        hidden_size=hidden_size,
        layout=layout,
        rounding=Rounding.RCEIL,
        alignment=launch.widest_load(facts.target),
        sm_count=facts.sm_count,
    )


def measure(
    table: timing.Table,
    case: str,
    num_rows: int,
    hidden_size: int,
    *,
    dtype: torch.dtype = BF16,
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
    rotate: bool = True,
    with_peers: bool = True,
) -> None:
    moved = bytes_moved(num_rows, hidden_size, dtype, layout)
    sets = timing.buffer_sets(moved, rotate=rotate)
    x = [torch.randn(num_rows, hidden_size, dtype=dtype, device="cuda") for _ in range(sets)]
    out = [empty_result(num_rows, hidden_size, layout) for _ in range(sets)]
    providers: dict[str, timing.Calls] = {"rose": lambda i: quantize_mxfp8(x[i], layout=layout, out=out[i])}
    decode = num_rows <= 128
    if with_peers:
        providers |= peers(x)
    if decode:
        config = config_for(num_rows, hidden_size, dtype, layout)
        rows = num_rows if layout is ScaleLayout.ROW_MAJOR else -(-num_rows // 128) * 128
        blocks = -(-rows * config.row_vectors // (config.threads * config.unroll))
        providers |= timing.empty_kernels(blocks=blocks, threads=config.threads)
    else:
        providers["torch_copy"] = timing.copy_calls(moved, sets=sets)
    shape = f"T={num_rows};H={hidden_size}"
    measured = timing.times(providers, sets=sets, calls=max(sets, 512 if decode else 20))
    for provider, us in measured.items():
        table.add(
            case=case, provider=provider, shape=shape, us=us, moved=None if provider.startswith("empty") else moved
        )


def sweep(num_rows: int, hidden_size: int, layout: ScaleLayout) -> None:
    """Times other ways to cut up the same work."""
    moved = bytes_moved(num_rows, hidden_size, BF16, layout)
    sets = timing.buffer_sets(moved, rotate=True)
    x = [torch.randn(num_rows, hidden_size, dtype=BF16, device="cuda") for _ in range(sets)]
    out = [empty_result(num_rows, hidden_size, layout) for _ in range(sets)]
    base = config_for(num_rows, hidden_size, BF16, layout)
    target = launch.device_facts(torch.cuda.current_device()).target
    providers: dict[str, timing.Calls] = {}
    for unroll, threads in itertools.product((1, 2, 4), (128, 256, 512)):
        kernel = launch._kernel(dataclasses.replace(base, unroll=unroll, threads=threads), target)
        providers[f"unroll={unroll} threads={threads}"] = lambda i, kernel=kernel: kernel(
            x[i], out[i].codes.view(torch.uint8), out[i].scales.view(-1)
        )
    for name, us in timing.times(providers, sets=sets, calls=max(sets, 20)).items():
        print(
            f"sweep T={num_rows} H={hidden_size} {layout.value:14} {name:24} {us:8.2f} us {moved / us / 1e3:7.0f} GB/s"
        )


# ---- checks ----


def same_bits(x: torch.Tensor, *, rounding: str, layout: ScaleLayout) -> None:
    """Raises unless x gives the reference's bits, and nothing beside the result is written."""
    num_rows, hidden_size = x.shape
    codes, codes_fence = timing.poisoned((num_rows, hidden_size), torch.float8_e4m3fn)
    shape = scale_shape(num_rows=num_rows, hidden_size=hidden_size, layout=layout)
    scales, scales_fence = timing.poisoned(shape, torch.uint8)
    quantize_mxfp8(x, rounding=rounding, layout=layout, out=Mxfp8Tensor(codes, scales, layout))
    expected_codes, expected_scales = reference(x, rounding=rounding)
    if layout is TILED:
        expected_scales = tile_scales(expected_scales)
    what = f"{x.dtype} {tuple(x.shape)} strides {x.stride()} {rounding} {layout.value}"
    if not torch.equal(scales, expected_scales):
        raise AssertionError(f"scales differ: {what}: {int((scales != expected_scales).sum())}")
    differing = codes.view(torch.uint8) != expected_codes.view(torch.uint8)
    if bool(differing.any()):
        raise AssertionError(f"codes differ: {what}: {int(differing.sum())}")
    timing.check_fence(codes_fence, count=codes.numel())
    timing.check_fence(scales_fence, count=scales.numel())


def special_values() -> list[torch.Tensor]:
    """Every 16-bit pattern, beside its neighbours and shuffled; fp32 of every exponent, around 448 * 2**k, random."""
    generator = torch.Generator().manual_seed(1)
    found = []
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    for dtype in (BF16, FP16):
        for order in (torch.arange(65536), torch.randperm(65536, generator=generator)):
            found.append(patterns[order].view(dtype).view(-1, 64))
        amax = torch.rand(65536, 32, generator=generator) * 2 - 1
        amax = (amax * patterns.view(dtype).float().nan_to_num(0, 0, 0).unsqueeze(1)).to(dtype)
        amax[:, 7] = patterns.view(dtype)
        found.append(amax.view(-1, 64))
    exponents = torch.arange(256, dtype=torch.int64).unsqueeze(1) << 23
    mantissas = torch.tensor([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF, 0x400000, 0x3FFFFF], dtype=torch.int64)
    amax_bits = (exponents + mantissas).flatten()
    bits = torch.randint(0, 2**23, (len(amax_bits), 32), generator=generator)
    below = torch.randint(0, 20, bits.shape, generator=generator)
    bits = bits + ((amax_bits.unsqueeze(1) >> 23) - below).clamp(0) * 2**23
    bits = torch.minimum(bits, amax_bits.unsqueeze(1))
    bits[:, 5] = amax_bits
    bits = bits | (torch.randint(0, 2, bits.shape, generator=generator) << 31)
    found.append(bits.to(torch.int32).view(FP32).view(-1, 64))
    found.append(torch.randint(-(2**31), 2**31, (1024, 192), generator=generator).to(torch.int32).view(FP32))
    zeros = torch.zeros(4, 64)
    zeros[1:3] = -0.0
    found.append(zeros)
    return [x.cuda() for x in found]


def check() -> None:
    for x, rounding, layout in itertools.product(special_values(), ("rceil", "floor"), BYTE_LAYOUTS):
        same_bits(x, rounding=rounding, layout=layout)
    torch.manual_seed(2)
    shapes = [(t, h) for h in (192, 768, 1536, 4096, 7168) for t in (0, 1, 3, 127, 128, 129, 1000)]
    for (num_rows, hidden_size), layout in itertools.product([*shapes, (9001, 4096), (20001, 768)], BYTE_LAYOUTS):
        same_bits(torch.randn(num_rows, hidden_size, dtype=BF16, device="cuda"), rounding="rceil", layout=layout)
    for dtype, (gap, start), layout in itertools.product(
        (BF16, FP32), ((32, 0), (8, 8), (4, 4), (2, 2), (1, 1), (64, 1)), BYTE_LAYOUTS
    ):
        rows = torch.randn(77 * (1536 + gap) + start + 64, device="cuda").to(dtype)
        x = rows[start : start + 77 * (1536 + gap)].view(77, 1536 + gap)[:, :1536]
        same_bits(x, rounding="rceil", layout=layout)
    for num_rows, layout in itertools.product((128, 8192), BYTE_LAYOUTS):
        x = torch.randn(num_rows, 4096, dtype=BF16, device="cuda")
        out = empty_result(num_rows, 4096, layout)

        def call(x=x, layout=layout, out=out) -> list[torch.Tensor]:
            result = quantize_mxfp8(x, layout=layout, out=out)
            return [result.codes, result.scales]

        timing.check_replays(call)
    print("check: bits of the reference everywhere, fences whole, 1000 replays the same", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare bits with the reference first")
    parser.add_argument("--sweep", action="store_true", help="also time other launch shapes")
    parser.add_argument("--no-timing", action="store_true", help="stop after the check and the sweep")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    if arguments.check:
        check()
        print(f"check took {time.perf_counter() - begin:.1f} s", flush=True)
    if arguments.sweep:
        for layout in BYTE_LAYOUTS:
            sweep(8192, 4096, layout)
    if arguments.no_timing:
        return
    table = timing.Table("mxfp8_quantize", timing.copy_limit())
    for num_rows, hidden_size in DECODE:
        measure(table, "decode", num_rows, hidden_size, with_peers=hidden_size == 4096)
        measure(table, "decode_in_l2", num_rows, hidden_size, rotate=False, with_peers=False)
    for num_rows, hidden_size in PREFILL:
        measure(table, "prefill", num_rows, hidden_size)
    for num_rows, hidden_size in ((1, 4096), (128, 4096), (8192, 4096), (65536, 4096)):
        measure(table, "tiled_scales", num_rows, hidden_size, layout=TILED, with_peers=False)
    for dtype, name in ((FP16, "prefill_fp16"), (FP32, "prefill_fp32")):
        measure(table, name, 8192, 4096, dtype=dtype, with_peers=False)
    table.write()
    print(f"took {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
