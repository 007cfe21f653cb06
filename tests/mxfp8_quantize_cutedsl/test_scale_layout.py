"""The tiled order of scales, byte by byte, and back."""

import pytest
import torch

from vllm_rose_plugin.kernels.contracts import ScaleLayout
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import scale_shape, tile_scales, untile_scales

SHAPES = [(1, 1), (1, 6), (32, 4), (33, 5), (127, 24), (128, 4), (129, 48), (300, 7)]


@pytest.mark.parametrize(("num_rows", "num_blocks"), SHAPES)
def test_every_byte_has_its_place(num_rows, num_blocks):
    scales = torch.randint(1, 256, (num_rows, num_blocks), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    tiled = tile_scales(scales)
    assert tuple(tiled.shape) == scale_shape(
        num_rows=num_rows, hidden_size=num_blocks * 32, layout=ScaleLayout.TCGEN05_128X4
    )
    expected = [0] * len(tiled)
    block_tiles = -(-num_blocks // 4)
    for row in range(num_rows):
        for block in range(num_blocks):
            tile = row // 128 * block_tiles + block // 4
            # 32 groups of 16 bytes; a group holds rows r, r + 32, r + 64, r + 96 with four blocks of each
            expected[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4] = scales[row, block].item()
    assert tiled.tolist() == expected


@pytest.mark.parametrize(("num_rows", "num_blocks"), [*SHAPES, (0, 4), (0, 3)])
def test_untile_undoes_tile(num_rows, num_blocks):
    scales = torch.randint(0, 256, (num_rows, num_blocks), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    assert torch.equal(untile_scales(tile_scales(scales), num_rows=num_rows, num_blocks=num_blocks), scales)


def test_vllm_has_the_same_order():
    from vllm.model_executor.layers.quantization.utils import mxfp8_utils

    for num_rows, num_blocks in SHAPES:
        scales = torch.randint(0, 256, (num_rows, num_blocks)).to(torch.uint8)
        assert torch.equal(tile_scales(scales), mxfp8_utils.swizzle_mxfp8_scale(scales, num_rows, num_blocks * 32))


def test_a_wrong_size_is_named():
    with pytest.raises(ValueError, match=r"129 rows x 5 blocks are 2048 bytes, got 645"):
        untile_scales(torch.zeros(645, dtype=torch.uint8), num_rows=129, num_blocks=5)
