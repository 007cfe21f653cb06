"""What the host chooses from shapes, alignment and target."""

import pytest
import torch

from vllm_rose_plugin.kernels.qk_norm.config import choose_config, model_configs, rope_fits

BASE = {
    "num_tokens": 16,
    "num_q_heads": 64,
    "num_kv_heads": 4,
    "head_dim": 128,
    "dtype": torch.bfloat16,
    "weight_dtype": torch.bfloat16,
    "eps": 1e-6,
    "weight_offset": 0.0,
    "alignment": 32,
    "widest_load_bits": 128,
    "sm_count": 132,
}


def chosen(**changes):
    return choose_config(**{**BASE, **changes})


def test_half_a_warp_per_head_and_a_quarter_where_256_bits_load_at_once():
    assert (chosen().lanes_per_head, chosen().vector_bits) == (16, 128)
    wide = chosen(widest_load_bits=256)
    assert (wide.lanes_per_head, wide.vector_bits) == (8, 256)
    assert chosen(head_dim=64).lanes_per_head == 8
    assert chosen(head_dim=256).lanes_per_head == 32


@pytest.mark.parametrize("alignment", [2, 4, 8, 16])
def test_narrow_alignment_gives_narrow_loads_by_the_same_lanes(alignment):
    for widest in (128, 256):
        config = chosen(alignment=alignment, widest_load_bits=widest)
        assert config.vector_bits == alignment * 8 and config.lanes_per_head == 16
    assert chosen(weight_alignment=alignment).weight_bits == alignment * 8


def test_decode_has_one_head_per_lane_and_prefill_several():
    decode, prefill = chosen(num_tokens=128), chosen(num_tokens=4096)
    assert decode.heads_per_lane == 1 and prefill.heads_per_lane == 4
    assert decode.groups_per_token == 68 and prefill.groups_per_token == 17
    assert chosen(num_tokens=4096, widest_load_bits=256).heads_per_lane == 2  # the same bytes
    assert chosen(num_tokens=1 << 20, num_q_heads=1, num_kv_heads=1).heads_per_lane == 2
    arguments = {name: value for name, value in BASE.items() if name != "num_tokens"}
    assert set(model_configs(**arguments)) == {decode, prefill}


def test_lanes_where_the_rotated_part_ends():
    rope = {"cos_sin_dtype": torch.float32}
    assert chosen(rotary_dim=128, **rope).elements_per_lane == 8
    assert chosen(rotary_dim=24, **rope).elements_per_lane == 4  # 12 | 12: partners are 3 lanes apart
    assert chosen(rotary_dim=24, interleaved=True, **rope).elements_per_lane == 8
    assert chosen(rotary_dim=0).cos_sin_bits == 0 and chosen(rotary_dim=128, **rope).cos_sin_bits == 128
    for head_dim, rotary_dim, interleaved, fits in (
        (128, 128, False, True),
        (256, 64, False, True),
        (256, 24, False, False),
        (256, 24, True, True),
        (64, 4, False, True),
        (64, 6, False, False),
        (80, 80, False, False),
        (128, 7, True, False),
        (128, 256, True, False),
    ):
        assert rope_fits(head_dim=head_dim, rotary_dim=rotary_dim, interleaved=interleaved) == fits


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"head_dim": 80}, "head_dim is 80"),
        ({"dtype": torch.float32}, "dtype is torch.float32"),
        ({"weight_dtype": torch.float16}, "weights are torch.float16"),
        ({"num_kv_heads": 0}, "0 k heads"),
        ({"alignment": 6}, "alignment is 6 bytes"),
        ({"rotary_dim": 6, "cos_sin_dtype": torch.float32}, "rotary_dim is 6, it must be a multiple of 8"),
        ({"rotary_dim": 130, "cos_sin_dtype": torch.float32}, "at most head_dim, 128"),
        ({"rotary_dim": 64, "cos_sin_dtype": torch.float16}, "cos_sin_cache is torch.float16"),
    ],
)
def test_refusals_name_the_value(changes, message):
    with pytest.raises(ValueError, match=message):
        chosen(**changes)
