"""The dispatch's PTX, run on the CPU, against the references: every byte that it writes, and no other."""

from dataclasses import replace

import pytest
import route_cases as cases
import torch

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding, TokenFormat
from vllm_rose_plugin.kernels.gemm.tokens import pack_tokens
from vllm_rose_plugin.kernels.moe_dispatch import reference
from vllm_rose_plugin.kernels.moe_route.reference import route_tokens
from vllm_rose_plugin.kernels.mxfp8_quantize.config import alignment_of, widest_load
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import e8m0_to_float, quantize_mxfp8
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import untile_scales

FP32, PERMUTED, TILED = TokenFormat.MXFP8_FP32_SCALES, TokenFormat.BF16_PERMUTED, TokenFormat.MXFP8_TCGEN05
POISON_WORD = 0xABABABAB - 2**32


def scale_starts(counts: torch.Tensor) -> torch.Tensor:
    """The first row of scales of each run: it begins a tile."""
    tiles = -(-counts // 128)
    return (tiles.cumsum(0) - tiles) * 128


def routed_by_reference(ids, *, num_experts, alignment, expert_map=None, scale_rows=False) -> cases.Routed:
    expected = route_tokens(ids, num_local_experts=num_experts, expert_map=expert_map, alignment=alignment)
    tiled = None
    if scale_rows:
        tiled = torch.full(ids.shape, -1, dtype=torch.int32)
        starts = scale_starts(expected.expert_counts)
        for e in range(num_experts):
            first = int(expected.expert_offsets[e])
            here = (expected.slots >= first) & (expected.slots < first + int(expected.expert_counts[e]))
            tiled[here] = (expected.slots - first + starts[e]).to(torch.int32)[here]
        tiled = cases.placed(tiled)
    return cases.Routed(
        cases.placed(expected.expert_counts), cases.placed(expected.expert_offsets), cases.placed(expected.slots), tiled
    )


def per_pair(x, weights, config) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(bytes of the row [T, top_k, row bytes], scale codes [T, top_k, H/32] or None) of every token and k."""
    num_tokens, top_k = (x.codes if isinstance(x, Mxfp8Tensor) else x).shape[0], config.top_k
    if isinstance(x, Mxfp8Tensor):
        if config.token_format is PERMUTED:
            packed = pack_tokens(x, token_format=PERMUTED).data.view(torch.uint8)
            return packed.unsqueeze(1).expand(-1, top_k, -1), None
        codes, scales = x.codes.view(torch.uint8), x.scales
        return (part.unsqueeze(1).expand(-1, top_k, -1) for part in (codes, scales))
    if weights is None:
        rows = x.unsqueeze(1).expand(-1, top_k, -1)
    else:
        rows = x.float().unsqueeze(1) * weights.unsqueeze(-1)
        if config.activation is Activation.BF16:
            rows = rows.to(x.dtype)
    rows = rows.reshape(num_tokens * top_k, -1)
    if config.token_format is PERMUTED:
        packed = pack_tokens(rows, token_format=PERMUTED, activation=config.activation, rounding=config.rounding)
        return packed.data.view(torch.uint8).view(num_tokens, top_k, -1), None
    codes, scales = quantize_mxfp8(rows, rounding=config.rounding)
    return codes.view(torch.uint8).view(num_tokens, top_k, -1), scales.view(num_tokens, top_k, -1)


def check(x, ids, *, target, token_format, num_experts, expert_map=None, weights=None, route=False, seed=0, **how):
    """Runs a call and compares everything; `route`: in the same launch."""
    config = cases.dispatch_config(
        x,
        target=target,
        token_format=token_format,
        top_k=ids.shape[1],
        num_experts=num_experts,
        weighted=weights is not None,
        id_dtype=str(ids.dtype).removeprefix("torch.") if route else None,
        has_map=expert_map is not None and route,
        **how,
    )
    assert (config.route is not None) == route
    expected = routed_by_reference(
        ids,
        num_experts=num_experts,
        alignment=config.alignment,
        expert_map=expert_map,
        scale_rows=config.scale_rows,
    )
    result = cases.run_dispatch(
        config,
        target,
        x,
        routed=None if route else expected,
        topk_ids=ids,
        expert_map=expert_map,
        topk_weights=weights,
        seed=seed,
    )
    num_tokens = (x.codes if isinstance(x, Mxfp8Tensor) else x).shape[0]
    assert result.launch.grid[0] == config.grid(num_tokens) and not result.launch.cooperative
    if route:
        for name in cases.Routed._fields:
            mine, theirs = getattr(result.routed, name), getattr(expected, name)
            assert (mine is None and theirs is None) or torch.equal(mine, theirs), name
    compare(result, expected, x, weights, config)
    return result


def compare(result, expected, x, weights, config) -> None:
    data, scales = per_pair(x, weights, config)
    here = expected.slots >= 0
    slots = expected.slots[here].long()
    rows = torch.full_like(result.rows, cases.POISON)
    for first, last in zip(expected.offsets[:-1].tolist(), expected.offsets[1:].tolist(), strict=True):
        rows[first:last] = 0
    rows[slots] = data[here]
    if config.token_format is PERMUTED:  # NaN's payload is nobody's
        mine, theirs = result.rows.view(torch.bfloat16), rows.view(torch.bfloat16)
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert torch.equal(mine.nan_to_num(0).view(torch.int16), theirs.nan_to_num(0).view(torch.int16))
    else:
        assert torch.equal(result.rows, rows)
        compare_scales(result, expected, scales, here, config)
    for name, counts in result.written.items():
        assert counts is None or counts.max() <= 1 or name == "workspace", f"{name} is stored to twice"


def compare_scales(result, expected, scales, here, config) -> None:
    if config.token_format is FP32:
        wanted = torch.full(result.scales.shape, POISON_WORD, dtype=torch.int32)
        for first, last in zip(expected.offsets[:-1].tolist(), expected.offsets[1:].tolist(), strict=True):
            wanted[:, first:last] = 1 << 22  # 2**-127
        wanted[:, expected.slots[here].long()] = e8m0_to_float(scales[here]).t().contiguous().view(torch.int32)
        assert torch.equal(result.scales.view(torch.int32), wanted)
        return
    blocks = scales.shape[-1]
    padded = config.k_tiles * 4
    num_rows = len(result.scales) // padded
    tiled = expected.scale_rows if config.scale_rows else expected.slots
    wanted = torch.full((num_rows, padded), cases.POISON, dtype=torch.uint8)
    for e, count in enumerate(expected.counts.tolist()):
        if config.scale_rows:
            first = int(scale_starts(expected.counts)[e])
            wanted[first : first + -(-count // 128) * 128] = 0
        else:
            wanted[int(expected.offsets[e]) : int(expected.offsets[e + 1])] = 0
    wanted[tiled[here].long(), :blocks] = scales[here]
    mine = untile_scales(result.scales, num_rows=num_rows, num_blocks=padded)
    assert torch.equal(mine, wanted)


def random_ids(num_tokens, top_k, num_ids, *, seed=0, dtype=torch.int32):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, num_ids, (num_tokens, top_k), generator=g)
    odd = torch.rand(num_tokens, top_k, generator=g) < 0.15
    values = torch.tensor([-1, num_ids, num_ids + 1000, -(2**31), 2**31 - 1])
    ids[odd] = values[torch.randint(0, len(values), (int(odd.sum()),), generator=g)]
    return ids.to(dtype)


def random_x(num_tokens, hidden_size, dtype=torch.bfloat16, *, seed=0):
    """Aligned; rows of different size, one of zeros, one with NaN and one with inf where there are a few."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hidden_size, generator=g)
    x *= torch.exp2(torch.randint(-9, 5, (num_tokens, 1), generator=g).float())
    if num_tokens > 4:
        x[1], x[2, 5], x[3, -1] = 0.0, float("nan"), float("-inf")
    return cases.placed(x.to(dtype))


@pytest.mark.parametrize("route", [False, True])
@pytest.mark.parametrize("target", cases.TARGETS)
def test_formats(target, route):
    """Those that a target's GEMM reads."""
    ids = random_ids(13, 4, 6)
    for token_format in (FP32, PERMUTED) if target == "sm_90a" else (TILED,):
        for alignment in (1, 8, 128):
            check(
                random_x(13, 96),
                ids,
                target=target,
                token_format=token_format,
                num_experts=6,
                alignment=alignment,
                route=route,
            )


@pytest.mark.slow
@pytest.mark.parametrize("hidden_size", [32, 64, 160, 2688, 4096, 7168])
@pytest.mark.parametrize("token_format", TokenFormat)
def test_hidden_sizes(token_format, hidden_size):
    target = "sm_100f" if token_format is TILED else "sm_90a"
    num_tokens = 3 if hidden_size > 1000 else 37
    ids = random_ids(num_tokens, 2, 5, seed=hidden_size)
    for route in (hidden_size % 64 == 0,):
        check(
            random_x(num_tokens, hidden_size), ids, target=target, token_format=token_format, num_experts=5, route=route
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("token_format", TokenFormat)
def test_dtypes_and_router_weights(token_format, rounding, dtype):
    target = "sm_100f" if token_format is TILED else "sm_90a"
    ids = random_ids(11, 3, 4, dtype=torch.int64)
    weights = torch.rand(11, 3, generator=torch.Generator().manual_seed(1)) * 3
    for i, given in enumerate((None, weights)):
        for activation in Activation if token_format is PERMUTED else (Activation.MXFP8,):
            check(
                random_x(11, 192, dtype),
                ids,
                target=target,
                token_format=token_format,
                num_experts=4,
                weights=given,
                rounding=rounding,
                activation=activation,
                route=(i == 0) == (rounding is Rounding.FLOOR),
            )


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5, 6, 8, 10, 16])
def test_any_top_k(top_k):
    ids = random_ids(9, top_k, 12, seed=top_k)
    token_format, target = ((FP32, "sm_90a"), (TILED, "sm_103a"), (PERMUTED, "sm_90a"))[top_k % 3]
    check(random_x(9, 64), ids, target=target, token_format=token_format, num_experts=12, route=top_k % 2 == 0)


@pytest.mark.parametrize("token_format", [FP32, TILED, PERMUTED])
@pytest.mark.parametrize("alignment", [1, 128])
def test_tokens_that_arrive_quantized_are_taken_as_they_are(token_format, alignment):
    x = random_x(21, 160)
    codes, scales = quantize_mxfp8(x)
    scales[4, 1] = 255
    quantized = Mxfp8Tensor(codes, scales)
    ids = random_ids(21, 6, 9)
    for route in (False, True):
        check(
            quantized,
            ids,
            target="sm_100f" if token_format is TILED else "sm_90a",
            token_format=token_format,
            num_experts=9,
            alignment=alignment,
            route=route,
        )


@pytest.mark.parametrize("load", [0, 1, 31, 32, 33, 127, 128, 129])
def test_loads_around_the_tiles_of_scales(load):
    ids = torch.full((280,), 7, dtype=torch.int32)
    ids[:load], ids[load : load + 130] = 2, 4
    ids = ids[torch.randperm(280, generator=torch.Generator().manual_seed(load))].view(140, 2)
    for alignment, route in ((1, True), (256, False)):
        check(
            random_x(140, 32),
            ids,
            target="sm_100f",
            token_format=TILED,
            num_experts=9,
            alignment=alignment,
            route=route,
        )


@pytest.mark.parametrize("route", [False, True])
@pytest.mark.parametrize("value", [-1, 0, 39, 40])
def test_all_to_one_expert_and_none_here(value, route):
    ids = torch.full((20, 4), value, dtype=torch.int32)
    for token_format, alignment in ((TILED, 1), (FP32, 16)):
        check(
            random_x(20, 64),
            ids,
            target="sm_100f",
            token_format=token_format,
            num_experts=40,
            alignment=alignment,
            route=route,
        )


@pytest.mark.parametrize("seed", range(16))
def test_one_launch_in_any_order(seed):
    """Blocks and warps come in any order, also before the kernel in front has ended; a map, and strange ids."""
    expert_map = torch.full((64,), -1, dtype=torch.int32)
    expert_map[torch.randperm(64, generator=torch.Generator().manual_seed(seed))[:24]] = torch.arange(
        24, dtype=torch.int32
    )
    token_format, alignment, dtype = ((FP32, 1, torch.int32), (TILED, 8, torch.int64))[seed % 2]
    check(
        random_x(37, 256, seed=seed),
        random_ids(37, 6, 64, seed=seed, dtype=dtype),
        target="sm_90a",
        token_format=token_format,
        num_experts=24,
        expert_map=expert_map,
        alignment=alignment,
        route=True,
        seed=seed,
    )


def test_the_workspace_serves_launch_after_launch():
    """Of different sizes, as graphs replay them, with nothing reset between."""
    workspace = cases.new_workspace(8)
    for step, num_tokens in enumerate((5, 130, 1, 130, 17)):
        x, ids = random_x(num_tokens, 64, seed=step), random_ids(num_tokens, 3, 8, seed=step)
        config = cases.dispatch_config(
            x, target="sm_100f", token_format=TILED, top_k=3, num_experts=8, id_dtype="int32"
        )
        result = cases.run_dispatch(config, "sm_100f", x, topk_ids=ids, workspace=workspace, seed=step)
        expected = routed_by_reference(ids, num_experts=8, alignment=1, scale_rows=True)
        compare(result, expected, x, None, config)
        assert workspace[:4].tolist() == [0, 0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("gap", "offset"), [(64, 0), (16, 32), (8, 16), (4, 8), (2, 4), (1, 2)])
def test_rows_apart_and_out_of_line(gap, offset, dtype):
    item = dtype.itemsize
    offset *= item // 2
    size, row_stride = 96, 96 + gap
    raw = cases.aligned((7 * row_stride + 64,), dtype)
    raw.fill_(float("nan"))
    x = raw[offset // item :].as_strided((7, size), (row_stride, 1))
    x.copy_(random_x(7, size, dtype))
    ids = random_ids(7, 2, 3)
    for target, token_format in (("sm_90a", FP32), ("sm_100f", TILED), ("sm_90a", PERMUTED)):
        alignment = alignment_of(pointer=x.data_ptr(), row_bytes=row_stride * item, limit=widest_load(target))
        check(
            x,
            ids,
            target=target,
            token_format=token_format,
            num_experts=3,
            load_alignment=alignment,
            route=gap % 4 == 0,
        )


def test_many_experts():
    ids = random_ids(4, 10, 512)
    for token_format, alignment, route in ((TILED, 1, True), (TILED, 128, False), (FP32, 4, True)):
        check(
            random_x(4, 32),
            ids,
            target="sm_100f",
            token_format=token_format,
            num_experts=512,
            alignment=alignment,
            route=route,
        )


def test_a_row_does_not_depend_on_the_others():
    x, ids = random_x(6, 96), random_ids(6, 2, 4)
    x[2] = float("nan")
    check(x, ids, target="sm_90a", token_format=FP32, num_experts=4, route=True)
    assert reference.max_rows(num_tokens=6, top_k=2, num_local_experts=4, alignment=1) == 12


def test_more_pairs_than_threads():
    """Several items for each routing thread, and the last ones are cut off."""
    x, ids = random_x(300, 32), random_ids(300, 3, 20)
    config = cases.dispatch_config(x, target="sm_90a", token_format=FP32, top_k=3, num_experts=20, id_dtype="int32")
    assert config.route.items == 4
    check(x, ids, target="sm_90a", token_format=FP32, num_experts=20, route=True)
    assert replace(config, route=None).grid(300) == config.grid(300) - 1
