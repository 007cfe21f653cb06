"""Weights split by columns: parts that any kernel takes, filled from shards without a second copy, and joined back."""

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.gemm.column_split import (
    ColumnSplit,
    column_tile,
    copy_shard,
    empty_parts,
    join_packed,
    join_rows,
    plan_split,
    split_packed,
    split_rows,
)
from vllm_rose_plugin.kernels.gemm.reference import mxfp8_linear
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight, pack_weight

TARGETS = ["sm_90a", "sm_100f", "sm_107a"]
QWEN, MINIMAX = (4096, 1536), (3072, 1536)  # hidden and intermediate size


def weight(groups, n, k, *, seed=0):
    """Any codes (NaN left out) and any scales."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 0x7F, (groups, n, k), generator=g, dtype=torch.uint8)
    codes |= torch.randint(0, 2, codes.shape, generator=g, dtype=torch.uint8) << 7
    scales = torch.randint(0, 255, (groups, n, k // 32), generator=g, dtype=torch.uint8)
    return Mxfp8Tensor(codes.view(torch.float8_e4m3fn), scales)


def make(part, shape, dtype):
    """Memory that is full of other bytes, so that a byte that isn't written is seen."""
    return torch.full(shape, 0xAA, dtype=torch.uint8).view(dtype)


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def cases():
    for target in TARGETS:
        tile = column_tile(target)
        for gate_up in (False, True):
            for parts, tiles in ((1, 1), (1, 3), (2, 1), (2, 3), (3, 2), (4, 1)):
                for k in (32, 96, 256):
                    yield target, gate_up, parts, parts * tiles * tile * (2 if gate_up else 1), k


def split_of(target, gate_up, parts, n):
    split = plan_split(n=n, parts=parts, target=target, gate_up=gate_up)
    assert (split.parts, split.reason) == (parts, "")
    return split


@pytest.mark.parametrize(("target", "gate_up", "parts", "n", "k"), list(cases()))
def test_splitting_then_joining_is_the_identity(target, gate_up, parts, n, k):
    split, whole = split_of(target, gate_up, parts, n), weight(3, n, k)
    for tensor in (whole.codes, whole.scales):
        pieces = split_rows(split, tensor, make)
        assert [tuple(piece.shape) for piece in pieces] == [(3, n // parts, tensor.shape[-1])] * parts
        assert all(piece.is_contiguous() for piece in pieces)
        assert same(join_rows(split, pieces), tensor)
        out = make(0, tuple(tensor.shape), tensor.dtype)
        assert join_rows(split, pieces, out=out) is out and same(out, tensor)


@pytest.mark.parametrize(("target", "gate_up", "parts", "n", "k"), list(cases()))
def test_packed_weights_split_and_join_alike(target, gate_up, parts, n, k):
    split, whole = split_of(target, gate_up, parts, n), weight(3, n, k)
    packed = pack_weight(whole, target=target, gate_up=gate_up)
    pieces = split_packed(split, packed, make)
    rows = zip(split_rows(split, whole.codes, make), split_rows(split, whole.scales, make), strict=True)
    for piece, (codes, scales) in zip(pieces, rows, strict=True):
        own = pack_weight(Mxfp8Tensor(codes, scales), target=target, gate_up=gate_up)
        assert (piece.n, piece.k, piece.num_groups, piece.gate_up, piece.target) == (n // parts, k, 3, gate_up, target)
        assert same(piece.codes, own.codes) and piece.scales.shape == own.scales.shape
        assert same(piece.scales, own.scales) and piece.scales.is_contiguous()
        # EPLB moves experts as rows of this view.
        assert piece.scales.view(3, -1).shape[0] == 3
    joined = join_packed(split, pieces)
    assert same(joined.codes, packed.codes) and same(joined.scales, packed.scales)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("parts", [2, 4])
def test_a_part_holds_gate_and_up_of_its_own_columns(target, parts):
    columns = parts * column_tile(target)
    split = split_of(target, True, parts, 2 * columns)
    rows = torch.arange(2 * columns, dtype=torch.int32).view(1, -1, 1)
    pieces = split_rows(split, rows, lambda part, shape, dtype: torch.empty(shape, dtype=dtype))
    for part, piece in enumerate(pieces):
        gate, up = piece.flatten().chunk(2)
        first = part * split.part_columns
        assert gate.tolist() == list(range(first, first + split.part_columns))
        assert (up - gate).unique().tolist() == [columns]


@pytest.mark.parametrize("target", TARGETS)
def test_parts_compute_the_columns_of_the_whole(target):
    n, k, parts = 4 * column_tile(target), 64, 2
    g = torch.Generator().manual_seed(3)
    codes = torch.randint(-4, 5, (1, n, k), generator=g).float().to(torch.float8_e4m3fn)
    whole = Mxfp8Tensor(codes, torch.randint(126, 129, (1, n, k // 32), generator=g, dtype=torch.uint8))
    x = torch.randint(-2, 3, (5, k), generator=g).to(torch.bfloat16)
    split = split_of(target, True, parts, n)
    rows = zip(split_rows(split, whole.codes, make), split_rows(split, whole.scales, make), strict=True)
    outs = [mxfp8_linear(x, Mxfp8Tensor(codes[0], scales[0])) for codes, scales in rows]
    gate, up = mxfp8_linear(x, Mxfp8Tensor(whole.codes[0], whole.scales[0])).chunk(2, dim=-1)
    assert torch.equal(torch.cat([out.chunk(2, dim=-1)[0] for out in outs], -1), gate)
    assert torch.equal(torch.cat([out.chunk(2, dim=-1)[1] for out in outs], -1), up)


class Made(TorchDispatchMode):
    """The bytes of every storage that an operation makes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        storages = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in [result] if isinstance(result, torch.Tensor) else result or ():
            if tensor.untyped_storage().data_ptr() not in storages:
                self.bytes += tensor.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("stacked", [False, True])
def test_a_shard_of_a_mapped_file_goes_straight_to_its_parts(tmp_path, target, stacked):
    """Tensor parallel: the rank's rows are a view of the file. Only the parts are made."""
    experts, ranks, rank, parts, k = 3, 2, 1, 2, 64
    columns = parts * column_tile(target)
    w1, w3 = (weight(experts, ranks * columns, k, seed=seed).codes for seed in (1, 2))
    path = tmp_path / "shard"
    torch.cat([w1, w3], 1).view(torch.uint8).numpy().tofile(path)
    mapped = numpy.memmap(path, mode="c", dtype=numpy.uint8, shape=(experts, 2 * ranks * columns, k))
    file = torch.from_numpy(mapped).view(torch.float8_e4m3fn)
    gate = file.narrow(1, rank * columns, columns)
    up = file.narrow(1, (ranks + rank) * columns, columns)
    split = split_of(target, True, parts, 2 * columns)
    pieces = empty_parts(split, num_groups=experts, width=k, dtype=file.dtype, make=make)
    with Made() as made:
        for expert in (2, 0, 1):
            if stacked:
                own = file[expert].view(2, ranks, columns, k)[:, rank]  # gate and up rows that lie apart
                copy_shard(split, own[0], pieces, group=expert, half="gate")
                copy_shard(split, own[1], pieces, group=expert, half="up")
            else:
                copy_shard(split, up[expert], pieces, group=expert, half="up")
                copy_shard(split, gate[expert], pieces, group=expert, half="gate")
    assert made.bytes == 0
    assert same(join_rows(split, pieces), torch.cat([gate, up], 1))


def test_the_counter_of_bytes_counts():
    with Made() as made:
        torch.ones(4)[:2].clone()
    assert made.bytes == 16 + 8


@pytest.mark.parametrize(
    ("shape", "tp", "parts", "sm90", "sm100"),
    [
        (QWEN, 1, 2, True, True),
        (QWEN, 2, 2, True, True),  # 768 / 2 = 3 * 128
        (QWEN, 4, 2, True, False),  # 384 / 2 = 192
        (MINIMAX, 8, 2, False, False),  # 192 / 2 = 96
        (QWEN, 1, 4, True, True),
        (QWEN, 2, 4, True, False),
    ],
)
def test_which_w13_is_split(shape, tp, parts, sm90, sm100):
    columns = shape[1] // tp
    for target, expected in zip(TARGETS, (sm90, sm100, sm100), strict=True):
        split = plan_split(n=2 * columns, parts=parts, target=target, gate_up=True, name="layers.0.experts.w13")
        if expected:
            assert (split.parts, split.part_columns, split.part_n) == (parts, columns // parts, 2 * columns // parts)
            continue
        assert (split.parts, split.part_n) == (1, 2 * columns)
        assert split.reason == (
            f"layers.0.experts.w13 is not split over {parts} locality domains: {columns} columns are "
            f"{columns / parts:g} for each, no multiple of {target}'s tile of {column_tile(target)}"
        )


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_not_split_has_one_part_and_keeps_its_bytes(target):
    whole = weight(2, 2 * 40, 64)
    split = plan_split(n=80, parts=2, target=target, gate_up=True)
    assert split.parts == 1 and split.reason
    packed = pack_weight(whole, target=target, gate_up=True)
    (piece,) = split_packed(split, packed, make)
    assert same(piece.codes, packed.codes) and same(piece.scales, packed.scales)
    assert same(join_packed(split, [piece]).scales, packed.scales)


def test_parts_lie_where_make_puts_them():
    asked = []
    split = split_of("sm_107a", False, 2, 256)
    packed = pack_weight(weight(2, 256, 64), target="sm_107a")
    split_packed(split, packed, lambda *what: asked.append(what) or make(*what))
    assert asked == [
        (0, (2, 128, 64), torch.uint8),
        (1, (2, 128, 64), torch.uint8),
        (0, (2 * 128 * 4,), torch.uint8),
        (1, (2 * 128 * 4,), torch.uint8),
    ]


def test_what_does_not_fit_is_refused_and_copies_nothing():
    split = plan_split(n=256, parts=2, target="sm_107a")
    w13 = plan_split(n=512, parts=2, target="sm_107a", gate_up=True)
    pieces = empty_parts(split, num_groups=2, width=64, dtype=torch.uint8, make=make)
    shard = torch.zeros(256, 64, dtype=torch.uint8)
    calls = [
        (ValueError, r"the shard must be \[256, 64\]", lambda: copy_shard(split, shard[:128], pieces, group=0)),
        (ValueError, r"part 0 must be \[2, 128, 32\]", lambda: copy_shard(split, shard[:, :32], pieces, group=0)),
        (ValueError, "1 parts for a split into 2", lambda: copy_shard(split, shard, pieces[:1], group=0)),
        (ValueError, "group=2 must be 0 to 1", lambda: copy_shard(split, shard, pieces, group=2)),
        (ValueError, "group=-1 must be", lambda: copy_shard(split, shard, pieces, group=-1)),
        (ValueError, "half='up' is for", lambda: copy_shard(split, shard, pieces, group=0, half="up")),
        (TypeError, "part 0 must be torch.float8", lambda: copy_shard(split, shard.view(FP8), pieces, group=0)),
        (ValueError, "out must be", lambda: join_rows(split, pieces, out=shard)),
        (ValueError, "1 parts for a split", lambda: join_rows(split, pieces[1:])),
        (ValueError, r"the shard must be \[256, 64\]", lambda: copy_shard(w13, shard[:8], pieces, group=0, half="up")),
        (ValueError, "is wanted, got", lambda: split_packed(w13, packed(256), make)),
        (ValueError, "is wanted, got", lambda: join_packed(split, [packed(256)] * 2)),
        (ValueError, "parts=0", lambda: plan_split(n=256, parts=0, target="sm_107a")),
        (ValueError, "n=255 must be even", lambda: plan_split(n=255, parts=1, target="sm_107a", gate_up=True)),
        (ValueError, "sm_80", lambda: plan_split(n=256, parts=2, target="sm_80")),
    ]
    for error, message, call in calls:
        with pytest.raises(error, match=message):
            call()
    assert all((piece == 0xAA).all() for piece in pieces)


FP8 = torch.float8_e4m3fn


def packed(n) -> PackedWeight:
    return pack_weight(weight(1, n, 64), target="sm_107a")


def test_a_plan_is_a_value():
    assert plan_split(n=256, parts=2, target="sm_107a") == ColumnSplit(256, False, "sm_107a", 2)
