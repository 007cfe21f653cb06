"""QK-norm, alone and with the rotary embedding, at Qwen3-235B's heads: 64 q and 4 k of 128, bf16.

    python benchmarks/bench_qk_norm.py [--check] [--tokens 1 64 4096]

Writes benchmarks/results/qk_norm.csv. The peers are vLLM's own ops, in this process, where vLLM is importable:
two rms_norm calls as Qwen3's attention makes them (the kernel reads the strided view and writes a new tensor), those
followed by rotary_embedding, and the fused_qk_norm_rope op. Without vLLM a compiled torch function stands in. Decode
cases (T <= 128) have two empty kernels beside them, with as many blocks as ours, chained with and without programmatic
dependent launch; their `share_of_limit` is not in the file, it is printed. The limit of the others is a large copy;
prefill cases have a copy of their own size beside them, which shows how much of the distance is due to size.
"""

import argparse
import math
from collections.abc import Callable

import torch
from quantize_timing import Calls, Table, buffer_sets, check_replays, copy_calls, copy_limit, empty_kernels, times

from vllm_rose_plugin.kernels.qk_norm.launch import qk_norm, qk_norm_rope
from vllm_rose_plugin.kernels.qk_norm.reference import normalize_heads, rotate_heads

Q_HEADS, KV_HEADS, HEAD_DIM, EPS = 64, 4, 128, 1e-6
POSITIONS = 40960
DECODE, PREFILL = (1, 2, 4, 8, 16, 32, 64, 128), (4096, 16384, 65536)
_POISON = 0x7F51  # a NaN of bf16 and of fp16, with a mark


class Buffers:
    """Inputs of one size, in several sets."""

    def __init__(self, tokens: int) -> None:
        width = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.bytes = 2 * tokens * (Q_HEADS + KV_HEADS) * HEAD_DIM * 2
        self.sets = buffer_sets(self.bytes, rotate=True)
        self.qkv = torch.randn(self.sets, tokens, width, device="cuda", dtype=torch.bfloat16)
        self.q, self.k = views(self.qkv)
        self.q_out = torch.empty(self.sets, tokens, Q_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        self.k_out = torch.empty(self.sets, tokens, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        self.q_weight = torch.rand(HEAD_DIM, device="cuda").add_(0.5).bfloat16()
        self.k_weight = torch.rand(HEAD_DIM, device="cuda").add_(0.5).bfloat16()
        self.positions = torch.randint(0, POSITIONS, (tokens,), device="cuda")
        self.cache = cos_sin_cache(HEAD_DIM, torch.bfloat16)


def views(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k heads of ``[sets, T, (Hq + 2 Hkv) D]``."""
    q = qkv[..., : Q_HEADS * HEAD_DIM].unflatten(-1, (Q_HEADS, HEAD_DIM))
    k = qkv[..., Q_HEADS * HEAD_DIM : (Q_HEADS + KV_HEADS) * HEAD_DIM].unflatten(-1, (KV_HEADS, HEAD_DIM))
    return q, k


def cos_sin_cache(rotary_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """``[POSITIONS, rotary_dim]``, first the cosines, then the sines."""
    frequency = 1e6 ** -(torch.arange(0, rotary_dim, 2, device="cuda") / rotary_dim)
    angle = torch.arange(POSITIONS, device="cuda").unsqueeze(1) * frequency
    return torch.cat([angle.cos(), angle.sin()], 1).to(dtype)


def norm_providers(b: Buffers) -> dict[str, Calls]:
    weights = {"q_weight": b.q_weight, "k_weight": b.k_weight, "eps": EPS}
    providers: dict[str, Calls] = {
        "rose": lambda i: qk_norm(q=b.q[i], k=b.k[i], **weights),
        "rose_out_of_place": lambda i: qk_norm(q=b.q[i], k=b.k[i], q_out=b.q_out[i], k_out=b.k_out[i], **weights),
    }
    ops = vllm_ops()
    if ops is None:
        compiled = torch.compile(lambda x, w: normalize_heads(x, w, eps=EPS), dynamic=True)
        providers["torch_compile"] = lambda i: (compiled(b.q[i], b.q_weight), compiled(b.k[i], b.k_weight))
    else:
        providers["vllm"] = lambda i: vllm_norms(ops, b, i)
    rmsnorm = flashinfer_rmsnorm()
    if rmsnorm is not None:
        providers["flashinfer"] = lambda i: (
            rmsnorm(b.q[i], b.q_weight, eps=EPS, out=b.q_out[i]),
            rmsnorm(b.k[i], b.k_weight, eps=EPS, out=b.k_out[i]),
        )
    return providers


def rope_providers(b: Buffers) -> dict[str, Calls]:
    weights = {"q_weight": b.q_weight, "k_weight": b.k_weight, "eps": EPS}
    rope = {"positions": b.positions, "cos_sin_cache": b.cache}
    providers: dict[str, Calls] = {"rose_fused": lambda i: qk_norm_rope(q=b.q[i], k=b.k[i], **weights, **rope)}
    ops = vllm_ops()
    if ops is None:

        def both(x, w, positions, cache):
            return rotate_heads(normalize_heads(x, w, eps=EPS), positions, cache, interleaved=False)

        compiled = torch.compile(both, dynamic=True)
        providers["torch_compile"] = lambda i: (
            compiled(b.q[i], b.q_weight, b.positions, b.cache),
            compiled(b.k[i], b.k_weight, b.positions, b.cache),
        )
        return providers

    def turn(q, k):
        ops.rotary_embedding(b.positions, q.flatten(1), k.flatten(1), HEAD_DIM, b.cache, True)

    def vllm_unfused(i):
        vllm_norms(ops, b, i)
        turn(b.q_out[i], b.k_out[i])

    def rose_then_vllm(i):
        qk_norm(q=b.q[i], k=b.k[i], q_out=b.q_out[i], k_out=b.k_out[i], **weights)
        turn(b.q_out[i], b.k_out[i])

    providers["rose_norm_vllm_rope"] = rose_then_vllm
    providers["vllm_unfused"] = vllm_unfused
    if hasattr(torch.ops._C, "fused_qk_norm_rope"):
        heads = (Q_HEADS, KV_HEADS, KV_HEADS, HEAD_DIM, EPS)
        providers["vllm_fused"] = lambda i: ops.fused_qk_norm_rope(
            b.qkv[i], *heads, b.q_weight, b.k_weight, b.cache, True, b.positions
        )
    return providers


def vllm_norms(ops, b: Buffers, i: int) -> None:
    ops.rms_norm(b.q_out[i], b.q[i], b.q_weight, EPS)
    ops.rms_norm(b.k_out[i], b.k[i], b.k_weight, EPS)


def vllm_ops():
    """vLLM's ops module, None where the CUDA wheel isn't there."""
    try:
        from vllm import _custom_ops

        torch.ops._C.rms_norm  # noqa: B018  the extension registers it
        return _custom_ops
    except (ImportError, AttributeError, RuntimeError) as error:
        if not _said:
            _said.append(print(f"left out: vllm: {error}"))
        return None


def flashinfer_rmsnorm():
    try:
        import flashinfer
    except (ImportError, RuntimeError) as error:
        if len(_said) < 2:
            _said.append(print(f"left out: flashinfer: {error}"))
        return None
    return flashinfer.rmsnorm


_said: list = []


def bench(tokens_list: list[int]) -> None:
    table = Table("qk_norm", copy_limit())
    summary = []
    for tokens in tokens_list:
        b = Buffers(tokens)
        decode = tokens <= 128
        calls = 256 if decode else max(4, b.sets)
        shape = f"T={tokens};Hq={Q_HEADS};Hkv={KV_HEADS};D={HEAD_DIM}"
        providers = norm_providers(b)
        ropes = rope_providers(b)
        empty: dict[str, Calls] = {}
        if decode:
            empty = empty_kernels(blocks=math.ceil(tokens * (Q_HEADS + KV_HEADS) * 16 / 128), threads=128)
        else:
            providers["torch_copy"] = copy_calls(b.bytes, sets=b.sets)
        # One round robin, so that all of them see the same clocks.
        us = times(
            {**providers, **{f"rope {name}": call for name, call in ropes.items()}, **empty}, sets=b.sets, calls=calls
        )
        rope_bytes = b.bytes + tokens * (8 + HEAD_DIM * 2)
        for name, value in us.items():
            is_rope = name.startswith("rope ")
            moved = None if name.startswith("empty") else rope_bytes if is_rope else b.bytes
            case = "norm_rope" if is_rope else "norm"
            table.add(case=case, provider=name.removeprefix("rope "), shape=shape, us=value, moved=moved)
        summary.append(_summary(tokens, us, table.limit, b.bytes))
        del b, providers, ropes
        torch.cuda.empty_cache()
    table.write()
    print("\nT      rose  share  /peer | fused  /vllm_fused /unfused | empty pdl  /empty_pdl /empty")
    for line in summary:
        print(line)


def _summary(tokens: int, us: dict[str, float], limit: float, moved: int) -> str:
    def ratio(a: str, b: str) -> str:
        return f"{us[a] / us[b]:.2f}" if a in us and b in us else "-"

    peer = "vllm" if "vllm" in us else "torch_compile"
    return (
        f"{tokens:<6} {us['rose']:.2f}  {moved / us['rose'] / 1e3 / limit:.2f}  {ratio('rose', peer)} | "
        f"{us['rope rose_fused']:.2f}  {ratio('rope rose_fused', 'rope vllm_fused')} "
        f"{ratio('rope rose_fused', 'rope rose_norm_vllm_rope')} | {us.get('empty_kernel', 0):.2f} "
        f"{us.get('empty_kernel_pdl', 0):.2f}  {ratio('rose', 'empty_kernel_pdl')} {ratio('rose', 'empty_kernel')}"
    )


# ---- checks ----


def check() -> None:
    """Numerics per element against float64, poisoned memory around the views, replays; raises where one is wrong."""
    done = 0
    torch.manual_seed(0)
    for head_dim, q_heads, kv_heads in ((64, 7, 1), (128, 64, 4), (128, 8, 1), (256, 3, 5), (256, 16, 2)):
        for dtype in (torch.bfloat16, torch.float16):
            for tokens, offset in ((0, 0), (1, 0), (3, 1), (17, 2), (129, 4), (513, 8), (4099, 0)):
                # Dealt round: every case is another kernel to compile, and all of them would take minutes.
                rope, in_place = ROPES[done % len(ROPES)], done % 4 > 0
                weight_dtype, weight_offset = ((dtype, 0.0), (torch.float32, 0.0), (dtype, 1.0))[done % 3]
                _check_one(
                    head_dim, q_heads, kv_heads, dtype, weight_dtype, weight_offset, tokens, offset, rope, in_place
                )
                done += 1
    print(f"check: {done} cases within their roundings of float64, nothing else written")
    _check_row_independence()
    for tokens in (1, 64, 4096):
        b = Buffers(tokens)
        weights = {"q_weight": b.q_weight, "k_weight": b.k_weight, "eps": EPS}
        out = {"q_out": b.q_out[0], "k_out": b.k_out[0]}
        rope = {"positions": b.positions, "cos_sin_cache": b.cache}

        def run(function: Callable, **more):
            function(q=b.q[0], k=b.k[0], **weights, **out, **more)  # noqa: B023
            return list(out.values())  # noqa: B023

        check_replays(lambda: run(qk_norm))
        check_replays(lambda: run(qk_norm_rope, **rope))  # noqa: B023
    print("check: 1000 replays bitwise equal, T = 1, 64, 4096, norm and norm with rope")


ROPES = [None, ("full", False), ("full", True), ("half", False), ("half", True)]


def _check_one(head_dim, q_heads, kv_heads, dtype, weight_dtype, weight_offset, tokens, offset, rope, in_place) -> None:
    """`offset` shifts every head by that many elements from 256-byte alignment, and rows by as many from multiples."""
    row = (q_heads + 2 * kv_heads) * head_dim + offset
    buffer = torch.full((tokens * row + 512,), _POISON, dtype=torch.int16, device="cuda").view(dtype)
    qkv = buffer[128 + offset : 128 + offset + tokens * row].view(tokens, row)
    q = qkv[:, : q_heads * head_dim].unflatten(1, (q_heads, head_dim))
    k = qkv[:, q_heads * head_dim : (q_heads + kv_heads) * head_dim].unflatten(1, (kv_heads, head_dim))
    for x in (q, k):
        size = torch.exp2(torch.randint(-6, 7, (tokens, x.shape[1], 1), device="cuda").float())
        x.copy_((torch.randn(x.shape, device="cuda") * size).to(dtype))
    weights = [torch.randn(head_dim, device="cuda").to(weight_dtype) for _ in range(2)]
    arguments: dict = {"q_weight": weights[0], "k_weight": weights[1], "eps": EPS, "weight_offset": weight_offset}
    function: Callable = qk_norm
    if rope is not None:
        rotary_dim = head_dim if rope[0] == "full" else head_dim // 2
        cache = cos_sin_cache(rotary_dim, dtype if offset % 2 == 0 else torch.float32)
        positions = torch.randint(0, POSITIONS, (tokens,), device="cuda")
        arguments.update(positions=positions, cos_sin_cache=cache, interleaved=rope[1])
        function = qk_norm_rope
    before = buffer.clone()
    inputs = [q.clone(), k.clone()]
    outputs = [q, k]
    if in_place:
        function(q=q, k=k, **arguments)
    else:
        outputs = [torch.full_like(x, float("nan")) for x in inputs]
        function(q=q, k=k, q_out=outputs[0], k_out=outputs[1], **arguments)
    for x, out, weight in zip(inputs, outputs, weights, strict=True):
        worst = _worst(out, x, weight, weight_offset, arguments)
        if not worst <= 1:
            raise AssertionError(f"{function.__name__} {head_dim=} {dtype=} {tokens=} {offset=} {rope=}: {worst}")
    if in_place:
        q.copy_(inputs[0])
        k.copy_(inputs[1])
    if not torch.equal(buffer.view(torch.int16), before.view(torch.int16)):
        raise AssertionError(f"memory outside of q and k was written: {head_dim=} {tokens=} {offset=}")


def _worst(out, x, weight, weight_offset, arguments) -> float:
    """Largest error over what the roundings allow."""
    if x.shape[0] == 0:
        return 0.0
    ulp = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[x.dtype]
    tiny = {torch.bfloat16: 2.0**-132, torch.float16: 2.0**-24}[x.dtype]
    roundings = 2 if weight.dtype == x.dtype and weight_offset == 0.0 else 1
    exact = normalize_heads(x, weight, eps=EPS, weight_offset=weight_offset, exact=True)
    # A subnormal loses `tiny` whatever its size, before the weight and after it.
    bound = exact.abs() * (roundings * ulp * (1 + ulp) + 2.0**-20) + tiny * (1 + weight.double().abs())
    if "positions" in arguments:
        interleaved = arguments["interleaved"]
        turned = rotate_heads(exact, arguments["positions"], arguments["cos_sin_cache"], interleaved=interleaved)
        # Rotations mix a pair: both bounds, and one rounding more.
        rotary_dim = arguments["cos_sin_cache"].shape[1]
        pairs = bound[..., :rotary_dim]
        first, second = (pairs[..., 0::2], pairs[..., 1::2]) if interleaved else pairs.chunk(2, -1)
        both = first + second
        mixed = torch.stack([both, both], -1).flatten(-2) if interleaved else torch.cat([both, both], -1)
        bound = torch.cat([mixed + turned[..., :rotary_dim].abs() * ulp + tiny, bound[..., rotary_dim:]], -1)
        exact = turned
    return ((out.double() - exact).abs() / bound).nan_to_num(nan=float("inf")).max().item()


def _check_row_independence() -> None:
    """A token alone, in a decode batch and in a prefill batch gives the same bits; a row of NaN stays alone."""
    b = Buffers(4096)
    weights = {"q_weight": b.q_weight, "k_weight": b.k_weight, "eps": EPS}
    b.q[0][77, 3, 5] = float("nan")
    results = []
    for tokens in (1, 78, 4096):
        first = 77 if tokens == 1 else 0
        q, k = b.q[0][first : first + tokens], b.k[0][first : first + tokens]
        out = torch.zeros_like(q), torch.zeros_like(k)
        qk_norm_rope(
            q=q,
            k=k,
            q_out=out[0],
            k_out=out[1],
            positions=b.positions[first : first + tokens],
            cos_sin_cache=b.cache,
            **weights,
        )
        results.append((out[0][77 - first].view(torch.int16), out[1][77 - first].view(torch.int16)))
        bad = out[0].isnan().any(-1).nonzero().tolist()
        if bad != [[77 - first, 3]] or out[1].isnan().any():
            raise AssertionError(f"the NaN of token 77, head 3 is in {bad}")
    for q, k in results[1:]:
        if not (torch.equal(q, results[0][0]) and torch.equal(k, results[0][1])):
            raise AssertionError("the result of a token depends on the batch")
    print("check: a token's bits don't depend on the batch; NaN stays in its head")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="check the results before timing")
    parser.add_argument("--tokens", type=int, nargs="+", default=[*DECODE, *PREFILL])
    arguments = parser.parse_args()
    if arguments.check:
        check()
    with torch.inference_mode():
        bench(arguments.tokens)


if __name__ == "__main__":
    main()
