"""Speed of SwiGLU with quantization in one launch, against vLLM's silu_and_mul and a quantizer after it.

    python benchmarks/bench_swiglu_quantize.py [--check] [--sweep]

Writes benchmarks/results/swiglu_quantize.csv. Bytes are those a call must move: gate and up once, the result and its
scales once; a provider of two launches is credited with the same bytes. `--check` compares with the reference first and
prints how often an element or a scale differs; `--sweep` also times other launch shapes (not in the CSV).
"""

import argparse
import dataclasses
import itertools
import time

import quantize_timing as timing
import torch

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding, ScaleLayout
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import DTYPE_NAMES, device_facts, quantize_mxfp8, widest_load
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import scale_shape, tile_scales, untile_scales
from vllm_rose_plugin.kernels.swiglu_quantize import launch
from vllm_rose_plugin.kernels.swiglu_quantize.config import choose_config
from vllm_rose_plugin.kernels.swiglu_quantize.launch import swiglu_quantize
from vllm_rose_plugin.kernels.swiglu_quantize.reference import swiglu_quantize as reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DECODE = [(t, i) for i in (1536, 768) for t in (1, 8, 32, 128)]
PREFILL = [(4096, 1536), (16384, 1536), (65536, 768), (65536, 1536), (8192, 4096)]
TILED = ScaleLayout.TCGEN05_128X4
BYTE_LAYOUTS = (ScaleLayout.ROW_MAJOR, TILED)


def peers(x: list[torch.Tensor], *, quantized: bool) -> dict[str, timing.Calls]:
    """vLLM's activation, and quantizers after it; torch.compile of the same two."""
    num_rows, width = x[0].shape
    found: dict[str, timing.Calls] = {}
    try:
        import vllm._custom_ops  # registers torch.ops._C
        from vllm.model_executor.layers.quantization.utils import mxfp8_utils as vllm

        silu_and_mul = torch.ops._C.silu_and_mul
    except (ImportError, AttributeError) as error:
        print(f"left out: vllm: {error}")
        return found
    products = [torch.empty(num_rows, width // 2, dtype=x[0].dtype, device="cuda") for _ in x]

    def act(i: int) -> torch.Tensor:
        silu_and_mul(products[i], x[i])
        return products[i]

    if not quantized:
        return {"vllm_silu_and_mul": act}
    compiled, fused = _compiled(vllm._mxfp8_e4m3_quantize_torch), _compiled(_torch_chain)
    found["vllm_silu+torch_compiled"] = lambda i: compiled(act(i))
    found["vllm_silu+rose_quantize"] = lambda i: quantize_mxfp8(act(i))
    found["all_torch_compiled"] = lambda i: fused(x[i], vllm._mxfp8_e4m3_quantize_torch)
    if hasattr(vllm, "_mxfp8_e4m3_quantize_triton"):
        found["vllm_silu+vllm_triton"] = lambda i: vllm._mxfp8_e4m3_quantize_triton(act(i))
    try:
        from flashinfer import mxfp8_quantize
    except ImportError as error:
        print(f"left out: flashinfer: {error}")
    else:
        found["vllm_silu+flashinfer"] = lambda i: mxfp8_quantize(
            act(i), is_sf_swizzled_layout=False, backend="cute-dsl"
        )
    return found


def _torch_chain(x, quantize):
    gate, up = x.float().chunk(2, -1)
    return quantize(torch.nn.functional.silu(gate) * up)


_once: dict = {}


def _compiled(function):
    return _once.setdefault(function, torch.compile(function, dynamic=True))


def empty_result(num_rows: int, size: int, layout: ScaleLayout) -> Mxfp8Tensor:
    shape = scale_shape(num_rows=num_rows, hidden_size=size, layout=layout)
    codes = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device="cuda")
    return Mxfp8Tensor(codes, torch.empty(shape, dtype=torch.uint8, device="cuda"), layout)


def config_for(num_rows: int, size: int, activation: Activation, layout: ScaleLayout):
    facts = device_facts(torch.cuda.current_device())
    return choose_config(
        dtype=DTYPE_NAMES[BF16],
        num_rows=num_rows,
        intermediate_size=size,
        activation=activation,
        layout=layout,
        rounding=Rounding.RCEIL,
        limit=None,
        alignment=widest_load(facts.target),
        sm_count=facts.sm_count,
    )


def measure(
    table: timing.Table,
    case: str,
    num_rows: int,
    size: int,
    *,
    activation: Activation = Activation.MXFP8,
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
    rotate: bool = True,
    with_peers: bool = True,
) -> None:
    quantized = activation is Activation.MXFP8
    out_bytes = num_rows * size * 2
    if quantized:
        (scales,) = scale_shape(num_rows=num_rows, hidden_size=size, layout=TILED) if layout is TILED else (0,)
        out_bytes = num_rows * size + (scales or num_rows * size // 32)
    moved = num_rows * size * 4 + out_bytes
    sets = timing.buffer_sets(moved, rotate=rotate)
    x = [torch.randn(num_rows, 2 * size, dtype=BF16, device="cuda") for _ in range(sets)]
    out = [empty_result(num_rows, size, layout) if quantized else x[0].new_empty(num_rows, size) for _ in range(sets)]
    providers: dict[str, timing.Calls] = {
        "rose": lambda i: swiglu_quantize(x[i], activation=activation, layout=layout, out=out[i])
    }
    decode = num_rows <= 128
    if with_peers:
        providers |= peers(x, quantized=quantized)
    if decode:
        config = config_for(num_rows, size, activation, layout)
        blocks = -(-num_rows * config.row_vectors // (config.threads * config.unroll))
        providers |= timing.empty_kernels(blocks=blocks, threads=config.threads)
    else:
        providers["torch_copy"] = timing.copy_calls(moved, sets=sets)
    measured = timing.times(providers, sets=sets, calls=max(sets, 512 if decode else 20))
    for provider, us in measured.items():
        bytes_or_none = None if provider.startswith("empty") else moved
        table.add(case=case, provider=provider, shape=f"T={num_rows};I={size}", us=us, moved=bytes_or_none)


def sweep(num_rows: int, size: int) -> None:
    """Times other ways to cut up the same work."""
    moved = num_rows * size * 5 + num_rows * size // 32
    sets = timing.buffer_sets(moved, rotate=True)
    x = [torch.randn(num_rows, 2 * size, dtype=BF16, device="cuda") for _ in range(sets)]
    out = [empty_result(num_rows, size, ScaleLayout.ROW_MAJOR) for _ in range(sets)]
    base = config_for(num_rows, size, Activation.MXFP8, ScaleLayout.ROW_MAJOR)
    target = device_facts(torch.cuda.current_device()).target
    providers: dict[str, timing.Calls] = {}
    for unroll, threads in itertools.product((1, 2, 4), (128, 256, 512)):
        kernel = launch._kernel(dataclasses.replace(base, unroll=unroll, threads=threads), target)
        providers[f"unroll={unroll} threads={threads}"] = lambda i, kernel=kernel: kernel(
            x[i], out[i].codes.view(torch.uint8), out[i].scales.view(-1)
        )
    for name, us in timing.times(providers, sets=sets, calls=max(sets, 20)).items():
        print(f"sweep T={num_rows} I={size} {name:24} {us:8.2f} us {moved / us / 1e3:7.0f} GB/s")


# ---- checks ----


@dataclasses.dataclass
class Differences:
    """From the reference, over all that was compared."""

    elements: int = 0
    other_codes: int = 0
    blocks: int = 0
    other_scales: int = 0

    def __str__(self) -> str:
        return (
            f"{self.other_codes} of {self.elements} elements differ ({self.other_codes / max(1, self.elements):.1e}), "
            f"{self.other_scales} of {self.blocks} scales ({self.other_scales / max(1, self.blocks):.1e})"
        )


def compare(x: torch.Tensor, found: Differences, *, rounding: str, limit: float | None, layout: ScaleLayout) -> None:
    """Raises where an element is more than one code off, or a scale more than one, or memory beside was written."""
    num_rows, size = x.shape[0], x.shape[1] // 2
    codes, codes_fence = timing.poisoned((num_rows, size), torch.float8_e4m3fn)
    shape = scale_shape(num_rows=num_rows, hidden_size=size, layout=layout)
    flat, scales_fence = timing.poisoned(shape, torch.uint8)
    out = Mxfp8Tensor(codes, flat, layout)
    swiglu_quantize(x, rounding=rounding, limit=limit, layout=layout, out=out)
    timing.check_fence(codes_fence, count=codes.numel())
    timing.check_fence(scales_fence, count=flat.numel())
    scales = flat
    if layout is TILED:
        scales = untile_scales(flat, num_rows=num_rows, num_blocks=size // 32)
        if not torch.equal(tile_scales(scales), flat):
            raise AssertionError("what fills up the tiles of scales is not zero")
    expected = reference(x, rounding=rounding, limit=limit)
    what = f"{x.dtype} {tuple(x.shape)} {rounding} limit={limit} {layout.value}"
    off = (scales.int() - expected.scales.int()).abs()
    if bool((off > 1).any()) or bool(((scales == 255) != (expected.scales == 255)).any()):
        raise AssertionError(f"scales are more than one off: {what}: {int(off.max())}")
    same_scale = (off == 0).repeat_interleave(32, -1)
    steps = (_ordinal(codes) - _ordinal(expected.codes)).abs()
    if bool((steps[same_scale] > 1).any()):
        raise AssertionError(f"codes are more than one off: {what}: {int(steps[same_scale].max())}")
    if bool((off == 1).any()):
        a, b = (dequantize_mxfp8(c, s) for c, s in ((codes, scales), (expected.codes, expected.scales)))
        step = torch.ldexp(torch.tensor(16.0), torch.maximum(scales, expected.scales).int() - 127)  # of the top binade
        if bool(((a - b).abs() > 2 * step.to(a.device).repeat_interleave(32, -1)).any()):
            raise AssertionError(f"values differ where scales do: {what}")
    found.elements += codes.numel()
    found.other_codes += int((codes.view(torch.uint8) != expected.codes.view(torch.uint8)).sum())
    found.blocks += scales.numel()
    found.other_scales += int((off > 0).sum())


def _ordinal(codes: torch.Tensor) -> torch.Tensor:
    """Neighbouring values have neighbouring numbers; both zeros are 0."""
    bits = codes.view(torch.uint8).int()
    return torch.where(bits >= 128, 128 - bits, bits)


def compare_plain(x: torch.Tensor, *, limit: float | None) -> tuple[int, int]:
    """(elements that differ, elements); raises where one is more than one unit in the last place off (8 of fp32)."""
    y, fence = timing.poisoned((x.shape[0], x.shape[1] // 2), x.dtype)
    swiglu_quantize(x, activation="bf16", limit=limit, out=y)
    timing.check_fence(fence, count=y.numel() * y.element_size())
    expected = reference(x, activation="bf16", limit=limit)
    integer = torch.int16 if x.dtype.itemsize == 2 else torch.int32
    a, b = (t.view(integer).long() for t in (y, expected))
    a, b = (torch.where(t < 0, -(2 ** (8 * x.dtype.itemsize - 1)) - t, t) for t in (a, b))
    numbers = ~expected.isnan()
    if not torch.equal(y.isnan(), expected.isnan()):
        raise AssertionError(f"NaN differs: {x.dtype} {tuple(x.shape)}")
    off = (a - b).abs()[numbers]
    tolerance = 8 if x.dtype is FP32 else 1
    # A product below the smallest normal number has lost the bits that the last place stands for.
    tiny = (expected.abs() < torch.finfo(torch.float32).tiny * 4)[numbers]
    if bool((off[~tiny] > tolerance).any()):
        raise AssertionError(f"results are {int(off[~tiny].max())} ulp off: {x.dtype} {tuple(x.shape)} limit={limit}")
    return int((off > 0).sum()), off.numel()


def special_values() -> list[torch.Tensor]:
    """Every pair of 16-bit gates with some ups, gates around where exp leaves fp32's range, NaN, inf, zeros."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    found = []
    for dtype in (BF16, FP16):
        gates = patterns.view(dtype).view(-1, 64)
        for up in (1.0, -3.0, 1e-3, 200.0):
            found.append(torch.cat([gates, torch.full_like(gates, up)], -1))
        shuffled = patterns[torch.randperm(65536, generator=generator)].view(dtype).view(-1, 64)
        found.append(torch.cat([gates, shuffled], -1))
    edge = torch.linspace(-89.5, -86.0, 4096).view(-1, 64)
    found.append(torch.cat([edge, torch.full_like(edge, 2.0**40)], -1))
    found.append(torch.cat([edge, torch.randn(edge.shape, generator=generator) * 2.0**100], -1))
    extreme = torch.zeros(4, 64)
    extreme[1, :32], extreme[1, 32:] = -1e30, 1e30
    extreme[2, :32], extreme[2, 32:] = 200.0, 2.0
    extreme[3] = float("nan")
    found.append(extreme)
    return [x.cuda() for x in found]


def check() -> None:
    special, random = Differences(), Differences()
    for x, rounding, limit in itertools.product(special_values(), ("rceil", "floor"), (None, 7.0)):
        compare(x, special, rounding=rounding, limit=limit, layout=ScaleLayout.ROW_MAJOR)
    torch.manual_seed(3)
    shapes = [(t, i) for i in (192, 768, 1536) for t in (0, 1, 3, 127, 129, 1000)] + [(8192, 1536), (9001, 768)]
    for (num_rows, size), layout in itertools.product(shapes, BYTE_LAYOUTS):
        x = (torch.randn(num_rows, 2 * size, device="cuda") * 3).to(BF16)
        compare(x, random, rounding="rceil", limit=None, layout=layout)
    for dtype, (gap, start) in itertools.product((BF16, FP32), ((32, 0), (8, 8), (2, 2), (1, 1))):
        rows = torch.randn(77 * (1536 + gap) + start + 64, device="cuda").to(dtype)
        x = rows[start : start + 77 * (1536 + gap)].view(77, 1536 + gap)[:, :1536]
        compare(x, random, rounding="rceil", limit=None, layout=ScaleLayout.ROW_MAJOR)
    print(f"check: special values: {special}")
    print(f"check: random values: {random}")
    for dtype in (BF16, FP16, FP32):
        counts = [compare_plain((torch.randn(t, 2 * i, device="cuda") * 3).to(dtype), limit=limit)
                  for t, i, limit in ((1, 8, None), (33, 100, None), (1000, 1536, None), (7, 768, 2.0))]  # fmt: skip
        differing, elements = (sum(column) for column in zip(*counts, strict=True))
        print(f"check: unquantized {dtype}: {differing} of {elements} elements differ ({differing / elements:.1e})")
    for num_rows, layout in itertools.product((128, 8192), BYTE_LAYOUTS):
        x = torch.randn(num_rows, 3072, dtype=BF16, device="cuda")
        out = empty_result(num_rows, 1536, layout)

        def call(x=x, layout=layout, out=out) -> list[torch.Tensor]:
            result = swiglu_quantize(x, layout=layout, out=out)
            return [result.codes, result.scales]

        timing.check_replays(call)
    print("check: within one code and one scale everywhere, fences whole, 1000 replays the same", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the reference first")
    parser.add_argument("--sweep", action="store_true", help="also time other launch shapes")
    parser.add_argument("--no-timing", action="store_true", help="stop after the check and the sweep")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    if arguments.check:
        check()
        print(f"check took {time.perf_counter() - begin:.1f} s", flush=True)
    if arguments.sweep:
        sweep(16384, 1536)
    if arguments.no_timing:
        return
    table = timing.Table("swiglu_quantize", timing.copy_limit())
    for num_rows, size in DECODE:
        measure(table, "decode", num_rows, size, with_peers=size == 1536)
        measure(table, "decode_in_l2", num_rows, size, rotate=False, with_peers=False)
    for num_rows, size in PREFILL:
        measure(table, "prefill", num_rows, size)
    measure(table, "tiled_scales", 16384, 1536, layout=TILED, with_peers=False)
    for num_rows in (128, 16384):
        measure(table, "unquantized", num_rows, 1536, activation=Activation.BF16)
    table.write()
    print(f"took {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
