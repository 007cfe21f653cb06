"""How many tokens a tile is to hold, where a router spreads them over experts as if at random."""

import math

_DEVIATIONS = 1.5
"""By how many standard deviations a group may exceed the mean and still fit into one tile: weights are read once more
for every further tile, and a tile of eight tokens more costs little. On an H200, over means of 2 to 64, this takes on
average 4 % more than the best tile for random routing and 3 % for even counts
(benchmarks/results/gemm_tiles_a9e0add.csv)."""
_MOST = 64
"""Beyond that a larger tile costs as much as a further one."""
_ROOMY_DEVIATIONS = 3.0
"""The same where a tile of few tokens is multiplied as a narrow one, so that room costs little."""


def roomy_tokens(mean: int) -> int:
    """Tokens that hardly any group exceeds, and those of a router with favourites rarely."""
    return math.ceil(mean + _ROOMY_DEVIATIONS * math.sqrt(mean))


def crowded_tokens(*, num_groups: int, num_rows: int) -> int:
    """Tokens that few groups exceed; the mean where there is one group. It follows from the mean, rounded up."""
    mean = -(-num_rows // num_groups)
    return mean if num_groups == 1 else math.ceil(mean + _DEVIATIONS * math.sqrt(mean))


def tokens_to_hold(*, num_groups: int, num_rows: int) -> int:
    """Tokens of a tile."""
    crowded = crowded_tokens(num_groups=num_groups, num_rows=num_rows)
    return crowded if crowded <= _MOST else -(-num_rows // num_groups)
