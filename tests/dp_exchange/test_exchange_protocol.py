"""No row is lost, read twice or read early, nobody waits for ever: every interleaving of ranks, three epochs."""

import itertools
import random

import pytest
from protocol_search import Faults, ProtocolError, search

EPOCHS = 3


def subsets(size):
    return [frozenset(peers) for n in range(size + 1) for peers in itertools.combinations(range(size), n)]


def patterns(size, count, seed):
    """Where tokens go in each epoch: everywhere, nowhere, one idle rank, and others drawn at random."""
    everywhere, nowhere = frozenset(range(size)), frozenset()
    yield ((everywhere,) * size,) * EPOCHS
    yield ((nowhere,) * size,) * EPOCHS
    yield ((everywhere, *(nowhere,) * (size - 1)),) * EPOCHS
    draw = random.Random(seed)
    for _ in range(count):
        yield tuple(tuple(draw.choice(subsets(size)) for _ in range(size)) for _ in range(EPOCHS))


def test_two_ranks_whatever_they_send():
    """All that rank 0 can send, and rank 1 nothing or to all, in each of the epochs."""
    some, none_or_all = subsets(2), (frozenset(), frozenset((0, 1)))
    states = 0
    for first in itertools.product(some, repeat=EPOCHS):
        for second in itertools.product(none_or_all, repeat=EPOCHS):
            states += search(2, tuple(zip(first, second, strict=True)))
    assert states > 512 * 200


def test_two_ranks_with_everything_of_a_launch_side_by_side():
    for number, pattern in enumerate(patterns(2, 4, seed=1)):
        assert search(2, pattern[:2] if number else pattern[:1] * 2, side_by_side=True) > 50


def test_two_ranks_with_halves_in_one_launch_of_two_blocks():
    for pattern in patterns(2, 8, seed=1):
        assert search(2, pattern, blocks=2) > 10_000


@pytest.mark.parametrize("seed", range(3))
def test_three_ranks(seed):
    for pattern in patterns(3, 3, seed) if seed else list(patterns(3, 0, 0)):
        assert search(3, pattern) > 300
        assert search(3, pattern, blocks=1) > 300


@pytest.mark.parametrize(
    "faults",
    [
        Faults(one_half=True),
        Faults(silent_when_empty=True),
        Faults(token_flag_early=True),
        Faults(no_token_wait=True),
        Faults(no_plan_wait=True),
        Faults(row_flag_early=True),
    ],
    ids=["one_half", "silent_when_empty", "token_flag_early", "no_token_wait", "no_plan_wait", "row_flag_early"],
)
@pytest.mark.parametrize("blocks", [0, 2])
def test_the_search_notices_a_missing_rule(faults, blocks):
    noticed = 0
    for pattern in itertools.islice(patterns(2, 12, seed=5), 1, None):
        try:
            search(2, pattern, faults=faults, blocks=blocks)
        except ProtocolError:
            noticed += 1
    assert noticed
