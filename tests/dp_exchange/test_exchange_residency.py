"""Steps in one launch, whose blocks wait for peers' blocks, beside a collective of another stream: all of it ends.

A model, of the worst there is: a block takes a whole SM, and keeps it until what it waits for has come.
"""

import itertools

import pytest
from exchange_cases import shape_of

from vllm_rose_plugin.kernels.dp_combine import config as combine
from vllm_rose_plugin.kernels.dp_dispatch import config as dispatch
from vllm_rose_plugin.kernels.dp_exchange.table import SHARES, Tuning, Way

EXCHANGE, COLLECTIVE = "exchange", "collective"
ORDERS = tuple(itertools.permutations((EXCHANGE, COLLECTIVE)))


def all_end(orders: tuple[tuple[str, ...], ...], blocks: dict[str, int], sm_count: int) -> bool:
    """Whether all launches end, for the order in which each rank's two streams come to its device.

    A block of the exchange sends when it starts, and ends once all blocks of all ranks have; a channel of the
    collective ends once it has started on all ranks.
    """
    waiting = [[(kind, i) for kind in order for i in range(blocks[kind])] for order in orders]
    started: list[set] = [set() for _ in orders]
    ended: list[set] = [set() for _ in orders]
    moved = True
    while moved:
        moved = False
        for queue, here, over in zip(waiting, started, ended, strict=True):
            while queue and len(here) - len(over) < sm_count:
                here.add(queue.pop(0))
                moved = True
        everywhere = set.intersection(*started)
        for rank, here in enumerate(started):
            others = [of for other, of in enumerate(started) if other != rank]
            come = all((EXCHANGE, i) in of for of in others for i in range(blocks[EXCHANGE]))
            now = {block for block in here if (come if block[0] == EXCHANGE else block in everywhere)}
            moved |= now != ended[rank]
            ended[rank] = now
    return not any(waiting) and started == ended


def test_the_model_hangs_where_one_launch_takes_every_sm():
    one_first = (ORDERS[0], ORDERS[1], ORDERS[1])
    assert not all_end(one_first, {EXCHANGE: 132, COLLECTIVE: 1}, 132)
    assert all_end(one_first, {EXCHANGE: 131, COLLECTIVE: 1}, 132)
    assert all_end((ORDERS[0],) * 3, {EXCHANGE: 132, COLLECTIVE: 32}, 132), "in one order all is well"


@pytest.mark.parametrize("sm_count", [78, 132, 148, 212])
@pytest.mark.parametrize("group_size", [2, 16, 72])
def test_a_step_in_one_launch_and_a_collective_end_whichever_starts_first(group_size, sm_count):
    shape = shape_of(group_size, hidden_size=7168, top_k=8, max_tokens=1024)
    launches = set()
    for tokens, tuning in itertools.product((1, 66, 1024), (None, *(Tuning(Way.ONE_LAUNCH, n) for n in SHARES))):
        step = {"num_tokens": tokens, "total_rows": group_size * tokens, "shape": shape, "sm_count": sm_count}
        made = (
            dispatch.choose_fused(input="bfloat16", tuning=tuning, **step),
            combine.choose_fused(tuning=tuning, **step),
        )
        launches |= {fused[1] for fused in made if fused}
    assert launches
    for blocks, channels, orders in itertools.product(launches, (1, 32), itertools.product(ORDERS, repeat=3)):
        assert all_end(orders, {EXCHANGE: blocks, COLLECTIVE: channels}, sm_count), (blocks, channels, orders)


def test_128_tokens_of_two_ranks_have_two_rows_a_block():
    step = {"num_tokens": 128, "total_rows": 256, "shape": shape_of(2, hidden_size=4096, max_tokens=128)}
    assert dispatch.choose_fused(input="bfloat16", sm_count=132, **step)[1] == 128
    assert combine.choose_fused(sm_count=132, **step)[1] == 128
