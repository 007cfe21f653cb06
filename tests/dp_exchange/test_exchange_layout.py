"""Where things lie: nothing overlaps, for any number of ranks, and what doesn't fit is refused."""

import itertools
from dataclasses import replace

import pytest
from exchange_cases import shape_of

from vllm_rose_plugin.kernels.dp_combine import config as combine
from vllm_rose_plugin.kernels.dp_dispatch import config as dispatch
from vllm_rose_plugin.kernels.dp_exchange.layout import MAX_BLOCKS, RECEIVE, WORD, Layout, Payload


@pytest.mark.parametrize("size", [2, 3, 8, 16, 72])
@pytest.mark.parametrize("payload", Payload)
def test_no_two_things_share_a_byte(size, payload):
    shape = shape_of(size, hidden_size=96, top_k=5, experts_each=3, max_tokens=37, payload=payload)
    layout = Layout(shape)
    pieces = [(layout.count_at(kind, block), WORD) for kind in (0, RECEIVE) for block in (0, MAX_BLOCKS - 1)]
    pieces += [(layout.abandoned, WORD)]
    pieces += [(layout.plan_flag_at(sender), WORD) for sender in range(size)]
    pieces += [(layout.token_flag_at(s, t), WORD) for s in range(size) for t in range(37)]
    pieces += [(layout.row_flag_at(place), WORD) for place in range(37 * shape.slots)]
    assert max(start + length for start, length in pieces) <= layout.plans
    pieces += [(layout.plan_at(half, s), 4 * shape.plan_words) for half in (0, 1) for s in range(size)]
    pieces += [
        (layout.dispatch_rows + layout.dispatch_row_index(half, s, t) * layout.row_bytes, layout.row_bytes)
        for half in (0, 1) for s in range(size) for t in range(37)
    ]  # fmt: skip
    pieces += [
        (layout.combine_rows + place * layout.combine_row_bytes, layout.combine_row_bytes)
        for place in range(37 * shape.slots)
    ]
    pieces.sort()
    for (start, length), (following, _) in itertools.pairwise(pieces):
        assert start + length <= following
    assert pieces[-1][0] + pieces[-1][1] == layout.size
    assert all(start % (16 if length > WORD else WORD) == 0 for start, length in pieces)


@pytest.mark.parametrize("payload", Payload)
def test_a_row_holds_its_parts(payload):
    layout = Layout(shape_of(2, hidden_size=2880, top_k=9, experts_each=8, payload=payload))
    scales = 90 if payload is Payload.MXFP8 else 0
    elements = 2880 if payload is Payload.MXFP8 else 5760
    assert layout.code_bytes == elements <= layout.scales and layout.scales + scales <= layout.ids
    # Scales are stored four at a time, so up to three bytes behind them are written.
    assert layout.scales + -(-scales // 4) * 4 <= layout.ids
    assert (
        layout.ids + 36 <= layout.weights and layout.weights + 36 <= layout.slot and layout.slot + 4 <= layout.row_bytes
    )
    assert layout.row_bytes % 128 == layout.combine_row_bytes % 128 == 0


def test_bytes_of_a_rack_and_what_the_message_says():
    shape = shape_of(72, hidden_size=4096, top_k=8, experts_each=2, max_tokens=256)
    layout = Layout(shape)
    assert layout.row_bytes == 4352
    assert layout.size == pytest.approx(2 * 72 * 256 * 4352 + 8 * 256 * 8192, rel=0.01)
    assert "for 256 tokens of each" in layout.describe() and "72 ranks" in layout.describe()
    assert f"{layout.size / 2**20:.1f} MiB" in layout.describe()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 73}, "73 ranks; it must be 2 to 72"),
        ({"hidden_size": 48}, "H is 48; it must be a multiple of 32"),
        ({"top_k": 17}, "top_k is 17; it must be 1 to 16"),
        ({"max_tokens": 0}, "max_tokens=0; with 2 ranks it must be 1 to 131072: --flag sets it"),
        ({"max_tokens": 131073}, "max_tokens=131073; with 2 ranks it must be 1 to 131072: --flag sets it"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ValueError, match=message):
        shape_of(**changes).check(setting="--flag")


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="13 experts over 2 ranks; every rank must have equally many"):
        replace(shape_of(2), num_experts=13).check(setting="--flag")


@pytest.mark.parametrize("sm_count", [78, 132, 148])
@pytest.mark.parametrize("max_tokens", [7, 600, 1040, 8192])
@pytest.mark.parametrize("group_size", [2, 24])
@pytest.mark.parametrize("hidden_size", [2048, 4096, 7168])
def test_no_step_needs_a_kernel_that_was_not_warmed_up(hidden_size, group_size, max_tokens, sm_count):
    """A rank that compiles while it serves lets all others wait; warps in small blocks are only in the middle."""
    shape = shape_of(group_size, hidden_size=hidden_size, max_tokens=max_tokens)
    how = {"shape": shape, "sm_count": sm_count}
    for sizes, choose, most in (
        (dispatch.send_sizes, lambda n: dispatch.choose_send(num_tokens=n, input="mxfp8", **how), max_tokens),
        (dispatch.receive_sizes, lambda n: dispatch.choose_receive(total_rows=n, **how), group_size * max_tokens),
        (combine.send_sizes, lambda n: combine.choose_send(total_rows=n, **how), group_size * max_tokens),
        (combine.receive_sizes, lambda n: combine.choose_receive(num_tokens=n, **how), max_tokens),
    ):
        warm = {choose(n)[0] for n in sizes(shape, sm_count)}
        assert {choose(n)[0] for n in (*range(1, min(most, 2000) + 1), most)} == warm


@pytest.mark.parametrize("num_tokens", [1, 3, 128, 951, 2048, 65536])
@pytest.mark.parametrize("hidden_size", [32, 2880, 4096, 7168])
def test_every_row_has_a_team_and_no_launch_is_too_large(num_tokens, hidden_size):
    shape = shape_of(2, hidden_size=hidden_size, max_tokens=65536)
    calls = [(dispatch.choose_send(num_tokens=num_tokens, shape=shape, input="bfloat16", sm_count=132), num_tokens)]
    rows = 2 * num_tokens
    calls += [
        (dispatch.choose_receive(total_rows=rows, shape=shape, sm_count=132), rows),
        (combine.choose_send(total_rows=rows, shape=shape, sm_count=132), rows),
        (combine.choose_receive(num_tokens=num_tokens, shape=shape, sm_count=132), num_tokens),
    ]
    for (config, blocks), work in calls:
        assert config.threads % config.team == 0 and config.team % 32 == 0 and config.threads <= 1024
        assert config.threads >= shape.group_size, "a thread waits for each plan"
        plans = shape.group_size if isinstance(config, dispatch.SendConfig) else 0
        assert blocks + plans <= MAX_BLOCKS and blocks <= work
        assert blocks
        if isinstance(config, dispatch.ReceiveConfig | combine.ReceiveConfig):
            assert blocks * config.threads <= 132 * 1024, "half of what the SMs hold"


@pytest.mark.parametrize("sm_count", [1, 16, 132])
@pytest.mark.parametrize("group_size", [2, 72])
@pytest.mark.parametrize("hidden_size", [32, 4096, 7168])
def test_one_launch_for_a_step_fits_on_the_device_at_once(hidden_size, group_size, sm_count):
    """Its blocks wait for peers whose blocks wait for them."""
    shape = shape_of(group_size, hidden_size=hidden_size, max_tokens=1024)
    how, kernels, largest = {"shape": shape, "sm_count": sm_count}, set(), 0
    for tokens in (0, 1, 7, 64, 300, 1024):
        step = {"num_tokens": max(1, tokens), "total_rows": group_size * max(1, tokens), **how}
        calls = (dispatch.choose_fused(input="mxfp8", **step), combine.choose_fused(**step))
        for fused, reserved in zip(calls, (group_size, 0), strict=True):
            if fused is None:
                continue
            config, blocks = fused
            assert config.send.threads == config.receive.threads == config.send.team == config.receive.team
            assert reserved < blocks <= sm_count
            assert blocks <= MAX_BLOCKS and config.send.threads >= group_size
            kernels.add(config)
            largest = max(largest, tokens)
    assert len(kernels) <= 2, "all steps have the same"
    if sm_count == 132:
        assert largest >= (64 if group_size == 2 else 1), "the smallest steps have one launch"
