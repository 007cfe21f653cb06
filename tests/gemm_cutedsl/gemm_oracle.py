"""MXFP8 GEMM in float64 on dequantized operands, how far from it a kernel may be, and inputs that find faults.

Shares no code with the plugin: numbers are built from the definitions of E4M3 and E8M0. Everything is torch and runs
where its operands lie, so that large products can be formed on a GPU.

The bound. A kernel forms ``y = sum(a_k * w_k) + bias`` and rounds once. With ``S = sum(|a_k| * |w_k|) + |bias|``:

- rounding to the result's dtype costs half a unit in the last place, 2**-8 |y| for bf16 and 2**-11 |y| for fp16;
- a matrix instruction adds 16 (bf16) or 32 (FP8) products to a float32 number. No partial sum exceeds S, so every
  instruction loses at most 2**-23 S: ``2**-23 (steps + 8) S``, with 8 for the bias, the epilogue and the scales. This
  is what cancellation costs: where S is large beside |y|, so is the error that is allowed;
- Hopper's FP8 instruction aligns the 32 products of a block to the largest and keeps 13 bits below it. Truncations have
  either sign, so blocks add up like a random walk: ``16 * 2**-13 T``, T the root of the sum of squares over blocks of
  (largest |a|) * (largest |w|). 16 is about five standard deviations of 32 truncations;
- numbers that the formats can't hold: a product of two scales below 2**-149, a bf16 operand below 2**-133.

Rows and columns are judged by their L2 norms too, with half the accumulation and 6 in place of 16: one product of 4096
that is lost, counted twice or scaled by a neighbour's scale exceeds that several times over.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch

BLOCK = 32
NAN_SCALE = 255
_E4M3_STEP = 2.0**-9
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
SMALLEST = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float32: 2.0**-149}
"""Smallest positive number of each dtype."""
_LARGEST_BLOCK_SUM = 448.0 * 448.0 * BLOCK


def e4m3_table(device: torch.device | str = "cpu") -> torch.Tensor:
    """float64 [256], NaN for 0x7F and 0xFF."""
    code = torch.arange(256, dtype=torch.int64)
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = torch.ldexp((8 + mantissa).double(), exponent - 10)
    value = torch.where(exponent == 0, mantissa.double() * _E4M3_STEP, normal)
    value = torch.where(code & 127 == 127, torch.nan, value)
    return torch.where(code >= 128, -value, value).to(device)


def e8m0_table(device: torch.device | str = "cpu") -> torch.Tensor:
    """float64 [256], NaN for 255."""
    code = torch.arange(256, dtype=torch.int64)
    value = power_of_two(code - 127)
    return torch.where(code == NAN_SCALE, torch.nan, value).to(device)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """float64, exact."""
    return torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64, device=exponent.device), exponent)


@dataclass(frozen=True)
class Operand:
    """One side of a product: MXFP8 where there are scales, plain numbers otherwise."""

    data: torch.Tensor  # [..., K] float8_e4m3fn, or bf16/fp16
    scales: torch.Tensor | None = None  # [..., K/32] uint8, row-major

    def values(self) -> torch.Tensor:
        """float64 [..., K], exact."""
        if self.scales is None:
            return self.data.double()
        elements = e4m3_table(self.data.device)[self.data.view(torch.uint8).long()]
        return elements * e8m0_table(self.data.device)[self.scales.long()].repeat_interleave(BLOCK, -1)

    def rows(self, start: int, count: int) -> Self:
        """Some rows of a 2-dimensional operand."""
        scales = None if self.scales is None else self.scales[start : start + count]
        return replace(self, data=self.data[start : start + count], scales=scales)

    def group(self, index: int) -> Self:
        """One group of a 3-dimensional operand."""
        return replace(self, data=self.data[index], scales=None if self.scales is None else self.scales[index])

    def to(self, device: torch.device | str) -> Self:
        return replace(self, data=self.data.to(device), scales=None if self.scales is None else self.scales.to(device))


@dataclass(frozen=True)
class Exact:
    """What a product is, and what its bound is made of; all float64 [M, N]."""

    value: torch.Tensor
    magnitude: torch.Tensor  # S
    block_walk: torch.Tensor  # T
    lost: torch.Tensor  # what operands and scales that the formats can't hold may cost
    unsettled: torch.Tensor  # bool: something on the way may be beyond 2**128, so inf and NaN are right too
    depth: int  # K


def exact_product(tokens: Operand, weight: Operand, bias: torch.Tensor | None = None) -> Exact:
    """``tokens [M, K] @ weight [N, K].T + bias [N]``."""
    a, w = tokens.values(), weight.values()
    if bias is not None:
        bias = bias.double()
    value = a @ w.T
    a_abs, w_abs = a.abs(), w.abs()
    magnitude = a_abs @ w_abs.T
    if bias is not None:
        value, magnitude = value + bias, magnitude + bias.abs()
    a_max, w_max = (x.unflatten(-1, (-1, BLOCK)).amax(-1) for x in (a_abs, w_abs))
    block_walk = (a_max.square() @ w_max.square().T).sqrt()
    lost = 2.0**-133 * (a_abs.sum(-1, keepdim=True) + w_abs.sum(-1))
    lost = lost + a.shape[-1] / BLOCK * _LARGEST_BLOCK_SUM * 2.0**-149
    unsettled = _unsettled(tokens, weight, a_abs, w_abs)
    # Products of both signs, whose partial sums may be +inf and -inf. Those of one sign can only give inf.
    unsettled |= (magnitude >= 2.0**128) & (value.abs() < magnitude * (1 - 1e-9))
    return Exact(value, magnitude, block_walk, lost, unsettled, a.shape[-1])


def _unsettled(tokens: Operand, weight: Operand, a_abs: torch.Tensor, w_abs: torch.Tensor) -> torch.Tensor:
    """Where an operand, or the product of two scales, is beyond 2**128."""
    beyond = 2.0**128
    result = (a_abs.amax(-1, keepdim=True) >= beyond) | (w_abs.amax(-1) >= beyond)
    if tokens.scales is None or weight.scales is None:
        return result
    a, w = tokens.scales.int(), weight.scales.int()  # (M, B), (N, B)
    if a.numel() and int(a.amax() + w.amax()) >= 254 + 128:
        for block in range(a.shape[-1]):
            result |= (a[:, block].unsqueeze(-1) + w[:, block]) >= 254 + 128
    return result


def element_bound(exact: Exact, dtype: torch.dtype, *, fp8: bool) -> torch.Tensor:
    """float64 [M, N]: how far a result may be from ``exact.value``."""
    return _bound(exact, dtype, fp8=fp8, accumulation=1.0, walk=16.0)


def _bound(exact: Exact, dtype: torch.dtype, *, fp8: bool, accumulation: float, walk: float) -> torch.Tensor:
    steps = -(-exact.depth // (32 if fp8 else 16))
    bound = exact.value.abs() * HALF_ULP[dtype] + SMALLEST[dtype] + exact.lost
    bound = bound + accumulation * 2.0**-23 * (steps + 8) * exact.magnitude
    return bound + walk * 2.0**-13 * exact.block_walk if fp8 else bound


def faults(out: torch.Tensor, exact: Exact, *, fp8: bool) -> list[str]:
    """What is wrong with a result, empty where nothing is.

    Args:
        out: ``[M, N]`` bf16, fp16 or fp32.
        exact: of the same product.
        fp8: whether both operands met in FP8 (W8A8), where accumulation is shorter.
    """
    value, dtype = exact.value, out.dtype
    if out.shape != value.shape:
        return [f"shape {tuple(out.shape)} instead of {tuple(value.shape)}"]
    if not out.numel():
        return []
    out = out.to(value.device).double()
    bound = element_bound(exact, dtype, fp8=fp8)
    numbers = value.isfinite() & bound.isfinite()
    found = []
    wrong_nan = (out.isnan() != value.isnan()) & ~exact.unsettled & (numbers | value.isnan())
    if wrong_nan.any():
        found.append(f"{int(wrong_nan.sum())} elements are NaN or should be, {_where(wrong_nan)}")
    wrong_inf = value.isinf() & (out != value)
    if wrong_inf.any():
        found.append(f"{int(wrong_inf.sum())} elements should be infinite, {_where(wrong_inf)}")
    # The largest finite number and half a step beyond: from there on, rounding gives infinity.
    limit = torch.finfo(dtype).max * (1 + HALF_ULP[dtype] / 2)
    infinite = out.isinf() & numbers
    wrong = infinite & (((value.abs() + bound) < limit) | (out.sign() != value.sign())) & ~exact.unsettled
    wrong |= out.isfinite() & numbers & ((value.abs() - bound) > limit)
    compared = out.isfinite() & numbers
    error = torch.where(compared, (out - value).abs(), 0.0)
    wrong |= compared & (error > bound)
    if wrong.any():
        ratio = torch.where(compared, error / bound, 0.0)
        m, n = divmod(int(ratio.argmax()), out.shape[1])
        found.append(
            f"{int(wrong.sum())} of {out.numel()} elements are beyond their bound, {_where(wrong)}; worst [{m}, {n}]: "
            f"{out[m, n].item():.9g} for {value[m, n].item():.9g}, {ratio[m, n].item():.3g} times the bound"
        )
    norm_bound = torch.where(compared, _bound(exact, dtype, fp8=fp8, accumulation=0.5, walk=6.0), 0.0)
    for axis, name in ((1, "row"), (0, "column")):
        # Scaled by the largest element, since squares of large ones leave float64.
        size = norm_bound.amax(axis, keepdim=True).clamp(min=1e-300)
        ratio = (error / size).norm(dim=axis) / (norm_bound / size).norm(dim=axis).clamp(min=1e-300)
        if bool((ratio > 1).any()):
            worst = int(ratio.argmax())
            found.append(f"{int((ratio > 1).sum())} {name}s are off, worst {worst}: {ratio[worst].item():.3g} x bound")
    return found


def relative_error(out: torch.Tensor, exact: Exact) -> float:
    """‖out - exact‖ / ‖exact‖ over what is finite, for tables."""
    numbers = exact.value.isfinite() & out.isfinite()
    error = torch.where(numbers, out.double() - exact.value, 0.0).norm()
    return (error / torch.where(numbers, exact.value, 0.0).norm().clamp(min=1e-300)).item()


def _where(mask: torch.Tensor) -> str:
    rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
    return f"rows {_few(rows)}, columns {_few(columns)}"


def _few(indices: torch.Tensor) -> str:
    shown = ", ".join(str(i) for i in indices[:6].tolist())
    return f"[{shown}{', …' if len(indices) > 6 else ''}] ({len(indices)})"


# ---- SwiGLU and its requantization ----


def exact_swiglu(first: Exact, *, limit: float | None = None, fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(product, how far a kernel's float32 product may be from it), float64 [M, I], for w13's ``[M, 2I]``.

    d/dg silu is below 1.1 everywhere, and the epilogue's exp, division and products cost a few 2**-22.
    """
    error = element_bound(replace(first, value=first.value * 0), torch.float32, fp8=fp8)
    gate, up = first.value.chunk(2, -1)
    gate_error, up_error = error.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    silu = gate * torch.sigmoid(gate)
    product = silu * up
    bound = 1.1 * gate_error * (up.abs() + up_error) + silu.abs() * up_error + product.abs() * 2.0**-19
    return product, bound + 2.0**-126


def swiglu_faults(
    values: torch.Tensor,
    product: torch.Tensor,
    bound: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    rounding: str = "rceil",
) -> list[str]:
    """What is wrong with requantized products.

    A block's scale must be that of some largest magnitude within the bound, and each element that of some number within
    it: codes differ by one exactly where the product may fall on the other side of a rounding boundary.

    Args:
        values: ``[M, I]``, what the codes and scales stand for.
        product, bound: of :func:`exact_swiglu`.
        scales: uint8 ``[M, I/32]``; None where only their values were written.
    """
    blocks, slack = product.unflatten(-1, (-1, BLOCK)), bound.unflatten(-1, (-1, BLOCK))
    values = values.to(product.device).double().unflatten(-1, (-1, BLOCK))
    bad = ~blocks.isfinite().all(-1)
    found = []
    if not bool(values[bad].isnan().all()):
        found.append(f"blocks with NaN must be NaN, {_where(bad & ~values.isnan().all(-1))}")
    amax, high = blocks.abs().amax(-1).nan_to_num(), (blocks.abs() + slack).amax(-1).nan_to_num()
    low = torch.minimum((blocks.abs() - slack).amax(-1).nan_to_num().clamp(min=0), amax)
    lowest, highest = (scale_codes(x, rounding=rounding).int() for x in (low, high))
    if scales is not None:
        scales = scales.to(product.device).int()
        wrong = torch.where(bad, scales != NAN_SCALE, (scales < lowest) | (scales > highest))
        if wrong.any():
            m, b = wrong.nonzero()[0].tolist()
            found.append(
                f"{int(wrong.sum())} scales are wrong, {_where(wrong)}: [{m}, {b}] is {int(scales[m, b])} for amax "
                f"{amax[m, b].item():.9g}, allowed {int(lowest[m, b])} to {int(highest[m, b])}"
            )
    fewest_wrong = torch.full(values.shape, True, device=values.device)
    for step in range(max(1, int((highest - lowest).max()) + 1) if values.numel() else 0):
        code = torch.minimum(lowest + step, highest) if scales is None else scales
        factor = e8m0_table(values.device)[code.clamp(max=254).long()].unsqueeze(-1)
        ends = [round_to_e4m3((blocks + sign * slack) / factor) * factor for sign in (-1, 1)]
        wrong = ~((values >= ends[0]) & (values <= ends[1]))
        better = wrong.sum(-1, keepdim=True) < fewest_wrong.sum(-1, keepdim=True)
        fewest_wrong = torch.where(better, wrong, fewest_wrong)
        if scales is not None:
            break
    wrong = (fewest_wrong & ~bad.unsqueeze(-1)).flatten(-2)
    if wrong.any():
        m, i = wrong.nonzero()[0].tolist()
        found.append(
            f"{int(wrong.sum())} of {wrong.numel()} elements are wrong, {_where(wrong)}: [{m}, {i}] gives "
            f"{values.flatten(-2)[m, i].item():.9g} for {product[m, i].item():.9g}"
        )
    return found


def plain_swiglu_faults(values: torch.Tensor, product: torch.Tensor, bound: torch.Tensor) -> list[str]:
    """What is wrong with products that were rounded to bf16."""
    values = values.to(product.device).double()
    allowed = bound + product.abs() * HALF_ULP[torch.bfloat16] + SMALLEST[torch.bfloat16]
    wrong = torch.where(product.isnan(), ~values.isnan(), ~((values - product).abs() <= allowed))
    if not wrong.any():
        return []
    m, i = wrong.nonzero()[0].tolist()
    return [
        f"{int(wrong.sum())} of {wrong.numel()} elements are wrong, {_where(wrong)}: [{m}, {i}] is "
        f"{values[m, i].item():.9g} for {product[m, i].item():.9g}"
    ]


def scale_codes(amax: torch.Tensor, *, rounding: str) -> torch.Tensor:
    """uint8: E8M0 codes of blocks with that largest magnitude, from the definitions."""
    largest = power_of_two(torch.arange(255, device=amax.device) - 127) * (448.0 if rounding == "rceil" else 512.0)
    # rceil: the first scale with 448 * scale >= amax. floor: the first with 512 * scale > amax.
    return torch.searchsorted(largest, amax.contiguous(), right=rounding == "floor").clamp(max=254).byte()


def round_to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """float64: the nearest E4M3 number, ties to even, saturating; NaN stays."""
    magnitude = x.abs().clamp(max=448.0)
    exponent = torch.frexp(magnitude)[1].clamp(min=-5) - 4  # steps of a binade that ends at 2**e are 2**(e-4)
    step = power_of_two(exponent)
    return torch.copysign((magnitude / step).round() * step, x)


def quantize(x: torch.Tensor, *, rounding: str = "rceil") -> Operand:
    """MXFP8 of x ``[..., K]``; a block that holds NaN or inf gets scale 255 and NaN codes."""
    blocks = x.double().unflatten(-1, (-1, BLOCK))
    bad = ~blocks.isfinite().all(-1)
    scales = scale_codes(torch.where(bad, 0.0, blocks.abs().amax(-1)), rounding=rounding)
    scales = torch.where(bad, NAN_SCALE, scales.int()).byte()
    values = round_to_e4m3(blocks / e8m0_table(x.device)[scales.long()].unsqueeze(-1))
    return Operand(values.flatten(-2).float().to(torch.float8_e4m3fn), scales)


# ---- inputs ----


def random_operand(*shape: int, seed: int, device: str = "cpu", spread: int = 6) -> Operand:
    """MXFP8 with elements of all sizes up to 448 and scales 2**-spread .. 2**spread around 2**-7, drawn at random.

    A block scale taken from a neighbour, or an element from another place, shows in every norm.
    """
    g = torch.Generator(device).manual_seed(seed)
    values = torch.randn(*shape, generator=g, device=device) * 100
    scales = torch.randint(120 - spread, 121 + spread, (*shape[:-1], shape[-1] // BLOCK), generator=g, device=device)
    return Operand(values.clamp(-448, 448).to(torch.float8_e4m3fn), scales.byte())


def small_integers(*shape: int, seed: int, device: str = "cpu") -> torch.Tensor:
    """fp32 integers from -4 to 4 without 0: exact in E4M3 and bf16, and so are sums of their products."""
    g = torch.Generator(device).manual_seed(seed)
    size = torch.randint(1, 5, shape, generator=g, device=device)
    return size * (torch.randint(0, 2, shape, generator=g, device=device) * 2.0 - 1)


def cancelling(rows: int, columns: int, depth: int, *, seed: int, device: str = "cpu") -> tuple[Operand, Operand]:
    """(tokens, weight) whose products cancel: the second half of k repeats the first with the sign turned.

    A tenth of the rows gets one element more than its copy, so results are small numbers beside a large S.
    """
    tokens, weight = (
        random_operand(rows, depth // 2, seed=seed, device=device),
        random_operand(columns, depth // 2, seed=seed + 1, device=device),
    )
    turned = (tokens.data.view(torch.uint8) ^ 0x80).view(torch.float8_e4m3fn)
    a = Operand(_cat(tokens.data, turned), torch.cat([tokens.scales, tokens.scales], -1))
    w = Operand(_cat(weight.data, weight.data), torch.cat([weight.scales, weight.scales], -1))
    a.data.view(torch.uint8)[::10, 3] = 0
    return a, w


def _cat(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([p.view(torch.uint8) for p in parts], -1).view(torch.float8_e4m3fn)


@dataclass(frozen=True)
class Runs:
    """Where the rows of each group lie."""

    counts: list[int]
    starts: list[int]
    num_rows: int  # S, rows outside the runs included

    @classmethod
    def of(cls, counts: list[int], *, gaps: list[int] | None = None, spare: int = 5) -> Self:
        """Runs one after the other, gaps[g] rows before run g, `spare` rows after the last."""
        starts, at = [], 0
        for g, count in enumerate(counts):
            at += gaps[g % len(gaps)] if gaps else 0
            starts.append(at)
            at += count
        return cls(list(counts), starts, at + spare)

    def expert_counts(self, device: str) -> torch.Tensor:
        return torch.tensor(self.counts, dtype=torch.int32, device=device)

    def expert_offsets(self, device: str) -> torch.Tensor:
        end = self.starts[-1] + self.counts[-1]
        return torch.tensor([*self.starts, end], dtype=torch.int32, device=device)

    def outside(self, device: str) -> torch.Tensor:
        """bool [S]: rows that belong to no run."""
        result = torch.ones(self.num_rows, dtype=torch.bool, device=device)
        for start, count in zip(self.starts, self.counts, strict=True):
            result[start : start + count] = False
        return result


def poison_rows(tokens: Operand, rows: torch.Tensor) -> None:
    """Makes rows NaN, by every way there is: codes, scales, plain NaN."""
    if tokens.scales is None:
        tokens.data[rows] = float("nan")
        return
    tokens.data.view(torch.uint8)[rows] = 0x7F
    tokens.scales[rows] = NAN_SCALE


def grouped_faults(
    out: torch.Tensor,
    tokens: Operand,
    weight: Operand,
    runs: Runs,
    *,
    fp8: bool,
    bias: torch.Tensor | None = None,
    outside: float | None = None,
) -> list[str]:
    """Faults of every run of ``out [S, N]``.

    Args:
        tokens: ``[S, K]``; weight: ``[G, N, K]``; bias: ``[N]`` or ``[G, N]``.
        outside: what rows that belong to no run must hold, in bits of out's dtype; None if that isn't looked at.
    """
    found = []
    for g, (start, count) in enumerate(zip(runs.starts, runs.counts, strict=True)):
        if not count:
            continue
        b = bias[g] if bias is not None and bias.ndim == 2 else bias
        exact = exact_product(tokens.rows(start, count), weight.group(g), b)
        found += [f"group {g} ({count} rows): {f}" for f in faults(out[start : start + count], exact, fp8=fp8)]
    if outside is not None:
        rows = out[runs.outside(str(out.device))]
        written = (rows.view(torch.int16) != outside).any(-1) if rows.numel() else rows.new_zeros(0).bool()
        if written.any():
            found.append(f"{int(written.sum())} rows outside the runs were written")
    return found


COUNT_CASES = {
    "balanced": [8] * 8,
    "one token each": [1] * 8,
    "empty at the front": [0, 0, 0, 7, 3, 1],
    "empty in the middle": [5, 0, 9, 0, 0, 2],
    "empty at the end": [4, 33, 0, 0],
    "everything in one": [0, 0, 0, 301, 0, 0, 0, 0],
    "everything in the first": [77, 0, 0, 0],
    "everything in the last": [0, 0, 0, 130],
    "larger than any token tile": [600, 1, 0, 257, 129],
    "tile boundaries": [
        7,
        8,
        9,
        15,
        16,
        17,
        31,
        32,
        33,
        47,
        48,
        49,
        63,
        64,
        65,
        127,
        128,
        129,
        191,
        193,
        255,
        256,
        257,
    ],
    "skewed": [200, 50, 12, 3, 1, 0, 0, 1],
    "nothing": [0, 0, 0, 0],
}
