"""MXFP8 and MoE in float64, written from the definitions and sharing no code with the plugin."""

import math

import numpy as np
import torch


def e4m3_value(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, -9)
    return sign * math.ldexp(8 + mantissa, exponent - 10)


def e8m0_value(code: int) -> float:
    return math.nan if code == 255 else math.ldexp(1.0, code - 127)


E4M3 = np.array([e4m3_value(code) for code in range(256)])
E8M0 = np.array([e8m0_value(code) for code in range(256)])
_POSITIVE = E4M3[:127]  # ascending, 0 .. 448


def to64(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


def to_bytes(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.uint8).numpy()


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """float64 [..., K]."""
    values, factors = E4M3[to_bytes(codes)], E8M0[scales.numpy()]
    return values * np.repeat(factors, 32, axis=-1)


def scale_code(amax: float, rounding: str) -> int:
    if math.isnan(amax) or math.isinf(amax):
        return 255
    if amax == 0:
        return 0
    if rounding == "floor":
        return max(math.frexp(amax)[1] - 1 - 8, -127) + 127
    return next(code for code in range(255) if 448.0 * E8M0[code] >= amax)


def nearest_e4m3(x: float) -> int:
    """Round to nearest, ties to the even code, saturating."""
    if math.isnan(x):
        return 0x7F
    sign, magnitude = (0x80 if math.copysign(1.0, x) < 0 else 0), min(abs(x), 448.0)
    above = int(np.searchsorted(_POSITIVE, magnitude))
    if _POSITIVE[above] == magnitude:
        return sign | above
    low, high = magnitude - _POSITIVE[above - 1], _POSITIVE[above] - magnitude
    if low == high:
        return sign | (above if above % 2 == 0 else above - 1)
    return sign | (above if high < low else above - 1)


def quantize(x: torch.Tensor, rounding: str = "rceil") -> tuple[np.ndarray, np.ndarray]:
    """(codes uint8 [..., K], scales uint8 [..., K/32]); NaN elements all have the code 0x7F."""
    values = to64(x)
    blocks = values.reshape(-1, 32)
    codes, scales = np.zeros(blocks.shape, np.uint8), np.zeros(len(blocks), np.uint8)
    for i, block in enumerate(blocks):
        scales[i] = scale_code(float(np.abs(block).max()), rounding)
        factor = E8M0[scales[i]]
        codes[i] = [nearest_e4m3(float(v / factor)) for v in block]
    return codes.reshape(values.shape), scales.reshape(*values.shape[:-1], -1)


def canonical(codes: torch.Tensor) -> np.ndarray:
    """Bytes of E4M3 codes with both NaNs written as 0x7F."""
    data = to_bytes(codes).copy()
    data[data == 0xFF] = 0x7F
    return data


def route(topk_ids, num_local_experts, expert_map=None, alignment=1):
    """(counts, offsets, slots) as lists."""
    runs: list[list[tuple[int, int]]] = [[] for _ in range(num_local_experts)]
    for t, row in enumerate(topk_ids):
        for k, expert in enumerate(row):
            if expert_map is not None:
                expert = expert_map[expert] if 0 <= expert < len(expert_map) else -1
            if 0 <= expert < num_local_experts:
                runs[expert].append((t, k))
    slots = [[-1] * len(row) for row in topk_ids]
    offsets = [0]
    for run in runs:
        for i, (t, k) in enumerate(run):
            slots[t][k] = offsets[-1] + i
        offsets.append(offsets[-1] + -(-len(run) // alignment) * alignment)
    return [len(run) for run in runs], offsets, slots


def swiglu(h: np.ndarray, limit: float | None = None) -> np.ndarray:
    gate, up = np.split(h, 2, axis=-1)
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate)) * up


def moe(x, topk_ids, topk_weights, w13, w2, *, expert_map=None, quantized=True, weight_on_input=False) -> np.ndarray:
    """The whole layer, token by token; w13 and w2 are (codes, scales)."""

    def rounded(row: np.ndarray) -> np.ndarray:
        if not quantized:
            return row
        codes, scales = quantize(torch.from_numpy(row))
        return E4M3[codes] * np.repeat(E8M0[scales], 32)

    first, second = dequantize(*w13), dequantize(*w2)
    out = np.zeros(tuple(x.shape))
    for t, row in enumerate(to64(x)):
        for k, expert in enumerate(topk_ids[t].tolist()):
            if expert_map is not None:
                expert = expert_map[expert].item() if 0 <= expert < len(expert_map) else -1
            if not 0 <= expert < len(first):
                continue
            weight = topk_weights[t, k].item()
            h = first[expert] @ rounded(row * weight if weight_on_input else row)
            y = second[expert] @ rounded(swiglu(h))
            out[t] += y if weight_on_input else weight * y
    return out
