"""Packed weight scales, byte by byte."""

import pytest
import torch

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor, ScaleLayout
from vllm_rose_plugin.kernels.gemm.weights import kernel_rows, pack_weight, packed_shape

SHAPES = [(1, 192, 96), (3, 96, 192), (2, 64, 2688), (1, 232, 32)]


def weight(groups: int, n: int, k: int) -> Mxfp8Tensor:
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 256, (groups, n, k), generator=generator).to(torch.uint8)
    scales = torch.randint(0, 256, (groups, n, k // 32), generator=generator).to(torch.uint8)
    return Mxfp8Tensor(codes.view(torch.float8_e4m3fn), scales)


def checkpoint_row(r: int, n: int, gate_up: bool) -> int:
    if not gate_up:
        return r
    pair, row = divmod(r, 16)
    return 8 * pair + row if row < 8 else n // 2 + 8 * pair + row - 8


@pytest.mark.parametrize("gate_up", [False, True])
@pytest.mark.parametrize(("groups", "n", "k"), SHAPES)
def test_sm90(groups, n, k, gate_up):
    if gate_up and n % 16:
        return
    given = weight(groups, n, k)
    packed = pack_weight(given, target="sm_90a", gate_up=gate_up)
    blocks = -(-k // 128)
    assert tuple(packed.scales.shape) == (groups * -(-n // 64), blocks * 256)
    flat = packed.scales.flatten().tolist()
    expected = [127] * len(flat)
    for g in range(groups):
        for r in range(n):
            for b in range(k // 32):
                at = (((g * -(-n // 64) + r // 64) * blocks + b // 4) * 64 + r % 64) * 4 + b % 4
                expected[at] = given.scales[g, checkpoint_row(r, n, gate_up), b].item()
    assert flat == expected


@pytest.mark.parametrize("gate_up", [False, True])
@pytest.mark.parametrize("target", ["sm_100a", "sm_100f", "sm_103a", "sm_107a"])
def test_from_sm100_on(target, gate_up):
    for groups, n, k in SHAPES:
        if gate_up and n % 16:
            continue
        given = weight(groups, n, k)
        packed = pack_weight(given, target=target, gate_up=gate_up)
        parts = 2 if gate_up else 1
        rows, row_tiles, block_tiles = n // parts, -(-n // parts // 128), -(-k // 128)
        assert packed.scales.numel() == groups * parts * row_tiles * block_tiles * 512
        flat = packed.scales.tolist()
        expected = [0] * len(flat)
        for g in range(groups):
            for r in range(n):
                for b in range(k // 32):
                    part, row = divmod(r, rows)
                    tile = ((g * parts + part) * row_tiles + row // 128) * block_tiles + b // 4
                    at = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + b % 4
                    expected[at] = given.scales[g, r, b].item()
        assert flat == expected


def test_codes_are_the_checkpoints_and_memory_stays_small():
    given = weight(4, 256, 512)
    before = given.codes.view(torch.uint8).clone(), given.scales.clone()
    packed = pack_weight(given, target="sm_90a", gate_up=True)
    assert packed.codes.data_ptr() == given.codes.data_ptr() and packed.codes.shape == (4, 256, 512)
    assert (packed.num_groups, packed.n, packed.k, packed.gate_up, packed.target) == (4, 256, 512, True, "sm_90a")
    assert torch.equal(given.codes.view(torch.uint8), before[0]) and torch.equal(given.scales, before[1])
    assert packed.extra_bytes == 4 * 256 * 512 // 32 == packed.scales.untyped_storage().nbytes()


def test_packing_needs_one_group_more_at_a_time(monkeypatch):
    """The largest piece that is made on the way is that of one group."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        sizes = ()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
                if out.untyped_storage().data_ptr() not in known:
                    self.sizes += (out.untyped_storage().nbytes(),)
            return out

    for target in ("sm_90a", "sm_100a"):
        given = weight(16, 128, 512)
        with Largest() as largest:
            packed = pack_weight(given, target=target, gate_up=True)
        total, one = packed.extra_bytes, packed.extra_bytes // 16
        sizes = [size for size in largest.sizes if size != total]
        assert largest.sizes.count(total) == 1 and max(sizes) <= one, target


def test_two_dimensions_are_one_group_and_memory_is_used_again():
    given = weight(1, 192, 96)
    plain = Mxfp8Tensor(given.codes[0], given.scales[0])
    packed = pack_weight(plain, target="sm_90a")
    assert packed.codes.shape == (1, 192, 96)
    again = pack_weight(Mxfp8Tensor(plain.codes, plain.scales ^ 1), target="sm_90a", out=packed.scales)
    assert again.scales is packed.scales
    assert torch.equal(packed.scales, pack_weight(Mxfp8Tensor(plain.codes, plain.scales ^ 1), target="sm_90a").scales)
    assert not torch.equal(packed.scales, pack_weight(plain, target="sm_90a").scales)


def test_rows_of_gate_and_up():
    rows = kernel_rows(64).tolist()
    assert rows == [checkpoint_row(r, 64, True) for r in range(64)] and sorted(rows) == list(range(64))
    assert rows[:18] == [*range(8), *range(32, 40), 8, 9]


def test_what_does_not_fit_is_named():
    given = weight(1, 192, 96)
    shape = packed_shape(num_groups=1, n=192, k=96, target="sm_90a", gate_up=False)
    with pytest.raises(ValueError, match="unknown target 'sm_80'"):
        pack_weight(given, target="sm_80")
    with pytest.raises(ValueError, match=r"ROW_MAJOR, got ScaleLayout.TCGEN05_128X4"):
        pack_weight(Mxfp8Tensor(given.codes, given.scales, ScaleLayout.TCGEN05_128X4), target="sm_90a")
    with pytest.raises(TypeError, match=r"got torch.uint8 with torch.uint8"):
        pack_weight(Mxfp8Tensor(given.codes.view(torch.uint8), given.scales), target="sm_90a")
    with pytest.raises(ValueError, match=r"need scales \(1, 192, 3\), got \(1, 192, 2\)"):
        pack_weight(Mxfp8Tensor(given.codes, given.scales[..., :2]), target="sm_90a")
    with pytest.raises(ValueError, match="N is 24; it must be a multiple of 16 with gate and up"):
        pack_weight(weight(1, 24, 32), target="sm_90a", gate_up=True)
    with pytest.raises(ValueError, match="N is 12; it must be a multiple of 8"):
        pack_weight(weight(1, 12, 32), target="sm_100a")
    with pytest.raises(ValueError, match="must be contiguous, got strides"):
        pack_weight(Mxfp8Tensor(given.codes[..., :64], given.scales[..., :2]), target="sm_90a")
    with pytest.raises(ValueError, match=r"must be \[G, N, K\] or \[N, K\], got shape \(96,\)"):
        pack_weight(Mxfp8Tensor(given.codes[0, 0], given.scales[0, 0]), target="sm_90a")
    with pytest.raises(ValueError, match=r"out must be contiguous torch.uint8 \(3, 256\)"):
        pack_weight(given, target="sm_90a", out=torch.zeros(shape[0] + 1, shape[1], dtype=torch.uint8))
    memory = torch.zeros(192 * 96 + 8, dtype=torch.uint8)[8:].view(torch.float8_e4m3fn).view(1, 192, 96)
    with pytest.raises(ValueError, match="must start at a multiple of 16 bytes"):
        pack_weight(Mxfp8Tensor(memory, given.scales), target="sm_90a")
